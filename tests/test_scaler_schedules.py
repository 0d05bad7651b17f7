"""Learning-rate schedulers under a scaler: they advance with the steps that happened, and wait for no other work."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from device_clock import DeviceClock
from optimizer_runs import (
    assert_same,
    held,
    parameters,
    params_of,
    saved_and_loaded,
    set_grads,
    set_scaled_grads,
    skipped_step,
)
from torch.optim import lr_scheduler

import halfstep as hs

STEPS = 12
BAD = {0, 3, 4, 9}  # the first step too: torch warns of schedulers that step before their optimizer


def lambda_lr(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)


def sequential(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[3])


SCHEDULES = [lambda_lr, one_cycle, sequential]
OPTIMIZERS = [hs.AdamW, torch.optim.AdamW]


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a scheduler moves: one-cycle moves a beta too."""
    return [x for group in optimizer.param_groups for x in (group["lr"], group["betas"][0])]


def train(
    scaler: hs.LossScaler, optimizer: torch.optim.Optimizer, advance: Callable[[], Any], steps: range
) -> list[list[float]]:
    """The recipe of `advance`: asked between backward() and step(). The rates each step was done with."""
    used = []
    for t in steps:
        set_grads(params_of(optimizer), t, spread=scaler.get_scale())
        if t in BAD:
            params_of(optimizer)[0].grad.view(-1)[0] = math.inf
        advance()
        used.append(rates(optimizer))
        scaler.step(optimizer)
        scaler.update()
    return used


@pytest.fixture(autouse=True)
def skips_are_expected():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="halfstep: .* skipped")
        yield


@pytest.mark.parametrize("build", SCHEDULES)
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=["halfstep", "foreign"])
def test_the_rates_are_those_of_the_steps_that_happened(cls, build):
    """Oracle: the same scheduler in a plain loop without the skipped steps."""
    plain = cls(parameters(FLOAT32), lr=0.01)
    schedule, expected = build(plain), []
    for t in sorted(set(range(STEPS)) - BAD):
        set_grads(params_of(plain), t)
        expected.append(rates(plain))
        plain.step()
        schedule.step()

    optimizer, scaler = cls(parameters(FLOAT32), lr=0.01), hs.LossScaler(init_scale=1024.0)
    ours = build(optimizer)
    used = train(scaler, optimizer, lambda: scaler.advance(ours), range(STEPS))
    assert [used[t] for t in range(STEPS) if t not in BAD] == expected
    assert len({tuple(rate) for rate in expected}) == len(expected), "the schedule must move at every step"
    assert scaler.advance(ours)
    assert ours.state_dict().keys() == schedule.state_dict().keys()
    assert ours.last_epoch == schedule.last_epoch
    assert ours.get_last_lr() == schedule.get_last_lr()
    assert_same(held(optimizer), held(plain))


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=["halfstep", "foreign"])
def test_asked_at_once_or_twice_it_is_the_same(cls):
    """Right after the step instead of before the next: one wait more, the same rates."""
    results = []
    for times in (1, 2):
        optimizer, scaler = cls(parameters(FLOAT32), lr=0.01), hs.LossScaler(init_scale=64.0)
        schedule, used, moved = lambda_lr(optimizer), [], []
        for t in range(STEPS):
            set_grads(params_of(optimizer), t, spread=scaler.get_scale())
            if t in BAD:
                params_of(optimizer)[1].grad.view(-1)[0] = math.nan
            used.append(optimizer.param_groups[0]["lr"])
            scaler.step(optimizer)
            moved.append([scaler.advance(schedule) for _ in range(times)])
            scaler.update()
        assert [any(answers) for answers in moved] == [t not in BAD for t in range(STEPS)]
        assert all(sum(answers) <= 1 for answers in moved)
        results.append(used)
    assert results[0] == results[1]


