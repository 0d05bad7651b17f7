"""The reference as a backend: plain PyTorch on any device, correct and slow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..reference import cast, optimizer
from ..reference.step import AdamPlan, inverse

__all__ = ["AdamPlan", "cast_", "grad_stats", "name", "unscale_"]

name = "reference"


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return optimizer.grad_stats(grads, inverse(scale))


def unscale_(grads: Sequence[Tensor], factor: float) -> Tensor:
    return optimizer.unscale_(grads, factor)


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
    cast.cast_(dst, src, stochastic=stochastic, seed=seed)
