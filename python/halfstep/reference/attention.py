"""Attention as the plain formula on whole matrices: the oracle in float64, the naive computation in any other dtype.

    P = softmax(softcap * tanh(q k^T * scale / softcap) + bias - slope * distance), over the keys that a query sees
    out = (P * keep / (1 - dropout_p)) v,    lse = ln(sum of exp(scores)),    log_sum = lse - maximum of the scores

Autograd gives the gradients. A query that sees nothing has out 0, lse -inf, log_sum 0 and gradients 0.

Sources: Vaswani et al., "Attention is all you need", NIPS 2017, section 3.2.1; ALiBi: Press et al., ICLR 2022, section
3; softcap: Gemma 2 technical report, 2024, section 2; the mask of dropout is ours, see `dropout_words`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .philox import MASK32, philox_block

if TYPE_CHECKING:
    from ..ops.attention_call import AttentionCall


class Span(NamedTuple):
    """A part of a call that is one dense problem: all of a dense call, or one segment."""

    segments: range  # of B: the numbers that dropout and slopes go by
    q_rows: slice
    k_rows: slice


class Probabilities(NamedTuple):
    """Of one span, each [B, Hq, Lq, Lk | 1]; P = exp(score - maximum) / total."""

    P: Tensor
    keep: Tensor | None  # keep / (1 - dropout_p)
    maximum: Tensor  # 0 where nothing is seen
    total: Tensor  # 0 where nothing is seen


def attention(call: AttentionCall, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, Lq, Dv], lse and log_sum [B, Hq, Lq], all of `dtype`, to which each operation's result is rounded.

    Products of 16-bit matrices are accumulated in float32 before, as a tensor core does; scores with a wider bias are
    of the bias' dtype. Rows that no segment covers are 0, -inf and 0. Memory: several times [B, Hq, Lq, Lk].
    """
    out = call.q.new_zeros((*call.stat_shape, call.v.shape[3]), dtype=dtype)
    lse = call.q.new_full(call.stat_shape, -math.inf, dtype=dtype)
    log_sum = torch.zeros_like(lse)
    for span in spans(call):
        part = probabilities(call, span, dtype)
        kept = part.P if part.keep is None else part.P * part.keep
        v = call.v[:, :, span.k_rows].to(dtype)
        out[:, :, span.q_rows] = product(kept.to(dtype), for_each_head(v, call))
        empty = part.total == 0
        ln_total = torch.where(empty, 1.0, part.total).log()
        lse[:, :, span.q_rows] = torch.where(empty, -math.inf, part.maximum + ln_total).squeeze(3).to(dtype)
        log_sum[:, :, span.q_rows] = ln_total.squeeze(3).to(dtype)
    return out, lse, log_sum


def spans(call: AttentionCall) -> list[Span]:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return [Span(range(call.q.shape[0]), slice(None), slice(None))]
    q_ends, k_ends = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [Span(range(s, s + 1), slice(*q_ends[s : s + 2]), slice(*k_ends[s : s + 2])) for s in range(len(q_ends) - 1)]


def probabilities(call: AttentionCall, span: Span, dtype: torch.dtype) -> Probabilities:
    q, k = call.q[:, :, span.q_rows].to(dtype), call.k[:, :, span.k_rows].to(dtype)
    score = product(q, for_each_head(k, call).transpose(2, 3)) * call.scale
    if call.softcap > 0:
        score = call.softcap * (score / call.softcap).tanh()
    if call.bias is not None:
        score = score + call.bias.to(torch.promote_types(dtype, call.bias.dtype))
    offset = offsets(call, q.shape[2], k.shape[2])
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        slopes = slopes[span.segments.start : span.segments.stop] if slopes.ndim == 2 else slopes[None]
        score = score - slopes.to(dtype)[:, :, None, None] * offset.abs().to(dtype)
    score = score.masked_fill(~visible(call, offset), -math.inf)
    if call.mask is not None:
        score = score.masked_fill(~call.mask, -math.inf)
    if score.shape[3] == 0:
        maximum = score.new_zeros((*score.shape[:3], 1))
    else:
        maximum = score.detach().amax(3, keepdim=True)
    maximum = torch.where(maximum == -math.inf, 0.0, maximum)
    unnormalised = (score - maximum).exp()
    total = unnormalised.sum(3, keepdim=True)
    P = unnormalised / torch.where(total == 0, 1.0, total)
    return Probabilities(P, dropout_factor(call, span, P), maximum, total)


def offsets(call: AttentionCall, Lq: int, Lk: int) -> Tensor:
    """int64 [Lq, Lk]: the key's place less the query's, j - (i + shift)."""
    i = torch.arange(Lq, device=call.q.device)[:, None]
    j = torch.arange(Lk, device=call.q.device)
    return j - (i + (0 if call.top_left else Lk - Lq))


def visible(call: AttentionCall, offset: Tensor) -> Tensor:
    """Where the window lets a query see a key; causal is a window that ends at 0."""
    inside = torch.ones_like(offset, dtype=torch.bool)
    if call.left is not None:
        inside &= offset >= -call.left
    if call.right is not None:
        inside &= offset <= call.right
    return inside


def dropout_factor(call: AttentionCall, span: Span, P: Tensor) -> Tensor | None:
    """keep / (1 - dropout_p), of P's shape and dtype; None without dropout."""
    if call.seed is None:
        return None
    _, heads, Lq, Lk = P.shape
    words = dropout_words(call.seed, span.segments, range(heads), range(Lq), range(Lk))
    keep = words >= call.drop_below
    return keep.to(P.dtype) / (1 - call.dropout_p)


def dropout_words(seed: Tensor, segments: range, heads: range, rows: range, columns: range) -> Tensor:
    """The random words that decide what dropout keeps, each a function of its place and the seed alone.

    Entry (i, j) of head h and segment s takes word j % 4 of the Philox-4x32-10 block with counter (j // 4, i, h, s) and
    key (low, high half of the seed).

    Args:
        seed: int64, one element.
        segments, heads, rows, columns: whose words, in steps of 1.

    Returns: int64 [segments, heads, rows, columns] on the seed's device, each a uint32 value. Memory: 3 times that.
    """
    if 0 in map(len, (segments, heads, rows, columns)):
        return seed.new_zeros((len(segments), len(heads), len(rows), len(columns)))
    blocks = range(columns.start // 4, (columns.stop + 3) // 4)
    places = (torch.arange(r.start, r.stop, device=seed.device) & MASK32 for r in (blocks, rows, heads, segments))
    counter = [x.reshape(-1, *[1] * dim) for dim, x in enumerate(places)]
    key = seed.reshape(())
    words = philox_block(counter, (key & MASK32, (key >> 32) & MASK32)).flatten(-2)
    return words.narrow(-1, columns.start % 4, len(columns))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; 16-bit operands are multiplied and added up in float32 and the sums rounded."""
    if a.dtype.itemsize == 2:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def for_each_head(x: Tensor, call: AttentionCall) -> Tensor:
    """k or v [B, Hkv, Lk, D] once for each head of q."""
    return x.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
