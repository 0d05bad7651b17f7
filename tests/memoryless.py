"""Steps on tensors that move, compared with those of a copy that has no memory but the states."""

from __future__ import annotations

import copy

import torch
from adversarial import ordinary
from optimizer_runs import assert_same, held, params_of
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs

SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (), "one": (1,), "empty": (0,), "empty with sizes": (3, 0), "vector": (6,), "matrix": (4, 4),
    "5-d": (2, 1, 2, 1, 2), "6-d": (2, 1, 2, 1, 2, 1),
}  # fmt: skip


def optimizer_of(*tensors: Tensor, **options: object) -> hs.AdamW:
    return hs.AdamW([Parameter(t) for t in tensors], **{"lr": 0.1, **options})


def grads_for(optimizer: hs.AdamW, t: int) -> list[Tensor]:
    return [ordinary(tuple(p.shape), p.dtype, 10 * t + i) for i, p in enumerate(params_of(optimizer))]


def forgetful(optimizer: hs.AdamW) -> hs.AdamW:
    """With copies of the weights and states, and without tables."""
    return copy.deepcopy(optimizer)


def step_both(optimizer: hs.AdamW, grads: list[Tensor | None], plain: list[Tensor | None] | None = None) -> None:
    """A step with these gradients must be that of a copy with plain ones."""
    other = forgetful(optimizer)
    for p, grad in zip(params_of(optimizer), grads, strict=True):
        p.grad = grad
    for p, grad in zip(params_of(other), plain or grads, strict=True):
        p.grad = None if grad is None else grad.detach().to(grad.dtype, copy=True).contiguous()
    optimizer.step()
    other.step()
    assert_same(held(optimizer), held(other))


def inside_a_buffer(grad: Tensor) -> Tensor:
    flat = torch.full((grad.numel() + 9,), 7.0, dtype=grad.dtype)
    flat[3 : 3 + grad.numel()] = grad.reshape(-1)
    return flat[3 : 3 + grad.numel()].view(grad.shape)


def strided(grad: Tensor) -> Tensor:
    wide = torch.full((*grad.shape, 3), 7.0, dtype=grad.dtype)
    wide[..., 1] = grad
    return wide[..., 1]


def transposed(grad: Tensor) -> Tensor:
    order = list(range(grad.ndim))[::-1]
    return grad.permute(order).contiguous().permute(order)
