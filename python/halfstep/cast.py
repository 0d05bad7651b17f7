"""cast_, accumulate_: pairs of tensors, many in one call: converted, or added up in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import cast as cast_ops
from .ops import lists
from .ops import schemas as _schemas  # noqa: F401  registers torch.ops.halfstep
from .ops.layout import DTYPES, check_tensor
from .ops.overlap import check_writable
from .shards import refuse_sharded


@torch.no_grad()
def cast_(dst_list: Sequence[Tensor], src_list: Sequence[Tensor], rounding: str = "nearest", seed: int = 0) -> None:
    """Writes every source into its destination, converted, in one multi-tensor call.

    Args:
        dst_list: float32, bfloat16 or float16 tensors, any strides (expanded ones are refused); written in place.
        src_list: as many tensors of the same shapes and device, any of those dtypes.
        rounding: "nearest" (to nearest even; NaN stays NaN, float16 overflows to Inf) or "stochastic" (up with
            probability equal to the dropped fraction; the random word of an element depends on `seed`, the position in
            the list and the element's row-major index alone: Philox-4x32-10).
        seed: 0 .. 2**32 - 1, for rounding="stochastic".

    Bytes moved per element: the two item sizes (4 + 2 for float32 to bfloat16).

    Raises:
        ValueError: lists of different lengths, shapes or devices differ, an unknown rounding, a seed out of range,
            destinations that overlap themselves or each other, or a source that shares memory with a destination (a
            tensor may be its own source).
        TypeError: another dtype, a sparse tensor, or a DTensor.

    Example:
        >>> weights = [torch.empty(3, dtype=torch.bfloat16)]
        >>> hs.cast_(weights, [torch.tensor([1.0, 2.0, 3.0])])
        >>> weights[0].tolist()
        [1.0, 2.0, 3.0]
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r}: expected 'nearest' or 'stochastic'")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: expected an integer from 0 to 2**32 - 1")
    dst, src = _paired(dst_list, src_list)
    stochastic = rounding == "stochastic"
    if torch.compiler.is_compiling():
        _check_pairs(dst, src)
        torch.ops.halfstep.cast_(dst, src, stochastic, seed)
        return
    plain = lists.read_pairs(dst, src)
    if plain is not None:
        cast_ops.cast_(*plain, stochastic, seed)
        return
    _check_pairs(dst, src)
    _check_memory(dst, src)
    cast_ops.cast_(dst, src, stochastic, seed)


@torch.no_grad()
def accumulate_(dst_list: Sequence[Tensor], src_list: Sequence[Tensor]) -> None:
    """Adds every source to its float32 destination, in one multi-tensor call: dst = dst + f32(src), rounded once.

    For gradients of several micro-batches: a 16-bit sum of them stops growing when the next one is below half its
    spacing (a bfloat16 sum of equal gradients after 256 of them), a float32 sum does not.

    Args:
        dst_list: float32 tensors, any strides (expanded ones are refused); written in place.
        src_list: as many tensors of the same shapes and device, float32, bfloat16 or float16, any strides; read only.

    Bytes moved per element: 8 and the source's item size (10 for a bfloat16 source).

    Raises: as `cast_`, and TypeError for a destination that is not float32. A tensor that is its own source is doubled.

    Example:
        >>> total, gradient = torch.zeros(2), torch.tensor([1.0, 0.5], dtype=torch.bfloat16)
        >>> for _ in range(1000):
        ...     hs.accumulate_([total], [gradient])
        >>> total.tolist()
        [1000.0, 500.0]
    """
    dst, src = _paired(dst_list, src_list)
    if torch.compiler.is_compiling():
        _check_pairs(dst, src, (torch.float32,))
        torch.ops.halfstep.accumulate_(dst, src)
        return
    plain = lists.read_pairs(dst, src)
    if plain is not None and lists.are_float32(plain[0]):
        cast_ops.accumulate_(*plain)
        return
    _check_pairs(dst, src, (torch.float32,))
    _check_memory(dst, src)
    cast_ops.accumulate_(dst, src)


def _paired(dst_list: Sequence[Tensor], src_list: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    dst, src = list(dst_list), list(src_list)
    if len(dst) != len(src):
        raise ValueError(
            f"dst_list has {len(dst)} tensors and src_list {len(src)}; they are paired, so give as many of each"
        )
    return dst, src


def _check_pairs(dst: list[Tensor], src: list[Tensor], dst_dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    for i, (d, s) in enumerate(zip(dst, src, strict=True)):
        check_tensor(d, f"dst_list[{i}]", dst_dtypes)
        check_tensor(s, f"src_list[{i}]")
        refuse_sharded(d, f"dst_list[{i}]")
        refuse_sharded(s, f"src_list[{i}]")
        if d.shape != s.shape:
            raise ValueError(
                f"dst_list[{i}] has shape {tuple(d.shape)} and src_list[{i}] {tuple(s.shape)}; pairs need one shape"
            )
        if d.device != s.device or d.device != dst[0].device:
            raise ValueError(
                f"pair {i} is on {d.device} and {s.device}, the first on {dst[0].device}; use one device a call"
            )


def _check_memory(dst: list[Tensor], src: list[Tensor]) -> None:
    """A pair of one and the same tensor overwrites itself with itself; any other shared memory is a race."""
    reads = [(f"src_list[{i}]", s) for i, (d, s) in enumerate(zip(dst, src, strict=True)) if s is not d]
    names = [f"dst_list[{i}]" for i in range(len(dst))]
    check_writable(dst, names, [s for _, s in reads], [name for name, _ in reads])
