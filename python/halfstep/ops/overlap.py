"""Memory that a call writes must be nobody else's: an in-place result would depend on the order of threads."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, gt

import torch
from torch import Tensor

from .layout import is_dense

# Elements up to which two interleaved tensors are compared address by address
_ENUMERABLE = 100_000
_bytes = attrgetter("nbytes")


def check_writable(
    writes: Sequence[Tensor], names: Sequence[str], reads: Sequence[Tensor] = (), read_names: Sequence[str] = ()
) -> None:
    """Raise ValueError if in-place writes would collide: within one tensor, between two, or with one that is read.

    Views of one buffer that do not overlap (rows, columns, every third element) are fine.

    Args:
        writes, names: tensors written in place, and what to call them.
        reads, read_names: tensors only read.
    """
    tensors, labels = [*writes, *reads], [*names, *read_names]
    if _plainly_apart(tensors):
        return
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        if index < len(writes) and _overlaps_itself(tensor):
            raise ValueError(
                f"{labels[index]}: shape {tuple(tensor.shape)} with strides {tensor.stride()} maps several elements to "
                "the same memory (an expanded tensor?), so it cannot be updated in place; pass tensor.contiguous()"
            )
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.data_ptr() + (last + 1) * tensor.element_size()
        spans.append((str(tensor.device), tensor.data_ptr(), end, index))
    active: list[tuple[str, int, int]] = []  # (device, end, index) of the spans that reach past the current start
    for device, start, end, index in sorted(spans):
        active = [(d, e, i) for d, e, i in active if d == device and e > start]
        for _, _, other in active:
            if min(index, other) < len(writes) and _share_an_element(tensors[other], tensors[index]):
                raise ValueError(
                    f"{labels[other]} and {labels[index]} share memory, so writing in place would corrupt one of them; "
                    "pass each tensor once, and views of one buffer only if they do not overlap"
                )
        active.append((device, end, index))


def _plainly_apart(tensors: Sequence[Tensor]) -> bool:
    """The usual case in bulk, as it runs every step: contiguous tensors of one device, one after another in memory."""
    if not all(map(Tensor.is_contiguous, tensors)) or len({t.device for t in tensors}) > 1:
        return False
    starts = list(map(Tensor.data_ptr, tensors))
    ends = [start + size for start, size in zip(starts, map(_bytes, tensors), strict=True)]
    starts.sort()
    ends.sort()
    return 0 not in starts and not any(map(gt, ends, starts[1:]))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Conservative for exotic strides: a dimension must step over all that the smaller ones span."""
    span = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False


def _share_an_element(a: Tensor, b: Tensor) -> bool:
    """Of two tensors whose address ranges overlap: exact for small ones, true for large ones not shown to be apart."""
    if is_dense(a) and is_dense(b):
        return True
    periods = {n for t in (a, b) for n in _byte_strides(t)}
    if any(_apart_in_a_period(a, b, period) for period in periods):
        return False
    if a.numel() + b.numel() > _ENUMERABLE:
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _byte_strides(tensor: Tensor) -> list[int]:
    return [s * tensor.element_size() for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0]


def _apart_in_a_period(a: Tensor, b: Tensor, period: int) -> bool:
    """True if the tensors keep to different parts of every `period` bytes, as columns of a matrix do of its rows."""
    parts = []
    for tensor in (a, b):
        inside = [
            (n - 1) * s * tensor.element_size()
            for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            if (s * tensor.element_size()) % period
        ]
        parts.append((tensor.data_ptr() % period, sum(inside) + tensor.element_size()))
    (start, length), (other, other_length) = parts
    distance = (other - start) % period
    return length <= distance and distance + other_length <= period


def _addresses(tensor: Tensor) -> Tensor:
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size, device="cpu") * stride).reshape(-1)
    first_byte = offsets * tensor.element_size() + tensor.data_ptr()
    return (first_byte[:, None] + torch.arange(tensor.element_size(), device="cpu")).reshape(-1)
