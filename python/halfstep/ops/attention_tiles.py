"""Which tiles attention in plain torch operations goes through, and the scores of one.

A call is parts (the segments of a varlen call), a part is blocks (some heads of some batch elements), a block is tiles
(some rows, and the keys from the first to the last that any of them sees).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.attention import dropout_words
from .attention_call import AttentionCall

# 4 MB of float32, of which a backward pass holds three. Of 128 and 256 rows and 1, 2, 4 and 16 MB this was the fastest
# on a Xeon with 2 MB of L2, causal, lengths of 512 and 1,024; rows that are too many compute what the mask hides.
TILE_SCORES = 2**20
MAX_ROWS = 128
MIN_ROWS = 16


class Part(NamedTuple):
    """A dense call: all of a dense one, or one segment of a varlen one."""

    call: AttentionCall
    segment: int  # number of its first batch element
    rows: slice  # where its queries are in the whole call's
    keys: slice


class Block(NamedTuple):
    """Some heads of some batch elements: keys and values are converted for a block, which then goes over its rows."""

    part: Part
    batch: slice
    k_heads: slice
    q_heads: slice
    group: int  # heads of q for each head of k

    def of(self, x: Tensor, heads: slice, positions: slice) -> Tensor:
        """x [B, H, L, D] here, computable: [batch * k_heads, group * L, D], for k and v without the group."""
        x = x[self.batch, heads, positions].to(wide(x))
        batch, heads_here, length, dim = x.shape
        k_heads = self.k_heads.stop - self.k_heads.start
        return x.reshape(batch * k_heads, heads_here // k_heads * length, dim)

    def seen(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """A view of this part of a mask or bias: [batch, k_heads, group, rows, keys], 1 where that broadcasts."""
        index = zip(x.shape, (self.batch, self.q_heads, rows, keys), strict=True)
        x = x[tuple(slice(None) if size == 1 else part for size, part in index)]
        return x.unflatten(1, (1, 1) if x.shape[1] == 1 else (-1, self.group))


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def parts(call: AttentionCall) -> Iterator[Part]:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        yield Part(call, 0, slice(None), slice(None))
        return
    q_ends, k_ends = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for s in range(len(q_ends) - 1):
        rows, keys = slice(*q_ends[s : s + 2]), slice(*k_ends[s : s + 2])
        slopes = call.alibi_slopes
        segment = call._replace(
            q=call.q[:, :, rows], k=call.k[:, :, keys], v=call.v[:, :, keys], cu_seqlens_q=None, cu_seqlens_k=None,
            alibi_slopes=slopes[s : s + 1] if slopes is not None and slopes.ndim == 2 else slopes,
        )  # fmt: skip
        yield Part(segment, s, rows, keys)


def blocks(part: Part) -> Iterator[tuple[Block, int]]:
    """Blocks, and of how many rows their tiles are."""
    call = part.call
    (B, Hq, Lq, _), Hkv = call.q.shape, call.k.shape[1]
    group, rows = Hq // max(Hkv, 1), min(Lq, MAX_ROWS)
    width = call.k.shape[2]
    if call.left is not None and call.right is not None:
        width = min(width, max(call.left + call.right + rows, 0))
    row_scores = max(group * width, 1)
    rows = max(min(rows, TILE_SCORES // row_scores), MIN_ROWS)
    heads = max(TILE_SCORES // (row_scores * rows), 1)
    batches = max(heads // max(Hkv, 1), 1)
    for b in range(0, B, batches):
        for h in range(0, Hkv, heads):
            end = min(h + heads, Hkv)
            batch, k_heads = slice(b, min(b + batches, B)), slice(h, end)
            yield Block(part, batch, k_heads, slice(h * group, end * group), group), rows


def tiles(call: AttentionCall, size: int) -> Iterator[tuple[slice, slice]]:
    """Rows, and the keys from the first to the last that any of them sees."""
    Lq, Lk, shift = call.q.shape[2], call.k.shape[2], call.shift
    for start in range(0, Lq, size):
        end = min(start + size, Lq)
        first = 0 if call.left is None else min(max(start + shift - call.left, 0), Lk)
        last = Lk if call.right is None else min(max(end + shift + call.right, first), Lk)
        yield slice(start, end), slice(first, last)


# ---- scores ----------------------------------------------------------------------------------------------------------
def scores(block: Block, rows: slice, keys: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """[batch * k_heads, group * rows, keys], -inf where nothing is seen; and tanh(x / softcap) if there is one."""
    call, tanh = block.part.call, None
    score = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=call.scale)
    if call.softcap > 0:
        tanh = score.div_(call.softcap).tanh_()
        score = tanh * call.softcap
    here = entries(block, rows, score)
    if call.bias is not None:
        here.add_(block.seen(call.bias, rows, keys))
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(score.dtype).reshape(-1, call.q.shape[1], 1, 1)
        here.addcmul_(block.seen(slopes, rows, keys), _offsets(call, rows, keys).abs().to(score.dtype), value=-1)
    _hide_outside(call, rows, keys, here)
    if call.mask is not None:
        here.masked_fill_(~block.seen(call.mask, rows, keys), -math.inf)
    return score, tanh


def entries(block: Block, rows: slice, score: Tensor) -> Tensor:
    """A view of scores, probabilities or their gradients: [batch, k_heads, group, rows, keys]."""
    batch = block.batch.stop - block.batch.start
    return score.view(batch, score.shape[0] // batch, block.group, rows.stop - rows.start, score.shape[2])


def _offsets(call: AttentionCall, rows: slice, keys: slice) -> Tensor:
    """int64 [rows, keys]: the key's place less the query's."""
    i = torch.arange(rows.start, rows.stop, device=call.q.device)[:, None]
    return torch.arange(keys.start, keys.stop, device=call.q.device) - (i + call.shift)


def _hide_outside(call: AttentionCall, rows: slice, keys: slice, here: Tensor) -> None:
    """-inf outside the window; keys that all rows see are not visited."""
    if call.left is not None:
        first = min(rows.stop - 1 + call.shift - call.left, keys.stop)  # of the keys that the last row sees
        edge = slice(keys.start, max(first, keys.start))
        hidden = _offsets(call, rows, edge) < -call.left
        here[..., : edge.stop - edge.start].masked_fill_(hidden, -math.inf)
    if call.right is not None:
        after = max(rows.start + call.shift + call.right + 1, keys.start)  # of the keys that the first row sees
        edge = slice(min(after, keys.stop), keys.stop)
        hidden = _offsets(call, rows, edge) > call.right
        here[..., edge.start - keys.start :].masked_fill_(hidden, -math.inf)


def dropout_factor(block: Block, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor | None:
    """keep / (1 - dropout_p), [batch, heads of q, rows, keys]."""
    call, first = block.part.call, block.part.segment
    if call.seed is None:
        return None
    segments = range(first + block.batch.start, first + block.batch.stop)
    heads, i, j = (range(s.start, s.stop) for s in (block.q_heads, rows, keys))
    words = dropout_words(call.seed, segments, heads, i, j)
    return (words >= call.drop_below).to(dtype).div_(1 - call.dropout_p)
