"""The gradient of a bias: dS summed over the sizes that the bias was broadcast over, in a fixed order.

A program has one tile of the bias and goes through the batches, heads and tiles that share it. Where a bias has few
tiles, several programs share these, and their sums are added up afterwards, in order too.
"""

import triton
import triton.language as tl

from .scores import kept, key_limits, load_stats, probabilities, score_gradients, scores, within
from .segments import dot, load_rows, matrix, number, segment_of, stat_row


@triton.jit
def bias_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr,
    d_bias_ptr,  # [shares, batches, heads, queries, keys] of the bias; contiguous
    stats,  # Stats
    strides,  # of q, k, v, d_out
    sizes,  # of the bias; shares; how many (batches, heads, tiles of queries, tiles of keys) share an entry
    shape, rules, C: tl.constexpr,  # as forward_kernel's
):  # fmt: skip
    batches, b_heads, queries, keys, shares = (
        number(sizes[0]), number(sizes[1]), number(sizes[2]), number(sizes[3]), number(sizes[4])
    )  # fmt: skip
    of_batches, of_heads, of_m, of_n = number(sizes[5]), number(sizes[6]), number(sizes[7]), number(sizes[8])
    share, rest = tl.program_id(0) % shares, tl.program_id(0) // shares
    columns, rows = tl.cdiv(keys, C.BLOCK_N), tl.cdiv(queries, C.BLOCK_M)
    column, row = rest % columns, rest // columns % rows
    b_head, b_batch = rest // columns // rows % b_heads, rest // columns // rows // b_heads
    total = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, stats.delta.dtype.element_ty)
    repeats = of_batches * of_heads * of_m * of_n
    each = tl.cdiv(repeats, shares)
    for repeat in range(share * each, tl.minimum((share + 1) * each, repeats)):
        # one summand is 0: the entry's own place, or that among those that share it
        n = (column + repeat % of_n) * C.BLOCK_N
        first = (row + repeat // of_n % of_m) * C.BLOCK_M
        head = b_head + repeat // of_n // of_m % of_heads
        at = segment_of(None, None, b_batch + repeat // of_n // of_m // of_heads, shape, 1, C)
        k_head = head // number(shape[1])
        q_rows = matrix(q_ptr, strides[0], at.batch, head, 0, at.q_length)
        k_rows = matrix(k_ptr, strides[1], at.batch, k_head, 0, at.k_length)
        v_rows = matrix(v_ptr, strides[2], at.batch, k_head, 0, at.k_length)
        d_out_rows = matrix(d_out_ptr, strides[3], at.batch, head, 0, at.q_length)
        q = load_rows(q_rows, first, C.D_K, C.BLOCK_M, C.WIDTH_K, False, C)
        k = load_rows(k_rows, n, C.D_K, C.BLOCK_N, C.WIDTH_K, False, C)
        i, j = first + tl.arange(0, C.BLOCK_M), n + tl.arange(0, C.BLOCK_N)
        x, t = scores(dot(q, tl.trans(k), None, C), i[:, None], j[None, :], first, n, at, head, rules, C)
        x = within(x, n, key_limits(i, at, rules), rules.left is not None, True)
        stat, log_sum, delta = load_stats(stats, stat_row(at, head, shape), i, at.q_length, False)
        p = probabilities(x, stat[:, None], log_sum[:, None], rules)
        v = load_rows(v_rows, n, C.D_V, C.BLOCK_N, C.WIDTH_V, False, C)
        d_out = load_rows(d_out_rows, first, C.D_V, C.BLOCK_M, C.WIDTH_V, False, C)
        keep = p
        if rules.seed is not None:
            keep = kept(i, n, at, head, rules, C.BLOCK_N)
        d_scores, _ = score_gradients(p, dot(d_out, tl.trans(v), None, C), t, delta[:, None], keep, rules)
        total += d_scores
    i, j = row * C.BLOCK_M + tl.arange(0, C.BLOCK_M), column * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    if queries == 1:  # broadcast: the sum goes to the first row
        total = tl.where((i == 0)[:, None], tl.sum(total, 0)[None, :], 0.0)
    if keys == 1:
        total = tl.where((j == 0)[None, :], tl.sum(total, 1)[:, None], 0.0)
    begin = ((share.to(tl.int64) * batches + b_batch) * b_heads + b_head) * queries
    where = d_bias_ptr + (begin + i)[:, None] * keys + j[None, :]
    tl.store(where, total, mask=(i < queries)[:, None] & (j < keys)[None, :])
