"""LossScaler with foreign optimizers, several at once, schedulers, and used in the wrong order."""

from __future__ import annotations

import re

import pytest
import torch
from adversarial import FLOAT16, FLOAT32
from optimizer_runs import (
    assert_same,
    assert_unchanged,
    copies,
    held,
    overflow,
    parameters,
    params_of,
    set_grads,
    set_scaled_grads,
    skipped_step,
    train,
)

import halfstep as hs


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_foreign_optimizer(unscale_first):
    params, plain = parameters(FLOAT32), parameters(FLOAT32)
    optimizer, other = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(plain, lr=0.1)
    scaler = hs.LossScaler(init_scale=64.0)
    set_scaled_grads(optimizer, scaler, 1)
    set_grads(plain, 1)
    if unscale_first:
        scaler.unscale_(optimizer)
    assert not scaler.step(optimizer)
    other.step()
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    assert skipped_step(scaler, optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    assert scaler.get_scale() == 32.0


def test_several_optimizers_on_one_scaler():
    """One overflows and is skipped, one steps, one has no gradients; the scale shrinks once."""
    bad, good, idle = (hs.AdamW(parameters(FLOAT16)) for _ in range(3))
    foreign = torch.optim.SGD(parameters(FLOAT32), lr=0.1)
    scaler = hs.LossScaler(init_scale=64.0)
    for optimizer in (good, foreign):
        set_scaled_grads(optimizer, scaler, 1)
    before = held(bad), held(idle)
    assert skipped_step(scaler, bad)
    assert [scaler.step(o).item() for o in (good, idle, foreign)] == [False] * 3
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert_unchanged(bad, before[0])
    assert_unchanged(idle, before[1])
    assert good.state[params_of(good)[0]]["step"] == 1


def test_a_halfstep_optimizer_that_was_only_unscaled_counts():
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=64.0)
    overflow(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0


def test_arguments_go_to_the_optimizers_step():
    class Recording(torch.optim.SGD):
        def step(self, closure=None, *, flavour=None):
            self.flavour = flavour
            return super().step(closure)

    optimizer = Recording(parameters(FLOAT32))
    for scaler in (hs.LossScaler(), hs.LossScaler(enabled=False)):
        set_grads(params_of(optimizer), 1)
        scaler.step(optimizer, flavour=scaler)
        assert optimizer.flavour is scaler


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize(("args", "kwargs"), [((None,), {}), ((), {"closure": None})])
def test_no_closure_may_be_said_aloud(cls, args, kwargs):
    optimizer = cls(parameters(FLOAT32))
    set_grads(params_of(optimizer), 1)
    assert not hs.LossScaler(init_scale=1.0).step(optimizer, *args, **kwargs)
    assert optimizer.state[params_of(optimizer)[0]]["step"] == 1


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


def test_a_scheduler_that_does_not_advance_on_a_skip():
    """The recipe: ask the step's answer. One wait, in the loop that wants to know."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT16), lr=1.0), hs.LossScaler(init_scale=64.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    rates = []
    for t, bad in enumerate([True, False, True, True, False]):
        set_scaled_grads(optimizer, scaler, t)
        skipped = skipped_step(scaler, optimizer) if bad else scaler.step(optimizer)
        scaler.update()
        if not skipped:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.25]


def test_disabled_it_is_not_there():
    optimizer, plain = hs.AdamW(parameters(FLOAT32)), hs.AdamW(parameters(FLOAT32))
    scaler, loss = hs.LossScaler(enabled=False), torch.ones(())
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    set_grads(params_of(optimizer), 1)
    train(plain, [1])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert not scaler.step(optimizer)
    scaler.update()
    assert_same(held(optimizer), held(plain))
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
