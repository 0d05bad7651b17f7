"""Attention in plain torch operations, on any device: tile after tile of the score matrix, never the whole.

    forward     P = exp(score - maximum), out = P v / total, lse = maximum + ln(total)
    backward    P = exp(score - lse), dS = P (dP - delta), with dP = d_out v^T and delta = out d_out - d_lse;
                dv = P^T d_out, dq = dS k * scale, dk = dS^T q * scale, dbias = dS

A tile is some heads, some of their query rows and the keys that these see; what lies outside the window is not read. It
has a bounded number of scores, or a few rows, so memory beside the results is linear in the lengths. 16-bit tensors are
computed in float32, a few heads of them at a time. The order of the sums is that of the loops: results repeat bit for
bit. The ends of a varlen call's segments are read on the host, which waits if they are on a device.

Sources: Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021, section 2 (tiles); Dao et al.,
"FlashAttention", NeurIPS 2022, appendix B.2 (delta).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import attention_cpu
from .attention_call import AttentionCall, empty_like_order
from .attention_tiles import Block, Part, blocks, dropout_factor, entries, parts, scores, tiles, wide

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, Lq, Dv], lse [B, Hq, Lq]; log_sum like lse where there is a bias, else empty."""
    if not call.varlen and attention_cpu.expresses(call):
        out, lse = attention_cpu.attention_forward(call)
        return _ordered(out, call.q), lse.contiguous(), lse.new_empty(0)
    out = empty_like_order(call.q, (*call.stat_shape, call.v.shape[3]))
    lse = torch.empty(call.stat_shape, dtype=wide(call.q), device=call.q.device)
    log_sum = torch.empty_like(lse) if call.bias is not None else lse.new_empty(0)
    if call.varlen:  # rows that no segment covers
        out.zero_()
        lse.fill_(-math.inf)
    for part in parts(call):
        part_out, part_lse = out[:, :, part.rows], lse[:, :, part.rows]
        if attention_cpu.expresses(part.call):
            computed = attention_cpu.attention_forward(part.call)
            part_out.copy_(computed[0])
            part_lse.copy_(computed[1])
        else:
            _forward_part(part, part_out, part_lse, log_sum if call.bias is not None else None)
    return out, lse, log_sum


