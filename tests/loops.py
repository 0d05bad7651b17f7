"""A tiny model that learns something, its batches, and what a run has left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from adversarial import FLOAT32, generator
from bits import assert_same_bits
from torch import Tensor, nn

INPUTS, CLASSES, BATCH = 12, 5, 8


def tiny_model(dtype: torch.dtype = FLOAT32, seed: int = 0) -> nn.Sequential:
    """Weights from a seed of their own; the global generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(INPUTS, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES)).to(dtype)


def batch(t: int) -> tuple[Tensor, Tensor]:
    """([BATCH, INPUTS] float32, [BATCH] classes that depend on it) of step t."""
    inputs = torch.randn(BATCH, INPUTS, generator=generator(t))
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def loss_of(model: nn.Module, t: int) -> Tensor:
    """Of step t's batch, in float32 at least."""
    inputs, classes = batch(t)
    logits = model(inputs.to(next(model.parameters()).dtype))
    return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, FLOAT32)), classes)


def tensors_in(tree: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of nested dicts, lists and tuples, with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from tensors_in(value, f"{name}[{i}]")
    else:
        yield name, tree


def assert_same_tree(got: Any, expected: Any) -> None:
    """The same keys, the same bits, the same settings."""
    mine, theirs = dict(tensors_in(got)), dict(tensors_in(expected))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert_same_bits(mine[name], value, name)
        else:
            assert mine[name] == value, name
