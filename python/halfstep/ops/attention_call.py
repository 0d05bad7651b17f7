"""One call of attention as every backend gets it: tensors and settings, checked, with nothing left to decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionCall(NamedTuple):
    """softmax(scores) v for each segment and head, where scores are q k^T * scale, capped, biased and masked.

    A dense call has B segments of Lq queries and Lk keys. With cu_seqlens_q and cu_seqlens_k, B is 1 and rows
    cu_seqlens[i] to cu_seqlens[i + 1] of q, and of k and v, are segment i. Head h of q reads head h // (Hq // Hkv).

    Query i is at the place of key i + shift: shift is Lk - Lq of its segment, or 0 if `top_left`. It sees the keys j
    for which i + shift - left <= j <= i + shift + right; None is no limit.

    Score: x = q k^T * scale; softcap * tanh(x / softcap) if softcap > 0; then + bias - slope * |i + shift - j|.
    Dropout keeps an entry (i, j) of segment s and head h if its random word is at least `drop_below`: word j % 4 of
    Philox-4x32-10 with counter (j // 4, i, h, s) and key (seed low, seed high). What is kept is divided by
    1 - dropout_p.
    """

    q: Tensor  # [B, Hq, Lq, Dk], any strides
    k: Tensor  # [B, Hkv, Lk, Dk]
    v: Tensor  # [B, Hkv, Lk, Dv]
    mask: Tensor | None  # bool, [B | 1, Hq | 1, Lq | 1, Lk | 1], True is visible; dense calls only
    bias: Tensor | None  # any of the float dtypes, sizes as the mask's; dense calls only
    alibi_slopes: Tensor | None  # float32 [Hq] or [segments, Hq]
    cu_seqlens_q: Tensor | None  # int32 [segments + 1], on the device of q
    cu_seqlens_k: Tensor | None
    seed: Tensor | None  # int64, one element, on the device of q; None without dropout
    scale: float
    softcap: float  # 0: none
    left: int | None
    right: int | None
    top_left: bool
    dropout_p: float  # in [0, 1)

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def shift(self) -> int:
        """Of a dense call."""
        return 0 if self.top_left else self.k.shape[2] - self.q.shape[2]

    @property
    def stat_shape(self) -> tuple[int, int, int]:
        """Of what is kept for each row: [B, Hq, Lq]."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2]

    @property
    def drop_below(self) -> int:
        """dropout_p in units of 2^-32."""
        return min(round(self.dropout_p * 2**32), 2**32 - 1)


def empty_like_order(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for an output or a gradient: every backend and the fake functions allocate here, so strides agree.

    The first three dimensions lie in the order of `like`'s, so that q = x.transpose(1, 2) gives an output whose
    transpose(1, 2) is contiguous; contiguous where `like` is expanded. The last dimension is always contiguous: kernels
    write whole rows.

    Args:
        like, shape: [B, H, L, *], of four dimensions; the sizes may differ.
        dtype: None = that of `like`.
    """
    steps = like.stride()[:3]
    order = [0, 1, 2] if 0 in steps else sorted(range(3), key=steps.__getitem__, reverse=True)
    strides, step = [1, 1, 1, 1], shape[3]
    for dim in reversed(order):
        strides[dim] = step  # not max(step, 1): a graph's length that depends on data cannot be compared
        step = step * shape[dim]
    return torch.empty_strided(shape, strides, dtype=dtype or like.dtype, device=like.device)
