"""cast_ and accumulate_ of lists of pairs; and the rounding of single masters (on loading)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..reference.rounding import join_master, round_to, split_master
from . import backend
from .layout import PlainList, as_layout, copy_back, dense_or_copy, is_dense

__all__ = ["accumulate_", "cast_", "join_master", "round_to", "split_master"]


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], stochastic: bool, seed: int) -> None:
    """dst[i] = src[i] in dst[i]'s dtype, to nearest even or stochastically (word of the element's logical index)."""
    if not dst:
        return
    work, laid_out = dst, src
    if not (isinstance(dst, PlainList) and isinstance(src, PlainList)):
        keep = [is_dense(d) and (d.is_contiguous() or not stochastic) for d in dst]
        work = [d if k else d.new_empty(d.shape) for d, k in zip(dst, keep, strict=True)]
        laid_out = [as_layout(s, like) for s, like in zip(src, work, strict=True)]
    backend.choose(dst[0].device).cast_(work, laid_out, stochastic=stochastic, seed=seed)
    copy_back(dst, work)


def accumulate_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    """dst[i] = dst[i] + f32(src[i]) of float32 dst; a dst may be its own src."""
    if not dst:
        return
    work, laid_out = dst, src
    if not (isinstance(dst, PlainList) and isinstance(src, PlainList)):
        work = [dense_or_copy(d) for d in dst]
        laid_out = [as_layout(s, like) for s, like in zip(src, work, strict=True)]
    backend.choose(dst[0].device).accumulate_(work, laid_out)
    copy_back(dst, work)