@pytest.mark.parametrize("at", [3, 4, 5, 6])
@pytest.mark.parametrize("build", SCHEDULES)
def test_a_checkpoint_goes_on(build, at):
    """After a skip and after a step: asked before saving, the scheduler's state holds every step that happened."""

    def start():
        optimizer, scaler = hs.AdamW(parameters(FLOAT16), lr=0.01), hs.LossScaler(init_scale=64.0)
        return optimizer, scaler, build(optimizer)

    whole, scaler, schedule = start()
    expected = train(scaler, whole, lambda: scaler.advance(schedule), range(STEPS))

    optimizer, scaler, schedule = start()
    used = train(scaler, optimizer, lambda: scaler.advance(schedule), range(at))
    scaler.advance(schedule)
    saved = [part.state_dict() for part in (optimizer, scaler, schedule)]
    resumed = start()
    for p, q in zip(params_of(resumed[0]), params_of(optimizer), strict=True):
        p.data.copy_(q)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(saved_and_loaded(state))
    other, other_scaler, other_schedule = resumed
    used += train(other_scaler, other, lambda: other_scaler.advance(other_schedule), range(at, STEPS))
    assert used == expected
    assert_same(held(other), held(whole))


def test_a_loop_may_ask_the_flag_itself():
    """Without advance(): ask the step's answer. One wait, in the loop that wants to know."""
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


def test_nothing_is_waited_for_but_the_step_asked_about(monkeypatch):
    """The device is one step behind: what was queued since (this iteration's backward) is not waited for."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT32)), hs.LossScaler()
    schedule, clock = lambda_lr(optimizer), DeviceClock(monkeypatch)
    behind = []

    def advance() -> None:
        before = clock.waits
        scaler.advance(schedule)
        assert clock.waits <= before + 1
        behind.append(clock.recorded - clock.done)

    train(scaler, optimizer, advance, range(1, 6))
    assert clock.waits == 4, "once a step, from the second on"
    # the scale's own report, made after the step, is still on its way when the step's answer is there
    assert behind == [0, 1, 1, 1, 1]
    clock.finish()
    waits = clock.waits
    scaler.advance(schedule)
    assert clock.waits == waits, "an answer that is there costs nothing"


def test_several_optimizers_and_schedules():
    """Each scheduler follows its own optimizer; two schedulers of one optimizer both advance."""
    optimizer, other = (torch.optim.SGD(parameters(FLOAT32), lr=1.0) for _ in range(2))
    scaler = hs.LossScaler()
    schedules = [
        lr_scheduler.ExponentialLR(optimizer, 0.5),
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.ExponentialLR(other, 0.5),
    ]
    set_grads(params_of(optimizer), 1)
    set_grads(params_of(other), 1)
    params_of(other)[0].grad[0] = math.inf
    scaler.step(optimizer)
    scaler.step(other)
    scaler.update()
    assert [scaler.advance(s) for s in schedules] == [True, True, False]
    assert [s.last_epoch for s in schedules] == [1, 1, 0]


def test_a_scheduler_that_wants_a_metric():
    optimizer, scaler = hs.AdamW(parameters(FLOAT32), lr=1.0), hs.LossScaler(init_scale=1.0)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for t, loss in enumerate([1.0, 2.0, 0.5, 3.0], start=100):
        set_grads(params_of(optimizer), t)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.advance(schedule, loss)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=["halfstep", "foreign"])
def test_disabled_it_advances_too(cls):
    """The same loop for bfloat16, which needs no scale; halfstep's optimizers may still skip."""
    optimizer, scaler = cls(parameters(BFLOAT16), lr=0.5), hs.LossScaler(enabled=False)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert not scaler.advance(schedule)
    moved = []
    for t in range(5):
        set_grads(params_of(optimizer), t)
        if t == 2:
            params_of(optimizer)[0].grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        moved.append(scaler.advance(schedule))
        assert not scaler.advance(schedule)
    assert moved == [True, True, cls is not hs.AdamW, True, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_a_copy_starts_anew(copied):
    """It has seen no step, so there is none to advance for; the original goes on."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT32)), hs.LossScaler(init_scale=1.0)
    schedule = lambda_lr(optimizer)
    set_grads(params_of(optimizer), 1)
    scaler.step(optimizer)
    scaler.update()
    assert not copied(scaler).advance(schedule)
    assert scaler.advance(schedule)


@pytest.mark.parametrize("wrong", [None, 0.1, lambda epoch: 1.0], ids=["None", "float", "function"])
def test_what_cannot_advance(wrong):
    with pytest.raises(
        TypeError, match=r"advance\(\) takes a learning-rate scheduler, whose \.optimizer it asks; got "
    ):
        hs.LossScaler().advance(wrong)
