"""The examples in the docstrings of everything public run, and show what they say."""

from __future__ import annotations

import doctest

import pytest
import torch

import halfstep as hs

PUBLIC = {name: getattr(hs, name) for name in hs.__all__ if name != "__version__"}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name, capsys):
    torch.manual_seed(0)
    tests = doctest.DocTestFinder().find(PUBLIC[name], name, globs={"hs": hs, "torch": torch})
    examples = {test.name: test.examples for test in tests}
    assert examples[name], f"the docstring of halfstep.{name} has no example"
    for test in tests:  # methods too
        results = doctest.DocTestRunner().run(test)
        assert results.failed == 0, capsys.readouterr().out
