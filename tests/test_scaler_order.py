"""LossScaler's calls in an unusual order: what is right stays right, what is wrong is refused and can be put right."""

from __future__ import annotations

import re

import pytest
import torch
from adversarial import FLOAT32
from optimizer_runs import (
    assert_same,
    copies,
    held,
    parameters,
    params_of,
    set_grads,
    set_scaled_grads,
    skipped_step,
    train,
)

import halfstep as hs


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
def test_a_step_without_backward_does_nothing(cls):
    """No update and no counter, and nothing for update() to learn from; torch's own scaler fails an assertion."""
    optimizer, scaler = cls(parameters(FLOAT32)), hs.LossScaler(init_scale=64.0)
    before = held(optimizer)
    assert not scaler.step(optimizer)
    assert_same(held(optimizer), before)
    with pytest.raises(RuntimeError, match=r"nothing to learn from yet\. Call backward\(\) on the scaled loss first"):
        scaler.update()
    scaler.update(64.0)
    set_scaled_grads(optimizer, scaler, 1)
    assert not scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
def test_unscale_without_gradients_divides_nothing_yet(cls):
    """Gradients that come later still carry the scale."""
    optimizer, plain, scaler = cls(parameters(FLOAT32)), cls(parameters(FLOAT32)), hs.LossScaler(init_scale=64.0)
    scaler.unscale_(optimizer)
    set_scaled_grads(optimizer, scaler, 1)
    scaler.step(optimizer)
    train(plain, [1])
    assert_same(held(optimizer), held(plain))


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
def test_clipped_before_unscale_the_limit_is_that_of_scaled_gradients(cls, unscale_first):
    """As documented: max_norm becomes max_norm / scale."""
    optimizer, plain, scaler = cls(parameters(FLOAT32)), cls(parameters(FLOAT32)), hs.LossScaler(init_scale=64.0)
    set_scaled_grads(optimizer, scaler, 1)
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 1.0)
    set_grads(params_of(plain), 1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params_of(plain)])
    for p in params_of(plain):
        p.grad *= 64 / (64 * norm + 1e-6) / 64
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    plain.step()
    moments, expected = ([o.state[p]["exp_avg"] for p in params_of(o)] for o in (optimizer, plain))
    for got, wanted in zip(moments, expected, strict=True):
        # of the norm, its sum with 1e-6, the quotient, the product and m, half an eps each and on either side
        torch.testing.assert_close(got, wanted, rtol=8 * torch.finfo(FLOAT32).eps, atol=0)
    assert torch.nn.utils.get_total_norm([m.double() for m in moments]) < 0.1 / 64 * (1 + 8 * torch.finfo(FLOAT32).eps)


@pytest.mark.parametrize("idle_first", [False, True])
def test_the_one_without_gradients_may_come_first_or_last(idle_first):
    idle, busy = hs.AdamW(parameters(FLOAT32)), torch.optim.SGD(parameters(FLOAT32))
    scaler = hs.LossScaler(init_scale=64.0)
    if idle_first:
        assert not scaler.step(idle)
    assert skipped_step(scaler, busy)
    if not idle_first:
        assert not scaler.step(idle)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert not idle.state


# ---- misuse ----------------------------------------------------------------------------------------------------------
def unscale_twice(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler, optimizer):
    scaler.step(optimizer)
    scaler.step(optimizer)


MISUSE = [
    (
        unscale_twice,
        "unscale_() on an optimizer that was unscaled since the last update(): its gradients would be divided twi",
    ),
    (
        unscale_after_step,
        "unscale_() on an optimizer that was stepped since the last update(): its gradients would be divided",
    ),
    (step_twice, "step() was already called on this optimizer since the last update(); call update() first"),
    (
        lambda scaler, optimizer: scaler.update(),
        "update() before a step() or unscale_() that saw gradients: there is nothing to learn from yet",
    ),
    (
        lambda scaler, optimizer: scaler.step(optimizer, lambda: 1),
        "step() with a closure is not possible under a scaler",
    ),
    (
        lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 1),
        "step() with a closure is not possible under a sc",
    ),
]


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize(("misuse", "message"), MISUSE, ids=[m[:30] for _, m in MISUSE])
def test_misuse_is_named_and_the_scaler_goes_on(cls, misuse, message):
    optimizer, scaler = cls(parameters(FLOAT32)), hs.LossScaler()
    set_scaled_grads(optimizer, scaler, 1)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        misuse(scaler, optimizer)
    scaler.update(new_scale=64.0)
    set_scaled_grads(optimizer, scaler, 2)
    assert not scaler.step(optimizer)
    scaler.update()


def test_a_step_that_fails_leaves_no_scale_behind():
    optimizer, scaler = hs.AdamW(parameters(FLOAT32), backend="triton"), hs.LossScaler()
    set_scaled_grads(optimizer, scaler, 1)
    with pytest.raises(RuntimeError, match="triton"):
        scaler.step(optimizer)
    optimizer.backend = None
    plain = hs.AdamW(copies(params_of(optimizer)))
    train(optimizer, [2])
    train(plain, [2])
    assert_same(held(optimizer), held(plain))
    set_scaled_grads(optimizer, scaler, 3)
    assert not scaler.step(optimizer)  # it did not count as a step


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
def test_disabled_a_closure_and_any_order_pass(cls):
    """Nothing is scaled, so nothing can be divided twice."""
    optimizer, scaler = cls(parameters(FLOAT32)), hs.LossScaler(enabled=False)
    set_grads(params_of(optimizer), 1)
    scaler.update()
    for _ in range(2):
        scaler.unscale_(optimizer)
        assert not scaler.step(optimizer, lambda: torch.ones(()))
    assert optimizer.state[params_of(optimizer)[0]]["step"] == 2


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
def test_the_state_may_be_asked_for_and_loaded_at_any_time(cls):
    """It changes in update() alone; a scale loaded in mid-iteration is that of the next one, as the gradients were
    divided by the old one already."""
    optimizer, scaler = cls(parameters(FLOAT32)), hs.LossScaler(growth_interval=1)
    loss = sum((p * 0.5).sum() for p in params_of(optimizer))
    states = [scaler.state_dict()]
    scaler.scale(loss).backward()
    states.append(scaler.state_dict())
    scaler.unscale_(optimizer)
    states.append(scaler.state_dict())
    scaler.step(optimizer)
    states.append(scaler.state_dict())
    assert all(state == states[0] for state in states)
    scaler.load_state_dict({**states[0], "scale": 8.0})
    scaler.update()
    assert scaler.state_dict() == {**states[0], "scale": 16.0}
    moments = [optimizer.state[p]["exp_avg"] for p in params_of(optimizer)]
    assert all(((m - 0.05).abs() <= 0.05 * torch.finfo(FLOAT32).eps).all() for m in moments)
