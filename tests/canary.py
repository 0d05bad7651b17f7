"""Tensors of any strides inside a buffer full of guard values: what a kernel writes beside its elements shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MARGIN = 80  # elements before and after: more than a 512-bit vector of any type
_GUARDS = {2: (torch.int16, -0x5A5B), 4: (torch.int32, -0x5A5B5A5B), 8: (torch.int64, -0x5A5B5A5B5A5B5A5B)}


class Guarded:
    """`tensor` has the wanted shape and strides; the gaps between its elements and both margins are guarded.

    Args:
        values: what the tensor holds at first; gives the shape and the dtype.
        strides: in elements, none negative; None for contiguous. 0 repeats the first entry of a dimension.
        shift: elements to move the tensor by: 1 makes a pointer aligned to one element and nothing more.
    """

    def __init__(self, values: Tensor, strides: Sequence[int] | None = None, shift: int = 0) -> None:
        shape = values.shape
        strides = tuple(torch.empty(shape, device="meta").stride()) if strides is None else tuple(strides)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if values.numel() else 0
        integer, self._guard = _GUARDS[values.element_size()]
        self._place = (shape, strides, _MARGIN + shift)
        self._buffer = torch.full((_MARGIN + shift + span + _MARGIN,), self._guard, dtype=integer)
        self.tensor = self._buffer.view(values.dtype).as_strided(*self._place)
        _distinct(self.tensor).copy_(_distinct(values, strides))

    def assert_intact(self, what: str) -> None:
        """Fails if anything but the tensor's own elements has changed."""
        rest = self._buffer.clone()
        _distinct(rest.as_strided(*self._place)).fill_(self._guard)
        wrong = (rest != self._guard).nonzero().reshape(-1)
        assert wrong.numel() == 0, f"{what}: {wrong.numel()} guard values overwritten, the first at {int(wrong[0])}"


def _distinct(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """One entry of every dimension that repeats itself."""
    for dim, stride in enumerate(tensor.stride() if strides is None else strides):
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if stride == 0 else tensor
    return tensor
