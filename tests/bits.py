"""Comparison of tensors bit for bit: all NaNs are one value (processors make different ones), -0 is not 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """Integer patterns in logical order; every NaN is the largest integer (which is itself the pattern of a NaN)."""
    integers = x.detach().resolve_neg().contiguous().view(_INTEGERS[x.element_size()])
    if not x.is_floating_point():
        return integers
    return torch.where(x.isnan(), torch.iinfo(integers.dtype).max, integers)


def assert_same_bits(got: Tensor | None, expected: Tensor | None, what: str) -> None:
    """`what` names the tensor in the message, which shows the first difference."""
    if expected is None or got is None:
        assert got is expected, f"{what}: one is missing"
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    different = bits(got) != bits(expected)
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {got.numel()} elements differ, the first at {where}: "
            f"got {got[where].item()!r}, expected {expected[where].item()!r}"
        )


def assert_all_same_bits(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(g, e, f"{what}, tensor {i}")
