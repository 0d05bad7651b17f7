"""Forward: a program folds the keys that BLOCK_M queries see into their output, one block after the other.

The running maximum of a row rescales what was summed before (Milakov and Gimelshein, arXiv 1805.02867).
Moves q, k, v and the output once, k and v again for each block of queries (mostly from L2); keeps 4 bytes for a row.
"""

import triton
import triton.language as tl

from .scores import INF, LN2, LOG2E, kept, key_limits, key_range, position, scores, steps, within
from .segments import dot, load_rows, matrix, number, place, segment_of, stat_row, store_rows


@triton.jit
def _fold(
    acc, total, row_max, q, k_rows, v_rows, m, seen, keys, at, head, rules, WHOLE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The blocks of keys that are WHOLE, or all others. A row's maximum is in units of log2."""
    i = m + tl.arange(0, C.BLOCK_M)
    begin, end = steps(keys, WHOLE)
    for step in tl.range(begin, end, C.BLOCK_N, num_stages=None if WHOLE else C.EDGE_STAGES):
        n = position(step, keys, WHOLE)
        k = load_rows(k_rows, n, C.D_K, C.BLOCK_N, C.WIDTH_K, WHOLE, C)
        j = n + tl.arange(0, C.BLOCK_N)
        x, _ = scores(dot(q, tl.trans(k), None, C), i[:, None], j[None, :], m, n, at, head, rules, C)
        if not WHOLE:
            x = within(x, n, seen, rules.left is not None, True)
        if rules.bias is None:
            new_max = tl.maximum(row_max, tl.max(x, 1) * rules.factor)
        else:  # but for a bias: dtype.min as a mask would overflow if it was scaled before the maximum is subtracted
            new_max = tl.maximum(row_max, tl.max(x, 1))
        base = new_max
        if not WHOLE or rules.mask is not None or rules.bias is not None:  # nothing seen so far: -inf - 0
            base = tl.where(new_max == -INF, 0.0, new_max)
        if rules.bias is None:
            p = tl.math.exp2(tl.fma(x, rules.factor, -base[:, None]))  # rounded once
            old = tl.math.exp2(row_max - base)
        else:
            p = tl.math.exp2((x - base[:, None]) * LOG2E)
            old = tl.math.exp2((row_max - base) * LOG2E)
        total = total * old + tl.sum(p, 1)
        if rules.seed is not None:
            p = tl.where(kept(i, n, at, head, rules, C.BLOCK_N), p, 0.0)
        v = load_rows(v_rows, n, C.D_V, C.BLOCK_N, C.WIDTH_V, WHOLE, C)
        acc = dot(p, v, acc * old[:, None], C)
        row_max = new_max
    return acc, total, row_max


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,  # [batch, heads, rows, D]
    lse_ptr, log_sum_ptr,  # [batch, heads, rows of q]; log_sum with a bias only
    cu_q_ptr, cu_k_ptr,  # int32 [segments + 1], or None: each batch is a segment
    strides,  # of q, k, v, out: of batch, head, row
    shape,  # heads, heads that share keys, rows of q, rows of k, segments
    rules, C: tl.constexpr,  # Rules, Config
):  # fmt: skip
    heads, group, segments = number(shape[0]), number(shape[1]), number(shape[4])
    index, head, block, good = place(
        cu_q_ptr, number(shape[2]), cu_k_ptr, number(shape[3]), heads, segments, C.BLOCK_M, True
    )
    if index >= segments:
        return
    at = segment_of(cu_q_ptr, cu_k_ptr, index, shape, good, C)
    q_rows = matrix(q_ptr, strides[0], at.batch, head, at.q_first, at.q_length)
    k_rows = matrix(k_ptr, strides[1], at.batch, head // group, at.k_first, at.k_length)
    v_rows = matrix(v_ptr, strides[2], at.batch, head // group, at.k_first, at.k_length)
    first = block * C.BLOCK_M
    i = first + tl.arange(0, C.BLOCK_M)
    q = load_rows(q_rows, first, C.D_K, C.BLOCK_M, C.WIDTH_K, False, C)
    STAT: tl.constexpr = lse_ptr.dtype.element_ty
    total, row_max = tl.full([C.BLOCK_M], 0.0, STAT), tl.full([C.BLOCK_M], -INF, STAT)
    acc = tl.full([C.BLOCK_M, C.WIDTH_V], 0.0, STAT)

    keys, seen = key_range(first, at, rules, C), key_limits(i, at, rules)
    acc, total, row_max = _fold(acc, total, row_max, q, k_rows, v_rows, first, seen, keys, at, head, rules, True, C)
    acc, total, row_max = _fold(acc, total, row_max, q, k_rows, v_rows, first, seen, keys, at, head, rules, False, C)

    nothing = total == 0
    divisor = tl.where(nothing, 1.0, total)
    if cu_q_ptr is not None:  # told by NaN: the host does not look at cu_seqlens of a GPU
        divisor = tl.where(at.good != 0, divisor, float("nan"))
        nothing = nothing & (at.good != 0)
    acc *= (1 / divisor)[:, None]
    if rules.seed is not None:
        acc *= rules.keep
    out_rows = matrix(out_ptr, strides[3], at.batch, head, at.q_first, at.q_length)
    store_rows(out_rows, first, acc, C.D_V, C)
    if rules.bias is None:
        row_max *= LN2
    log_sum = tl.log(divisor)
    stat = stat_row(at, head, shape) + i
    tl.store(lse_ptr + stat, tl.where(nothing, -INF, row_max + log_sum), mask=i < at.q_length)
    if log_sum_ptr is not None:
        tl.store(log_sum_ptr + stat, log_sum, mask=i < at.q_length)
