"""cast_: lists of tensors between float32, bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from . import backend
from .layout import as_layout, is_dense


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], stochastic: bool, seed: int) -> None:
    """dst[i] = src[i] in dst[i]'s dtype, to nearest even or stochastically (word of the element's logical index)."""
    if not dst:
        return
    keep = [d.is_contiguous() if stochastic else is_dense(d) for d in dst]
    work = [d if k else d.contiguous() for d, k in zip(dst, keep, strict=True)]
    laid_out = [as_layout(s, like) for s, like in zip(src, work, strict=True)]
    backend.choose(dst[0].device).cast_(work, laid_out, stochastic=stochastic, seed=seed)
    for target, buffer in zip(dst, work, strict=True):
        if buffer is not target:
            target.copy_(buffer)
    increment_version(list(dst))
