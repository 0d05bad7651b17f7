"""What a score is: scale, cap, slope, bias, masks, dropout; one meaning for every kernel, whichever way its tiles lie.

Queries i and keys j are index tensors that broadcast against each other, [M, 1] and [1, N] or [1, M] and [N, 1].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .segments import number

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


class Rules(NamedTuple):
    """What is None does not exist in the compiled kernel. Integers are `plain` (launch.py)."""

    factor: Any  # scores * factor are in units of log2: scale * log2(e) if PLAIN, log2(e) if not
    scale: Any
    softcap: Any
    left: Any
    right: Any  # always there: causal or not is one kernel
    mask: Any  # uint8
    mask_strides: Any  # of segment, head, query, key; the last is None if it is 1
    bias: Any
    bias_strides: Any
    slopes: Any  # float32
    slope_strides: Any  # of segment, head
    seed: Any  # int64
    threshold: Any  # of random words, its upper and lower half
    keep: Any  # 1 / (1 - dropout_p)


class Stats(NamedTuple):
    """What the backward pass knows of each row, [batch, heads, rows]; pointers, or numbers of some rows."""

    row_stat: Any
    log_sum: Any  # None without a bias
    delta: Any


@triton.jit
def _tanh(x):
    a = tl.abs(x)
    e = tl.math.exp2(a * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    # below 0.3 the difference would cancel: Taylor's series, whose next term is 2e-9 of the value
    s = a * a
    near = a * (1 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835 - s * (1382 / 155925))))))
    t = tl.where(a < 0.3, near, far)
    return tl.where(x < 0, -t, t)


@triton.jit
def scores(products, i, j, m, n, at, head, rules, C: tl.constexpr):
    """(scores, tanh of the capped ones), -inf where the mask hides the key; ranges are `within`'s.

    Args:
        m, n: the first query and key.
        at: the Segment.
    """
    x, t = products, products
    if rules.softcap is not None:
        t = _tanh(x * (rules.scale / rules.softcap))
        x = t * rules.softcap
    elif not C.PLAIN:
        x = x * rules.scale
    if rules.slopes is not None:
        slope = tl.load(
            rules.slopes + number(rules.slope_strides[0]) * at.index + number(rules.slope_strides[1]) * head
        )
        x -= slope * tl.abs(i + at.shift - j).to(x.dtype)
    exists = (i < at.q_length) & (j < at.k_length)
    if rules.bias is not None:
        where = _places(rules.bias, rules.bias_strides, at.index, head, i, j, m, n)
        x += tl.load(where, mask=exists, other=0).to(x.dtype)
    if rules.mask is not None:
        where = _places(rules.mask, rules.mask_strides, at.index, head, i, j, m, n)
        x = tl.where(tl.load(where, mask=exists, other=0) != 0, x, -INF)
    return x, t


@triton.jit
def _places(ptr, strides, segment, head, i, j, m, n):
    """Pointers. What entries have in common is added up apart, so that few pointers are kept."""
    ptr += number(strides[0]).to(tl.int64) * segment + number(strides[1]).to(tl.int64) * head
    rows = ptr + number(strides[2]).to(tl.int64) * m + number(strides[2]).to(tl.int64) * (i - m)
    if strides[3] is None:
        return rows + n + (j - n)
    else:
        return rows + number(strides[3]).to(tl.int64) * n + number(strides[3]).to(tl.int64) * (j - n)


@triton.jit
def kept(i, n, at, head, rules, BLOCK_N: tl.constexpr):
    """Which entries [M, BLOCK_N] of queries i [M] and keys n, n + 1, ... dropout keeps; n is a multiple of 4.

    Four neighbours share a call of Philox, whatever the tile.
    """
    seed = tl.load(rules.seed)
    quad = (n // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)[None, :]
    row = i.to(tl.uint32)[:, None]
    zero = row * 0 + quad * 0
    a, b, c, d = tl.philox_impl(
        zero + quad, zero + row, zero + head.to(tl.uint32), zero + at.index.to(tl.uint32), zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    threshold = (number(rules.threshold[0]).to(tl.uint32) << 16) | number(rules.threshold[1]).to(tl.uint32)
    return words >= threshold


# ---- backward --------------------------------------------------------------------------------------------------------
@triton.jit
def row_stat(lse, log_sum_ptr, where, exists):
    """One number of each row for `probabilities`, of its LSE: the LSE in units of log2; with a bias the row's maximum.
    +inf for rows that see nothing, and beyond the last: all their probabilities are 0.

    An additive mask of dtype.min makes the row's maximum so large that the LSE is that maximum, and nothing is left of
    the sum; it also may not be multiplied by log2(e) before the maximum is subtracted.
    """
    lse = tl.where(lse == -INF, INF, lse)
    if log_sum_ptr is None:
        return lse * LOG2E
    else:
        return lse - tl.load(log_sum_ptr + where, mask=exists, other=0)


@triton.jit
def load_stats(stats, first, i, length, ALL: tl.constexpr):
    """(row stat, log_sum or anything, delta) of rows i; a head's numbers begin at `first`. ALL: all of them exist."""
    if ALL:
        stat, delta = tl.load(stats.row_stat + first + i), tl.load(stats.delta + first + i)
    else:
        stat = tl.load(stats.row_stat + first + i, mask=i < length, other=INF)
        delta = tl.load(stats.delta + first + i, mask=i < length, other=0)
    if stats.log_sum is None:
        return stat, stat, delta
    else:
        return stat, tl.load(stats.log_sum + first + i, mask=i < length, other=0), delta


