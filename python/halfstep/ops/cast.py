"""cast_: lists of tensors between float32, bfloat16 and float16; and the rounding of single masters (on loading)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..reference.rounding import join_master, round_to, split_master
from . import backend
from .layout import PlainList, as_layout, is_dense

__all__ = ["cast_", "join_master", "round_to", "split_master"]


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], stochastic: bool, seed: int) -> None:
    """dst[i] = src[i] in dst[i]'s dtype, to nearest even or stochastically (word of the element's logical index)."""
    if not dst:
        return
    if isinstance(dst, PlainList) and isinstance(src, PlainList):
        backend.choose(dst[0].device).cast_(dst, src, stochastic=stochastic, seed=seed)
        increment_version(dst)
        return
    keep = [is_dense(d) and (d.is_contiguous() or not stochastic) for d in dst]
    work = [d if k else torch.empty(d.shape, dtype=d.dtype, device=d.device) for d, k in zip(dst, keep, strict=True)]
    laid_out = [as_layout(s, like) for s, like in zip(src, work, strict=True)]
    backend.choose(dst[0].device).cast_(work, laid_out, stochastic=stochastic, seed=seed)
    for target, buffer in zip(dst, work, strict=True):
        if buffer is not target:
            target.copy_(buffer)
    increment_version(list(dst))
