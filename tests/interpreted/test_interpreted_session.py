"""Which Triton this session runs on, and that it interprets."""

from __future__ import annotations

import os
from pathlib import Path

import triton

from halfstep.triton_kernels import update


def test_kernels_are_interpreted() -> None:
    assert type(update.update_kernel).__name__ == "InterpretedFunction"
    assert triton.knobs.runtime.interpret


def test_triton_is_the_one_that_was_asked_for(pytestconfig) -> None:
    """`make test` has a session with the Triton that came with torch, and one with the oldest that is supported."""
    wanted = pytestconfig.getoption("--triton")
    if wanted is not None:
        assert triton.__version__ == wanted
    else:
        folders = [Path(folder).resolve() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        assert not any(Path(triton.__file__).is_relative_to(folder) for folder in folders)
