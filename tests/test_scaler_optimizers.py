"""LossScaler with foreign optimizers, several at once, schedulers, and used in the wrong order."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pytest
import torch
from adversarial import FLOAT16, FLOAT32
from optimizer_runs import (
    assert_same,
    assert_unchanged,
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

FOREIGN = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),  # would unscale for GradScaler
}


@pytest.mark.parametrize("build", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_foreign_optimizer(unscale_first, build):
    params, plain = parameters(FLOAT32), parameters(FLOAT32)
    optimizer, other = build(params), build(plain)
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


@pytest.mark.parametrize("build", [hs.AdamW, FOREIGN["SGD"]], ids=["halfstep", "foreign"])
def test_skips_are_told_at_powers_of_two_and_by_name(build):
    """Each optimizer counts its own row; frozen parameters and those without a gradient keep their places."""
    params = [("frozen", parameters(FLOAT32)[0]), *zip(("a", "b"), parameters(FLOAT32)[1:], strict=True)]
    optimizer, other = build(params), build(parameters(FLOAT32))
    scaler, told = hs.LossScaler(min_scale=2.0**-60), []
    for bad in [True] * 9 + [False, True]:
        for o in (optimizer, other):
            set_grads(params_of(o), 1)
        params_of(optimizer)[0].grad = None
        if bad:
            params_of(optimizer)[2].grad.view(-1)[3] = math.nan
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(other)
            scaler.step(optimizer)
        scaler.update()
        assert all(w.filename == __file__ for w in caught)
        told.append([str(w.message) for w in caught])
    assert [i + 1 for i, messages in enumerate(told) if messages] == [1, 2, 4, 8, 11]
    name = "the first non-finite gradient is that of parameter 'b' (shape (4, 2, 3), torch.float32)"
    assert told[0] == [f"halfstep: a step was skipped, 1 in all ({name}); weights and states are unchanged"]
    assert told[7] == [f"halfstep: 8 steps in a row were skipped, 8 in all ({name}); weights and states are unchanged"]
    assert told[10] == [f"halfstep: a step was skipped, 10 in all ({name}); weights and states are unchanged"]


@pytest.mark.parametrize("build", [hs.AdamW, FOREIGN["SGD"]], ids=["halfstep", "foreign"])
def test_a_report_that_is_an_error_ends_a_whole_step(build):
    """It counts as stepped, so update() learns from it and the loop can go on."""
    optimizer, scaler = build(parameters(FLOAT32)), hs.LossScaler(init_scale=64.0)
    overflow(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="a step was skipped"):
            scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) was already called"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    set_scaled_grads(optimizer, scaler, 1)
    assert not scaler.step(optimizer)


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


@pytest.mark.parametrize("build", [hs.AdamW, FOREIGN["SGD"]], ids=["halfstep", "foreign"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_scaler_keeps_nobody_alive(build, enabled):
    """It remembers what optimizers and schedulers did, not them: their states are most of a run's memory."""
    optimizer, scaler = build(parameters(FLOAT32)), hs.LossScaler(init_scale=64.0, enabled=enabled)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    set_scaled_grads(optimizer, scaler, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.advance(schedule)
    alive = weakref.ref(optimizer), weakref.ref(schedule)
    del optimizer, schedule
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


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
