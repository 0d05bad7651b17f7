"""Layout facts, once: what raw pointers cannot say.

A kernel sees a tensor as `numel` elements one after another. That holds for a dense tensor of any stride order
(contiguous, transposed, channels_last) as long as all tensors of one row share the order. Everything else is staged:
copied into a dense buffer, worked on, and copied back. Memory shared in ways that make an in-place result depend on
the order of writes is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)


def check_tensor(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Raise TypeError unless `tensor` is a dense (strided) tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: sparse layout {tensor.layout} is not supported; pass a dense tensor (tensor.to_dense())")
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name}: dtype {tensor.dtype} of shape {tuple(tensor.shape)} is not supported; use {wanted}")


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one gap-free block of memory, each exactly once, in whatever order of dimensions."""
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
    return tensor if is_dense(tensor) else tensor.contiguous()


def check_writable(
    writes: Sequence[Tensor], names: Sequence[str], reads: Sequence[Tensor] = (), read_names: Sequence[str] = ()
) -> None:
    """Raise ValueError if in-place writes would collide: within one tensor, between two, or with one that is read.

    Args:
        writes, names: tensors written in place, and what to call them.
        reads, read_names: tensors only read; one that *is* a written tensor (the same object) is allowed.
    """
    written = {id(t) for t in writes}
    tensors = [*writes, *(r for r in reads if id(r) not in written)]
    labels = [*names, *(n for r, n in zip(reads, read_names, strict=True) if id(r) not in written)]
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        if index < len(writes) and _overlaps_itself(tensor):
            raise ValueError(
                f"{labels[index]}: shape {tuple(tensor.shape)} with strides {tensor.stride()} maps several elements to "
                "the same memory (an expanded tensor?), so it cannot be updated in place; pass tensor.contiguous()"
            )
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), index))
    active: list[tuple[int, int]] = []  # (end, index) of the spans that reach past the current start
    for start, end, index in sorted(spans):
        active = [(e, i) for e, i in active if e > start]
        for _, other in active:
            if min(index, other) < len(writes) and _share_an_element(tensors[other], tensors[index]):
                raise ValueError(
                    f"{labels[other]} and {labels[index]} share memory, so writing in place would corrupt one of them; "
                    "pass each tensor once, and views of one buffer only if they do not overlap"
                )
        active.append((end, index))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Conservative for exotic strides: a dimension must step over all that the smaller ones span."""
    span = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False


def _share_an_element(a: Tensor, b: Tensor) -> bool:
    """Exact: the sets of byte addresses of the elements (needed only where two address ranges interleave)."""
    if is_dense(a) and is_dense(b):
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: Tensor) -> Tensor:
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    first_byte = offsets * tensor.element_size() + tensor.data_ptr()
    return (first_byte[:, None] + torch.arange(tensor.element_size())).reshape(-1)
