"""The random words of stochastic rounding, as csrc/philox.h: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).

Key (seed, t), counter (e / 4 low, e / 4 high, parameter id, stream), word e % 4 of element e of the global parameter.
"""

import triton
import triton.language as tl

STREAM_WEIGHT, STREAM_EXP_AVG = tl.constexpr(0), tl.constexpr(1)
STREAM_EXP_AVG_SQ, STREAM_MAX_EXP_AVG_SQ = tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _quads(quad, param_id, stream, seed, t):
    """The words of elements 4 * quad to 4 * quad + 3, for each quad (uint64)."""
    low, high = quad.to(tl.uint32), (quad >> 32).to(tl.uint32)
    zero = low & 0
    return tl.philox_impl(low, high, zero + param_id, zero + stream, zero + seed, zero + t)


@triton.jit
def random_words(first, param_id, stream: tl.constexpr, seed, t, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """uint32 words of elements first to first + BLOCK - 1.

    Args:
        first: int64 scalar. param_id, seed, t: uint32 scalars.
        WHOLE: first is a multiple of 4. Known when compiled: a branch here would cost layouts, and registers, of both.
    """
    if WHOLE:  # a quad serves four neighbours
        quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint64)
        a, b, c, d = _quads(quad, param_id, stream, seed, t)
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    else:
        element = first + tl.arange(0, BLOCK)
        a, b, c, d = _quads((element // 4).to(tl.uint64), param_id, stream, seed, t)
        place = element % 4
        words = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    return words
