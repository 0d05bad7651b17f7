"""hs.checkpoint on the oldest torch: torch.utils.checkpoint of 2.10 has no policies that offload, and no helper of that
name for aliases.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from bits import assert_same_bits
from checkpointed import keep_all, stack
from torch.utils import checkpoint as torch_checkpoint

from halfstep.activations import kept


@pytest.fixture
def on_the_oldest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE")
    monkeypatch.setattr(torch_checkpoint, "CheckpointPolicy", enum.Enum("CheckpointPolicy", names))
    monkeypatch.delattr(torch_checkpoint, "_detach_helper", raising=False)
    spec = importlib.util.spec_from_file_location("kept_on_the_oldest", kept.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_results_are_kept(on_the_oldest: ModuleType) -> None:
    block, x = stack(1).blocks[0], torch.randn(2, 5, 16, requires_grad=True)
    contexts = functools.partial(on_the_oldest.contexts, keep_all)
    grads = []
    for options in ({}, {"context_fn": contexts}):
        torch.manual_seed(0)
        out = torch_checkpoint.checkpoint(block, x, use_reentrant=False, **options)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *block.parameters()]))
    for plain, with_kept in zip(*grads, strict=True):
        assert_same_bits(with_kept, plain, "gradient")
