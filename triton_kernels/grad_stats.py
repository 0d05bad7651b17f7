"""First pass: the sum of squares of every chunk, in the contract's order (reference/sum_squares.py).

It is finite exactly where every element is: squares of float32 do not leave float64.
"""

import triton
import triton.language as tl

from .adam_math import inverse
from .elements import load, size_of

_LANES, _ROWS, _GROUPS = tl.constexpr(1024), tl.constexpr(8), tl.constexpr(8)


@triton.jit
def _sum_in_double(address, first, count, factor, DTYPE: tl.constexpr):
    """The squares of one group, of each lane, in float64."""
    lane = tl.arange(0, _LANES)
    total = tl.zeros((_LANES,), tl.float64)
    for r in tl.static_range(_ROWS):
        i = first + r * _LANES + lane
        u = (load(address, i, i < count, DTYPE, False) * factor).to(tl.float64)
        total = total + u * u
    return total


@triton.jit
def _lane_sums(address, count, factor, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Each lane's sum over one chunk. Groups that float32 does not hold well are added up again."""
    lane = tl.arange(0, _LANES)
    sums = tl.zeros((_LANES,), tl.float64)
    for group in range(tl.cdiv(count, _ROWS * _LANES)):
        first = group * (_ROWS * _LANES)
        partial = tl.zeros((_LANES,), tl.float32)
        something = tl.zeros((_LANES,), tl.int1)
        for r in tl.static_range(_ROWS):
            i = first + r * _LANES + lane
            u = load(address, i, i < count, DTYPE, WHOLE) * factor
            partial = partial + u * u
            something = something | (u != 0.0)  # zeros alone are exact as they are
        inexact = something & ~((partial >= 2.0**-100) & (partial <= 2.0**120))
        group_sum = partial.to(tl.float64)
        if tl.max(inexact.to(tl.int32), 0) > 0:
            group_sum = tl.where(inexact, _sum_in_double(address, first, count, factor, DTYPE), group_sum)
        sums = sums + group_sum
    return sums


@triton.jit
def chunk_sum(address, count, factor, DTYPE: tl.constexpr):
    """Sum of squares of up to 65,536 elements, float64 of shape [1]; the lanes combine as a tree."""
    if (count == _GROUPS * _ROWS * _LANES) & (address % 16 == 0):
        lanes = _lane_sums(address, count, factor, DTYPE, True)
    else:
        lanes = _lane_sums(address, count, factor, DTYPE, False)
    for k in tl.static_range(10):
        lanes = tl.sum(tl.reshape(lanes, (2, 512 >> k)), axis=0)  # two terms: their order does not matter
    return lanes


@triton.jit(do_not_specialize_on_alignment=["addresses", "numels", "firsts", "work", "scale"])
def grad_stats_kernel(addresses, numels, firsts, work, scale, sums, DTYPE: tl.constexpr):
    """sums[chunk] of tensors of one dtype, one program per chunk.

    Args:
        addresses, numels, firsts: int64, of each tensor: where it is, its elements, the number of its first chunk.
        work: int64 of each program (ops/triton_tables.py): which tensor, which of its chunks.
        scale: null, or float32 [1]; the elements are multiplied with f32(1 / scale).
        sums: float64 of each chunk.
    """
    task = tl.load(work + tl.program_id(0))
    row, chunk = task >> 32, task & 0xFFFFFFFF
    begin = chunk * (_GROUPS * _ROWS * _LANES)
    count = tl.minimum(tl.load(numels + row) - begin, _GROUPS * _ROWS * _LANES).to(tl.int32)
    factor = 1.0 if scale is None else inverse(tl.load(scale))
    address = tl.load(addresses + row) + begin * size_of(DTYPE)
    total = chunk_sum(address, count, factor, DTYPE)
    tl.store(sums + tl.load(firsts + row) + chunk + tl.arange(0, 1), total)