def attention_backward(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Gradients for q, k, v and the bias, each None if it is not needed."""
    inputs = (call.q, call.k, call.v)
    if not call.varlen and d_lse is None and attention_cpu.expresses(call):
        computed = zip(attention_cpu.attention_backward(call, out, lse, d_out), inputs, needs, strict=False)
        dq, dk, dv = (_ordered(x, like) if need else None for x, like, need in computed)
        return dq, dk, dv, None
    dq, dk, dv = (empty_like_order(x, x.shape) if need else None for x, need in zip(inputs, needs, strict=False))
    for gradient in (dq, dk, dv):
        if gradient is not None and call.varlen:
            gradient.zero_()
    dbias = None
    if call.bias is not None and needs[3]:
        dbias = torch.zeros(call.bias.shape, dtype=wide(call.q), device=call.q.device)
    for part in parts(call):
        rows, keys = (slice(None), slice(None), part.rows), (slice(None), slice(None), part.keys)
        results = [None if x is None else x[s] for x, s in ((dq, rows), (dk, keys), (dv, keys))]
        if d_lse is None and attention_cpu.expresses(part.call):
            computed = attention_cpu.attention_backward(part.call, out[rows], lse[rows], d_out[rows])
            for result, gradient in zip(results, computed, strict=True):
                if result is not None:
                    result.copy_(gradient)
        else:
            kept = log_sum if call.bias is not None else None
            given = _Given(out[rows], lse[rows], kept, d_out[rows], None if d_lse is None else d_lse[rows])
            _backward_part(part, given, (*results, dbias))
    return dq, dk, dv, dbias if call.bias is None or dbias is None else dbias.to(call.bias.dtype)


def _ordered(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory order and dtype of `like`; itself if it is so already."""
    made = empty_like_order(like, x.shape)
    return x if (x.dtype, x.stride()) == (made.dtype, made.stride()) else made.copy_(x)


class _Given(NamedTuple):
    """What a part's backward pass starts from, [B, Hq, Lq, Dv] and [B, Hq, Lq]."""

    out: Tensor
    lse: Tensor
    log_sum: Tensor | None
    d_out: Tensor
    d_lse: Tensor | None


def _forward_part(part: Part, out: Tensor, lse: Tensor, log_sum: Tensor | None) -> None:
    for block, size in blocks(part):
        q_heads, k_heads, everything = block.q_heads, block.k_heads, slice(None)
        k, v = (block.of(x, k_heads, everything) for x in (part.call.k, part.call.v))
        for rows, keys in tiles(part.call, size):
            here = block.batch, q_heads, rows
            if keys.start == keys.stop:
                out[here] = 0
                lse[here] = -math.inf
                if log_sum is not None:
                    log_sum[here] = 0
                continue
            score, _ = scores(block, rows, keys, block.of(part.call.q, q_heads, rows), k[:, keys])
            maximum = score.amax(2, keepdim=True)
            maximum.masked_fill_(maximum == -math.inf, 0)  # a row that sees nothing, whose exp is 0 then
            unnormalised = score.sub_(maximum).exp_()
            total = unnormalised.sum(2, keepdim=True)
            empty = total == 0
            total.masked_fill_(empty, 1)
            factor = dropout_factor(block, rows, keys, score.dtype)
            shape = out[here].shape
            kept = _times(block, rows, unnormalised, factor)
            out[here] = kept.bmm(v[:, keys]).div_(total).view(shape)
            total.log_()
            if log_sum is not None:
                log_sum[here] = total.view(shape[:3])
            lse[here] = (maximum + total).masked_fill_(empty, -math.inf).view(shape[:3])


def _backward_part(part: Part, given: _Given, results: tuple[Tensor | None, ...]) -> None:
    """Writes dq, dk and dv, the first three of the results, and adds to dbias, the last; None is not needed."""
    call = part.call
    dq, dk, dv, dbias = results
    for block, size in blocks(part):
        k, v = (block.of(x, block.k_heads, slice(None)) for x in (call.k, call.v))
        dk_sum, dv_sum = (None if x is None else torch.zeros_like(y) for x, y in ((dk, k), (dv, v)))
        for rows, keys in tiles(call, size):
            here = block.batch, block.q_heads, rows
            if keys.start == keys.stop:
                if dq is not None:
                    dq[here] = 0
                continue
            q, d_out = (block.of(x, block.q_heads, rows) for x in (call.q, given.d_out))
            P, tanh = _probabilities(block, rows, keys, q, k[:, keys], given)
            factor = dropout_factor(block, rows, keys, P.dtype)
            if dv_sum is not None:
                dv_sum[:, keys].baddbmm_(_times(block, rows, P, factor).transpose(1, 2), d_out)
            if dq is None and dk_sum is None and dbias is None:
                continue
            dP = _times(block, rows, d_out.bmm(v[:, keys].transpose(1, 2)), factor)
            dS = dP.sub_(_delta(block, rows, given)).mul_(P)
            if dbias is not None:
                sums = block.seen(dbias, rows, keys)
                sums.add_(entries(block, rows, dS).sum_to_size(sums.shape))
            if tanh is not None:
                dS.mul_(tanh.square_().neg_().add_(1))
            if dq is not None:
                dq[here] = dS.bmm(k[:, keys]).mul_(call.scale).view(dq[here].shape)
            if dk_sum is not None:
                dk_sum[:, keys].baddbmm_(dS.transpose(1, 2), q, alpha=call.scale)
        for gradient, total in ((dk, dk_sum), (dv, dv_sum)):
            if gradient is not None and total is not None:
                target = gradient[block.batch, block.k_heads]
                target.copy_(total.view(target.shape))


def _probabilities(
    block: Block, rows: slice, keys: slice, q: Tensor, k: Tensor, given: _Given
) -> tuple[Tensor, Tensor | None]:
    """P before dropout, and tanh(x / softcap) if there is a softcap."""
    score, tanh = scores(block, rows, keys, q, k)
    lse = block.of(given.lse[..., None], block.q_heads, rows)
    lse = lse.masked_fill(lse == -math.inf, 0)  # a row that sees nothing: -inf less 0, whose exp is 0
    if given.log_sum is None:
        return score.sub_(lse).exp_(), tanh
    # In two steps: after a bias of the dtype's minimum lse is the maximum alone, the logarithm below its rounding.
    log_sum = block.of(given.log_sum[..., None], block.q_heads, rows)
    return score.sub_(lse - log_sum).sub_(log_sum).exp_(), tanh


def _delta(block: Block, rows: slice, given: _Given) -> Tensor:
    """[batch * k_heads, group * rows, 1]"""
    out, d_out = (block.of(x, block.q_heads, rows) for x in (given.out, given.d_out))
    delta = (out * d_out).sum(2, keepdim=True)
    if given.d_lse is None:
        return delta
    return delta.sub_(block.of(given.d_lse[..., None], block.q_heads, rows))


def _times(block: Block, rows: slice, x: Tensor, factor: Tensor | None) -> Tensor:
    """x [batch * k_heads, group * rows, keys] times dropout's factor."""
    if factor is None:
        return x
    return (entries(block, rows, x).flatten(1, 2) * factor).view(x.shape)
