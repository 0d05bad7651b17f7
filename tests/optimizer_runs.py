"""Short training runs with given gradients, what an optimizer holds afterwards, and how wrong that may be."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from adversarial import generator, ordinary
from bits import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs

SHAPES = [(7,), (3, 5), (4, 2, 3)]
ROW_MODES: list[dict[str, Any]] = [  # what makes a row of the fused update, for every dtype of a weight
    {},
    {"amsgrad": True, "maximize": True},
    {"max_grad_norm": 0.5},
    {"state_dtype": torch.bfloat16},
    {"master": None, "stochastic_rounding": True, "seed": 5},
]
_FLOAT32 = torch.finfo(torch.float32)


def parameters(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Parameter]:
    return [Parameter(ordinary(shape, dtype, seed + i)) for i, shape in enumerate(shapes)]


def copies(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[Parameter]:
    return [Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


@cache
def _gradient(shape: tuple[int, ...], t: int, i: int) -> Tensor:
    """Normal numbers that every dtype of a weight holds exactly (bfloat16 steps, inside float16's normal range)."""
    values = torch.randn(shape, generator=generator(1000 * t + i)).bfloat16()
    return values.sign() * values.abs().clamp(2.0**-10, 8.0)


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def only(optimizer: torch.optim.Optimizer) -> tuple[Parameter, dict[str, Tensor]]:
    """The one parameter of an optimizer, and its state."""
    (param,) = params_of(optimizer)
    return param, optimizer.state[param]


def set_grads(params: Sequence[Tensor], t: int, spread: float = 1.0) -> None:
    """The gradients of step t: the same numbers for every optimizer, whatever its parameters' dtype."""
    for i, p in enumerate(params):
        p.grad = (_gradient(tuple(p.shape), t, i) * spread).to(p.device, p.dtype, copy=True)


def set_scaled_grads(optimizer: torch.optim.Optimizer, scaler: hs.LossScaler, t: int) -> None:
    """The gradients of step t as a scaled loss gives them."""
    set_grads(params_of(optimizer), t)
    for p in params_of(optimizer):
        p.grad *= scaler.get_scale()


def overflow(optimizer: torch.optim.Optimizer) -> None:
    """Gradients of 0, one of them Inf."""
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    params_of(optimizer)[0].grad.view(-1)[0] = float("inf")


def skipped_step(scaler: hs.LossScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """A step that overflows, and says so; whether it was skipped."""
    overflow(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        skipped = scaler.step(optimizer)
    assert ["skipped" in str(w.message) for w in told] == [True]
    return skipped


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int], spread: float = 1.0) -> None:
    params = params_of(optimizer)
    for t in steps:
        set_grads(params, t, spread)
        optimizer.step()


def held(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of every weight and state tensor, by position and key. `optimizer.state` does not notice."""
    params = params_of(optimizer)
    found = {f"{i}.weight": p.detach().clone() for i, p in enumerate(params)}
    for i, p in enumerate(params):
        found.update({f"{i}.{key}": value.clone() for key, value in dict.get(optimizer.state, p, {}).items()})
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for key in got:
        assert_same_bits(got[key], expected[key], key)


def assert_unchanged(optimizer: torch.optim.Optimizer, before: dict[str, Tensor]) -> None:
    """As `before`, but for states that a first, skipped step may have made."""
    after = held(optimizer)
    assert_same({key: after[key] for key in before}, before)


def assert_as_good_as(got: Sequence[Tensor], naive: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """`got` errs like of another float32 computation (at most twice at the worst element, 1.5 times on average).

    A half unit in the last place of the truth is nobody's error: both have to round.
    """
    mine, theirs, exact = (torch.cat([t.detach().double().reshape(-1) for t in ts]) for ts in (got, naive, truth))
    assert mine.isfinite().all()
    assert exact.isfinite().all()
    floor = exact.abs() * _FLOAT32.eps / 2
    error, allowed = (mine - exact).abs(), (theirs - exact).abs()
    assert error.max() <= 2 * allowed.max() + 2 * floor.max()
    assert error.mean() <= 1.5 * allowed.mean() + floor.mean()


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def on_copies(optimizer: hs.AdamW, state_dict: dict[str, Any], **options: Any) -> hs.AdamW:
    """A new optimizer of copies of the parameters, with the checkpoint in it."""
    other = type(optimizer)(copies(params_of(optimizer)), **options)
    other.load_state_dict(state_dict)
    return other


def assert_goes_on(optimizer: hs.AdamW, other: hs.AdamW) -> None:
    assert_same(held(other), held(optimizer))
    train(optimizer, range(10, 14))
    train(other, range(10, 14))
    assert_same(held(other), held(optimizer))
