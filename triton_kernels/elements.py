"""Elements to and from memory in each dtype, and the bit patterns they are rounded to.

Addresses are int64 numbers, as they come out of a table in device memory: nothing is known of their alignment. So
a tile is moved in accesses of 16 bytes only where the caller has looked: WHOLE, all of its elements exist and all
addresses are multiples of 16. bfloat16 is never a Triton type here: the interpreter truncates where a GPU rounds.

The same bits as csrc/rounding.h, up to which NaN a NaN becomes.
"""

import triton
import triton.language as tl

FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INF = tl.constexpr(0x7F800000)  # of float32, sign removed; above it are the NaNs


@triton.jit
def size_of(DTYPE: tl.constexpr):
    """Bytes of an element."""
    return 4 if DTYPE == FLOAT32 else 2


@triton.jit
def _words_at(address, WHOLE: tl.constexpr):
    """Pointer to 32-bit words."""
    if WHOLE:
        return tl.multiple_of(((address // 16) * 16).to(tl.pointer_type(tl.uint32)), 16)
    else:
        return address.to(tl.pointer_type(tl.uint32))


@triton.jit
def _halves_at(address, WHOLE: tl.constexpr):
    """Pointer to 16-bit words."""
    if WHOLE:
        return tl.multiple_of(((address // 16) * 16).to(tl.pointer_type(tl.uint16)), 16)
    else:
        return address.to(tl.pointer_type(tl.uint16))


@triton.jit
def load_half_bits(address, i, exists, WHOLE: tl.constexpr):
    """16-bit patterns of elements i, in the lower half of uint32."""
    if WHOLE:
        return tl.load(_halves_at(address, True) + i).to(tl.uint32)
    else:
        return tl.load(_halves_at(address, False) + i, mask=exists, other=0).to(tl.uint32)


@triton.jit
def store_half_bits(address, i, bits, exists, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(_halves_at(address, True) + i, bits.to(tl.uint16))
    else:
        tl.store(_halves_at(address, False) + i, bits.to(tl.uint16), mask=exists)


@triton.jit
def load(address, i, exists, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Elements i as float32; 0 where there is none."""
    if DTYPE == FLOAT32:
        if WHOLE:
            bits = tl.load(_words_at(address, True) + i)
        else:
            bits = tl.load(_words_at(address, False) + i, mask=exists, other=0)
        return float_of(bits)
    else:
        return widened(load_half_bits(address, i, exists, WHOLE), DTYPE)


@triton.jit
def store_words(address, i, x, exists, WHOLE: tl.constexpr):
    """float32 as it is."""
    if WHOLE:
        tl.store(_words_at(address, True) + i, bits_of(x))
    else:
        tl.store(_words_at(address, False) + i, bits_of(x), mask=exists)


@triton.jit
def store(address, i, x, exists, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """float32 rounded to nearest."""
    if DTYPE == FLOAT32:
        store_words(address, i, x, exists, WHOLE)
    else:
        store_half_bits(address, i, narrowed(x, DTYPE), exists, WHOLE)


# ---- bit patterns ----------------------------------------------------------------------------------------------------
@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    return (bits_of(x) & INF) != INF


@triton.jit
def widened(bits, DTYPE: tl.constexpr):
    """float32 of 16-bit patterns."""
    if DTYPE == BFLOAT16:
        return float_of(bits << 16)
    else:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """16-bit patterns of float32, to nearest even; NaN stays NaN, what float16 cannot hold becomes Inf."""
    if DTYPE == BFLOAT16:
        u = bits_of(x)
        nearest = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return tl.where(x != x, (u >> 16) | 0x40, nearest)
    else:
        return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def narrowed_at_random(x, word, DTYPE: tl.constexpr):
    """16-bit patterns of float32, up with a probability of the dropped fraction; `word` is uniform over 32 bits."""
    if DTYPE == BFLOAT16:
        u = bits_of(x)
        upper = u >> 16
        rounded = (u + (word & 0xFFFF)) >> 16
        return tl.where(is_finite(x), rounded, tl.where(x != x, upper | 0x40, upper))
    else:
        return _half_at_random(x, word)


@triton.jit
def _half_at_random(x, word):
    """The magnitude in units of float16's grid, as fixed point with 32 fraction bits, plus the word, truncated."""
    u = bits_of(x)
    magnitude = u & 0x7FFFFFFF
    biased = (magnitude >> 23).to(tl.int32)
    normal = biased > 0
    exponent = tl.where(normal, biased - 127, -126)
    significand = tl.where(normal, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    # 13 bits or more are dropped; below float16's normals so many that fewer than the 32 of the fraction are left
    dropped = tl.where(exponent >= -14, 13, -1 - exponent).to(tl.uint32)
    some = dropped < 32
    fraction = tl.where(some, significand << ((32 - dropped) & 31), significand >> (tl.minimum(dropped, 63) & 31))
    units = tl.where(some, significand >> (dropped & 31), 0)
    units += ((fraction + word) < word).to(tl.uint32)  # the carry of the fractions
    base = tl.where(exponent >= -14, exponent + 14, 0).to(tl.uint32) << 10
    bits = base + units  # a carry out of 65504 ends at Inf
    special = tl.where(magnitude > INF, 0x7E00, 0x7C00).to(tl.uint32)
    return tl.where(magnitude >= 0x47800000, special, bits) | ((u >> 16) & 0x8000)


# ---- split master ----------------------------------------------------------------------------------------------------
@triton.jit
def split_weight(x):
    """The visible bfloat16 pattern: the upper half, rounded half away from zero."""
    u = bits_of(x)
    return tl.where(x != x, ((u >> 16) & 0x8000) | 0x7FC0, (u + 0x8000) >> 16)


@triton.jit
def split_remainder(x):
    """The 16 bits missing in it."""
    return tl.where(x != x, 0, bits_of(x) & 0xFFFF)


@triton.jit
def join_master(weight, remainder):
    """float32 of the two patterns. A remainder counts only where it keeps the magnitude between 0 and Inf."""
    w = weight << 16
    magnitude = w & 0x7FFFFFFF
    negative = (remainder & 0x8000) != 0
    extended = tl.where(negative, remainder | 0xFFFF0000, remainder)
    leaves = ((magnitude == 0) & negative) | ((magnitude == INF) & (negative == 0))
    return float_of(w + tl.where(leaves, 0, extended))
