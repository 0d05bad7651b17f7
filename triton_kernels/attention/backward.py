"""Backward in two passes, each of which recomputes the probabilities: dK and dV, then dQ. No atomics: the same bits
every time.

    P = exp(score - LSE), dP = dO V^T, dS = P * (dP - delta), delta = sum(dO * O) - dLSE
    dV = P^T dO, dK = dS^T Q * scale, dQ = dS K * scale

A program of the first pass has BLOCK_N keys, and all heads that share them; one of the second has BLOCK_M queries.
"""

import triton
import triton.language as tl

from .scores import (
    kept,
    key_limits,
    key_range,
    load_stats,
    position,
    probabilities,
    query_limits,
    query_range,
    row_stat,
    score_gradients,
    scores,
    steps,
    within,
)  # fmt: skip
from .segments import dot, load_rows, matrix, number, place, segment_of, stat_row, store_rows


@triton.jit
def delta_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr,  # d_lse may be None
    stats,  # Stats: row_stat and delta are written
    strides,  # of out, d_out
    shape, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """sum(out * d_out) - d_lse, and `row_stat`, of ROWS rows of a head."""
    heads, rows = number(shape[0]), number(shape[2])
    batch, head, block, _ = place(None, rows, None, 0, heads, 0, ROWS, False)
    first = block * ROWS
    out = load_rows(matrix(out_ptr, strides[0], batch, head, 0, rows), first, C.D_V, ROWS, C.WIDTH_V, False, C)
    d_out = load_rows(matrix(d_out_ptr, strides[1], batch, head, 0, rows), first, C.D_V, ROWS, C.WIDTH_V, False, C)
    STAT: tl.constexpr = stats.delta.dtype.element_ty
    i = first + tl.arange(0, ROWS)
    where, exists = (batch.to(tl.int64) * heads + head) * rows + i, i < rows
    delta = tl.sum(out.to(STAT) * d_out.to(STAT), 1)
    if d_lse_ptr is not None:
        delta -= tl.load(d_lse_ptr + where, mask=exists, other=0)
    tl.store(stats.delta + where, delta, mask=exists)
    stat = row_stat(tl.load(lse_ptr + where, mask=exists, other=0), stats.log_sum, where, exists)
    tl.store(stats.row_stat + where, stat, mask=exists)