@triton.jit
def probabilities(x, stat, log_sum, rules):
    if rules.bias is None:
        return tl.math.exp2(tl.fma(x, rules.factor, -stat))
    else:
        return tl.math.exp2((x - stat - log_sum) * LOG2E)


@triton.jit
def score_gradients(p, d_p, t, delta, keep, rules):
    """(dS, the gradient of the products up to the scale); keep: see `kept`."""
    if rules.seed is not None:
        d_p = tl.where(keep, d_p * rules.keep, 0.0)
    d_s = p * (d_p - delta)
    if rules.softcap is not None:
        return d_s, d_s * (1 - t * t)
    else:
        return d_s, d_s


# ---- ranges ----------------------------------------------------------------------------------------------------------
class Limits(NamedTuple):
    """First and last that each row of a tile may be paired with. (Anything where there is no limit: the oldest Triton
    takes no None in what a function returns.)"""

    low: Any
    high: Any


@triton.jit
def key_limits(i, at, rules):
    """Keys that queries i see."""
    high = tl.minimum(i + (at.shift + number(rules.right)), at.k_length - 1)
    low = high
    if rules.left is not None:
        low = i + (at.shift - number(rules.left))
    return Limits(low, high)


@triton.jit
def query_limits(j, at, rules):
    """Queries that see keys j. Those that do not exist have probability 0 (`row_stat`), and nobody stores such keys."""
    low = j - (at.shift + number(rules.right))
    high = low
    if rules.left is not None:
        high = j - (at.shift - number(rules.left))
    return Limits(low, high)


@triton.jit
def within(x, first, limits, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Scores x, -inf in the columns first, first + 1, ... that are beyond their row's limits, where there are any.

    Columns are compared with what is left of a limit: numbers that are known when the kernel is compiled.
    """
    column = tl.arange(0, x.shape[1])[None, :]
    if LOW and HIGH:
        seen = (column >= (limits.low - first)[:, None]) & (column <= (limits.high - first)[:, None])
    elif LOW:
        seen = column >= (limits.low - first)[:, None]
    else:
        seen = column <= (limits.high - first)[:, None]
    return tl.where(seen, x, -INF)


class Range(NamedTuple):
    """Of positions; begins, and ends of whole blocks, are multiples of the block's size. In a whole block each query
    sees each key. whole_begin <= whole_end, but may be beyond the end if none is whole."""

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any


@triton.jit
def steps(r, WHOLE: tl.constexpr):
    """(begin, end) of a loop over the whole blocks, or over those before and after them as if these had no gap."""
    if WHOLE:
        return r.whole_begin, r.whole_end
    else:
        return r.begin, r.end - (r.whole_end - r.whole_begin)


@triton.jit
def position(step, r, WHOLE: tl.constexpr):
    """Of a step of such a loop."""
    if WHOLE:
        return step
    else:
        return step + tl.where(step >= r.whole_begin, r.whole_end - r.whole_begin, 0)


@triton.jit
def key_range(first, at, rules, C: tl.constexpr):
    """Keys that a block of queries sees."""
    last = tl.minimum(first + C.BLOCK_M, at.q_length) - 1
    begin, whole_begin = first * 0, first * 0
    if rules.left is not None:
        begin = tl.maximum(first + at.shift - number(rules.left), 0) // C.BLOCK_N * C.BLOCK_N
        whole_begin = tl.cdiv(tl.maximum(last + at.shift - number(rules.left), 0), C.BLOCK_N) * C.BLOCK_N
    end = tl.minimum(at.k_length, tl.maximum(last + at.shift + number(rules.right) + 1, 0))
    whole_end = tl.minimum(at.k_length, tl.maximum(first + at.shift + number(rules.right) + 1, 0))
    return Range(begin, whole_begin, tl.maximum(whole_end // C.BLOCK_N * C.BLOCK_N, whole_begin), end)


@triton.jit
def query_range(first, at, rules, C: tl.constexpr):
    """Queries that see a block of keys."""
    last = tl.minimum(first + C.BLOCK_N, at.k_length) - 1
    whole_end, end = at.q_length, at.q_length
    begin = tl.maximum(first - at.shift - number(rules.right), 0) // C.BLOCK_M * C.BLOCK_M
    whole_begin = tl.cdiv(tl.maximum(last - at.shift - number(rules.right), 0), C.BLOCK_M) * C.BLOCK_M
    if rules.left is not None:
        end = tl.minimum(at.q_length, tl.maximum(last - at.shift + number(rules.left) + 1, 0))
        whole_end = tl.minimum(at.q_length, tl.maximum(first - at.shift + number(rules.left) + 1, 0))
    return Range(begin, whole_begin, tl.maximum(whole_end // C.BLOCK_M * C.BLOCK_M, whole_begin), end)
