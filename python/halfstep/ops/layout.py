"""Layout facts, once: what raw pointers cannot say.

A kernel sees a tensor as `numel` elements one after another. That holds for a dense tensor of any stride order
(contiguous, transposed, channels_last) as long as all tensors of one row share the order. Everything else is staged:
copied into a dense buffer, worked on, and copied back. overlap.py refuses memory that two writes would share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)


class PlainList(list[Tensor]):
    """Tensors that C++ has looked at (lists.py): contiguous on one device, of dtypes the kernels know. Never changed.

    Args:
        table: the native module's TensorList, which has read where they lie.
    """

    __slots__ = ("table",)

    def __init__(self, tensors: Iterable[Tensor], table: Any) -> None:
        super().__init__(tensors)
        self.table = table


def check_tensor(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Raise TypeError unless `tensor` is a dense (strided) tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name}: sparse layout {tensor.layout} is not supported; pass a dense tensor (tensor.to_dense())"
        )
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name}: dtype {tensor.dtype} of shape {tuple(tensor.shape)} is not supported; use {wanted}")


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one gap-free block of memory, each exactly once, in whatever order of dimensions.

    Not so for a lazily negated tensor (z.conj().imag), whose memory holds every number with the other sign, and for the
    zeros without memory that autograd makes.
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """True if two dense tensors of one shape hold the elements in the same order (strides of size-1 dims are free)."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True))


def as_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` itself if its elements lie in the order of `like` (dense, same shape), else a copy that does."""
    if is_dense(tensor) and same_layout(tensor, like):
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def dense_or_copy(tensor: Tensor) -> Tensor:
    """`tensor` itself if dense, else a contiguous copy: for work in place on elements whose order does not matter."""
    return tensor if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def copy_back(targets: Sequence[Tensor], work: Sequence[Tensor]) -> None:
    """After work in place: what was staged is written, and autograd hears of it. `work` has a target or its buffer."""
    if work is not targets:
        for target, buffer in zip(targets, work, strict=True):
            if buffer is not target:
                target.copy_(buffer)
    increment_version(list(targets))