# ---- dK, dV ----------------------------------------------------------------------------------------------------------
@triton.jit
def _from_queries(
    d_k, d_v, k, v, q_rows, d_out_rows, stats, n, seen, queries, at, head, shape, rules, NEED_K: tl.constexpr,
    NEED_V: tl.constexpr, WHOLE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of one head, the blocks of queries that are WHOLE, or all others. Tiles lie the other way round, [keys, queries],
    so that P^T and dS^T are first operands as they come."""
    j = n + tl.arange(0, C.BLOCK_N)
    of_head = stat_row(at, head, shape)
    begin, end = steps(queries, WHOLE)
    for step in tl.range(begin, end, C.BLOCK_M, num_stages=None if WHOLE else C.EDGE_STAGES):
        m = position(step, queries, WHOLE)
        i = m + tl.arange(0, C.BLOCK_M)
        q = load_rows(q_rows, m, C.D_K, C.BLOCK_M, C.WIDTH_K, WHOLE, C)
        stat, log_sum, delta = load_stats(stats, of_head, i, at.q_length, WHOLE)
        x, t = scores(dot(k, tl.trans(q), None, C), i[None, :], j[:, None], m, n, at, head, rules, C)
        if not WHOLE:
            x = within(x, m, seen, True, rules.left is not None)
        p = probabilities(x, stat[None, :], log_sum[None, :], rules)
        d_out = load_rows(d_out_rows, m, C.D_V, C.BLOCK_M, C.WIDTH_V, WHOLE, C)
        keep, dropped = p, p
        if rules.seed is not None:
            keep = tl.trans(kept(i, n, at, head, rules, C.BLOCK_N))
            dropped = tl.where(keep, p, 0.0)
        if NEED_V:
            d_v = dot(dropped, d_out, d_v, C)
        if NEED_K:
            d_p = dot(v, tl.trans(d_out), None, C)
            _, d_products = score_gradients(p, d_p, t, delta[None, :], keep, rules)
            d_k = dot(d_products, q, d_k, C)
    return d_k, d_v


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, d_k_ptr, d_v_ptr,  # d_k or d_v may be None
    stats, cu_q_ptr, cu_k_ptr,  # Stats
    strides,  # of q, k, v, d_out, d_k, d_v
    shape, rules, C: tl.constexpr,  # as forward_kernel's
):  # fmt: skip
    group, segments = number(shape[1]), number(shape[4])
    index, k_head, block, good = place(
        cu_k_ptr, number(shape[3]), cu_q_ptr, number(shape[2]), number(shape[0]) // group, segments, C.BLOCK_N, False
    )
    if index >= segments:
        return
    at = segment_of(cu_q_ptr, cu_k_ptr, index, shape, good, C)
    n = block * C.BLOCK_N
    k_rows = matrix(k_ptr, strides[1], at.batch, k_head, at.k_first, at.k_length)
    v_rows = matrix(v_ptr, strides[2], at.batch, k_head, at.k_first, at.k_length)
    k = load_rows(k_rows, n, C.D_K, C.BLOCK_N, C.WIDTH_K, False, C)
    v = load_rows(v_rows, n, C.D_V, C.BLOCK_N, C.WIDTH_V, False, C)
    NEED_K: tl.constexpr = d_k_ptr is not None
    NEED_V: tl.constexpr = d_v_ptr is not None
    d_k = tl.full([C.BLOCK_N, C.WIDTH_K], 0.0, stats.delta.dtype.element_ty)
    d_v = tl.full([C.BLOCK_N, C.WIDTH_V], 0.0, stats.delta.dtype.element_ty)
    queries, seen = query_range(n, at, rules, C), query_limits(n + tl.arange(0, C.BLOCK_N), at, rules)
    for member in tl.range(group, disable_licm=True):
        head = k_head * group + member
        q_rows = matrix(q_ptr, strides[0], at.batch, head, at.q_first, at.q_length)
        d_out_rows = matrix(d_out_ptr, strides[3], at.batch, head, at.q_first, at.q_length)
        d_k, d_v = _from_queries(
            d_k, d_v, k, v, q_rows, d_out_rows, stats, n, seen, queries, at, head, shape, rules, NEED_K, NEED_V, True, C
        )
        d_k, d_v = _from_queries(
            d_k,
            d_v,
            k,
            v,
            q_rows,
            d_out_rows,
            stats,
            n,
            seen,
            queries,
            at,
            head,
            shape,
            rules,
            NEED_K,
            NEED_V,
            False,
            C,
        )
    d_k *= rules.scale
    if rules.seed is not None:
        d_v *= rules.keep
    if cu_k_ptr is not None:
        d_k = tl.where(at.good != 0, d_k, float("nan"))
        d_v = tl.where(at.good != 0, d_v, float("nan"))
    if NEED_K:
        store_rows(matrix(d_k_ptr, strides[4], at.batch, k_head, at.k_first, at.k_length), n, d_k, C.D_K, C)
    if NEED_V:
        store_rows(matrix(d_v_ptr, strides[5], at.batch, k_head, at.k_first, at.k_length), n, d_v, C.D_V, C)


# ---- dQ --------------------------------------------------------------------------------------------------------------
@triton.jit
def _from_keys(
    d_q, q, d_out, stat, log_sum, delta, k_rows, v_rows, m, seen, keys, at, head, rules, WHOLE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The blocks of keys that are WHOLE, or all others."""
    i = m + tl.arange(0, C.BLOCK_M)
    begin, end = steps(keys, WHOLE)
    for step in tl.range(begin, end, C.BLOCK_N, num_stages=None if WHOLE else C.EDGE_STAGES):
        n = position(step, keys, WHOLE)
        k = load_rows(k_rows, n, C.D_K, C.BLOCK_N, C.WIDTH_K, WHOLE, C)
        j = n + tl.arange(0, C.BLOCK_N)
        x, t = scores(dot(q, tl.trans(k), None, C), i[:, None], j[None, :], m, n, at, head, rules, C)
        if not WHOLE:
            x = within(x, n, seen, rules.left is not None, True)
        p = probabilities(x, stat[:, None], log_sum[:, None], rules)
        v = load_rows(v_rows, n, C.D_V, C.BLOCK_N, C.WIDTH_V, WHOLE, C)
        keep = p
        if rules.seed is not None:
            keep = kept(i, n, at, head, rules, C.BLOCK_N)
        _, d_products = score_gradients(p, dot(d_out, tl.trans(v), None, C), t, delta[:, None], keep, rules)
        d_q = dot(d_products, k, d_q, C)
    return d_q


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, d_q_ptr, stats, cu_q_ptr, cu_k_ptr,
    strides,  # of q, k, v, d_out, d_q
    shape, rules, C: tl.constexpr,  # as forward_kernel's
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
    d_out_rows = matrix(d_out_ptr, strides[3], at.batch, head, at.q_first, at.q_length)
    first = block * C.BLOCK_M
    i = first + tl.arange(0, C.BLOCK_M)
    q = load_rows(q_rows, first, C.D_K, C.BLOCK_M, C.WIDTH_K, False, C)
    d_out = load_rows(d_out_rows, first, C.D_V, C.BLOCK_M, C.WIDTH_V, False, C)
    stat, log_sum, delta = load_stats(stats, stat_row(at, head, shape), i, at.q_length, False)
    d_q = tl.full([C.BLOCK_M, C.WIDTH_K], 0.0, stats.delta.dtype.element_ty)

    keys, seen = key_range(first, at, rules, C), key_limits(i, at, rules)
    d_q = _from_keys(d_q, q, d_out, stat, log_sum, delta, k_rows, v_rows, first, seen, keys, at, head, rules, True, C)
    d_q = _from_keys(d_q, q, d_out, stat, log_sum, delta, k_rows, v_rows, first, seen, keys, at, head, rules, False, C)
    d_q *= rules.scale
    if cu_q_ptr is not None:
        d_q = tl.where(at.good != 0, d_q, float("nan"))
    store_rows(matrix(d_q_ptr, strides[4], at.batch, head, at.q_first, at.q_length), first, d_q, C.D_K, C)
