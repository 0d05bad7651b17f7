"""The reference as a backend: plain PyTorch on any device, correct and slow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..reference import cast, optimizer, sum_squares
from ..reference.step import AdamPlan, inverse

__all__ = ["AdamPlan", "accumulate_", "cast_", "grad_stats", "name", "sums_of_squares", "unscale_"]

name = "reference"


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return optimizer.grad_stats(grads, inverse(scale))


def sums_of_squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return sum_squares.sums_of_squares(tensors)


def unscale_(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    return optimizer.unscale_(grads, factor)


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
    cast.cast_(dst, src, stochastic=stochastic, seed=seed)


def accumulate_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    cast.accumulate_(dst, src)
