"""Operators that go over each element once: scale, cast, accumulate."""

import triton
import triton.language as tl

from .elements import (
    FLOAT16,
    FLOAT32,
    bits_of,
    is_finite,
    load,
    narrowed,
    narrowed_at_random,
    size_of,
    store,
    store_half_bits,
    store_words,
    widened,
)
from .philox import STREAM_WEIGHT, random_words


@triton.jit
def _task(work, numels, SHARE: tl.constexpr):
    """Of this program: the tensor, the first element, how many."""
    task = tl.load(work + tl.program_id(0))
    row, begin = task >> 32, (task & 0xFFFFFFFF) * SHARE
    return row, begin, tl.minimum(tl.load(numels + row) - begin, SHARE).to(tl.int32)


# ---- x = round(x * factor) -------------------------------------------------------------------------------------------
@triton.jit
def _scale_tiles(
    address, count, factor, tile, tiles, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Returns a number > 0 if a stored value is not finite: what was stored counts, for float16 overflows there."""
    nonfinite = tl.zeros((BLOCK,), tl.int32)
    for k in range(tile, tiles):
        i = k * BLOCK + tl.arange(0, BLOCK)
        x = load(address, i, i < count, DTYPE, WHOLE) * factor
        if DTYPE == FLOAT32:
            store_words(address, i, x, i < count, WHOLE)
        else:
            bits = narrowed(x, DTYPE)
            if DTYPE == FLOAT16:  # AMD's one instruction for product and rounding adds +0 with Triton 3.6, also to -0
                bits = (bits & 0x7FFF) | ((bits_of(x) >> 16) & 0x8000)
            store_half_bits(address, i, bits, i < count, WHOLE)
            x = widened(bits, DTYPE)
        nonfinite = nonfinite | ((i < count) & ~is_finite(x)).to(tl.int32)
    return tl.max(nonfinite, 0)


@triton.jit
def scale_share(address, count, factor, DTYPE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """x = round(x * factor) of `count` elements; returns whether one is not finite then."""
    whole = tl.where(address % 16 == 0, count // BLOCK, 0)
    nonfinite = _scale_tiles(address, count, factor, 0, whole, DTYPE, BLOCK, True)
    first = whole * (BLOCK // REST)
    nonfinite |= _scale_tiles(address, count, factor, first, tl.cdiv(count, REST), DTYPE, REST, False)
    return nonfinite > 0


@triton.jit(do_not_specialize_on_alignment=["addresses", "numels", "work", "factor", "first_bad"])
def scale_kernel(
    addresses, numels, work, factor, first_bad,
    DTYPE: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Tensors of one dtype, one program per SHARE elements of one.

    Args:
        addresses, numels: int64 of each tensor. work: int64 of each program (ops/triton_tables.py).
        factor: float32 [1]. first_bad: int64 [1], -1 before; the first tensor that has a value that is not finite.
    """
    row, begin, count = _task(work, numels, SHARE)
    address = tl.load(addresses + row) + begin * size_of(DTYPE)
    if scale_share(address, count, tl.load(factor), DTYPE, BLOCK, REST):
        tl.atomic_min(first_bad.to(tl.pointer_type(tl.uint64), bitcast=True), row.to(tl.uint64))  # -1 is the largest


# ---- dst = round(src), dst = dst + src -------------------------------------------------------------------------------
@triton.jit
def _cast_tiles(
    dst, src, count, tensor, seed, first_index, tile, tiles,
    DST: tl.constexpr, SRC: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for k in range(tile, tiles):
        i = k * BLOCK + tl.arange(0, BLOCK)
        x = load(src, i, i < count, SRC, WHOLE)
        if AT_RANDOM and DST != FLOAT32:
            words = random_words(first_index + k * BLOCK, tensor, STREAM_WEIGHT, seed, tensor & 0, BLOCK, WHOLE)
            store_half_bits(dst, i, narrowed_at_random(x, words, DST), i < count, WHOLE)
        else:
            store(dst, i, x, i < count, DST, WHOLE)


@triton.jit
def cast_share(
    dst, src, count, tensor, seed, first_index,
    DST: tl.constexpr, SRC: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dst = round(src) of `count` elements, the first of which is first_index of the tensor, a multiple of 4."""
    whole = tl.where((dst | src) % 16 == 0, count // BLOCK, 0)
    _cast_tiles(dst, src, count, tensor, seed, first_index, 0, whole, DST, SRC, AT_RANDOM, BLOCK, True)
    first, tiles = whole * (BLOCK // REST), tl.cdiv(count, REST)
    _cast_tiles(dst, src, count, tensor, seed, first_index, first, tiles, DST, SRC, AT_RANDOM, REST, False)


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["dsts", "srcs", "numels", "work"])
def cast_kernel(
    dsts, srcs, numels, work, seed: tl.int64,
    DST: tl.constexpr, SRC: tl.constexpr, AT_RANDOM: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dst = round(src) of pairs of two dtypes. Stochastic: Philox key (seed, 0), parameter id the tensor, stream 0.

    Args:
        dsts, srcs, numels: int64 of each pair. work: int64 of each program (ops/triton_tables.py). seed: a uint32.
    """
    row, begin, count = _task(work, numels, SHARE)
    dst, src = tl.load(dsts + row) + begin * size_of(DST), tl.load(srcs + row) + begin * size_of(SRC)
    cast_share(dst, src, count, row.to(tl.uint32), seed.to(tl.uint32), begin, DST, SRC, AT_RANDOM, BLOCK, REST)


@triton.jit
def _accumulate_tiles(dst, src, count, tile, tiles, SRC: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    for k in range(tile, tiles):
        i = k * BLOCK + tl.arange(0, BLOCK)
        total = load(dst, i, i < count, FLOAT32, WHOLE) + load(src, i, i < count, SRC, WHOLE)
        store_words(dst, i, total, i < count, WHOLE)


@triton.jit(do_not_specialize_on_alignment=["dsts", "srcs", "numels", "work"])
def accumulate_kernel(
    dsts, srcs, numels, work, SRC: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """dst = dst + f32(src), dst float32; arguments as cast_kernel's."""
    row, begin, count = _task(work, numels, SHARE)
    dst, src = tl.load(dsts + row) + begin * 4, tl.load(srcs + row) + begin * size_of(SRC)
    whole = tl.where((dst | src) % 16 == 0, count // BLOCK, 0)
    _accumulate_tiles(dst, src, count, 0, whole, SRC, BLOCK, True)
    _accumulate_tiles(dst, src, count, whole * (BLOCK // REST), tl.cdiv(count, REST), SRC, REST, False)
