"""A loss scale that can shrink no further: one warning with the first bad parameter's name, on every device."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from adversarial import FLOAT16, FLOAT32
from device_clock import DeviceClock
from optimizer_runs import parameters, params_of, set_grads
from torch.nn import Parameter

import halfstep as hs
from halfstep.loss_scale import LossScale, Pace
from halfstep.outcomes import StepOutcome
from halfstep.reports import FloorReports

AT_THE_FLOOR = "the loss scale is at its minimum"


def iteration(scaler: hs.LossScaler, *optimizers: torch.optim.Optimizer, bad: bool = True) -> list[str]:
    """A step of each optimizer, the last parameter of the last one with a NaN or not; what was told."""
    for optimizer in optimizers:
        set_grads(params_of(optimizer), 1)
    if bad:
        params_of(optimizers[-1])[-1].grad.view(-1)[-1] = math.nan
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert all(w.filename == __file__ for w in told)
    return [str(w.message) for w in told]


def floors(messages: list[str]) -> list[str]:
    return [m for m in messages if AT_THE_FLOOR in m]


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW], ids=["halfstep", "foreign"])
def test_always_overflowing_ends_at_the_floor_with_one_warning_and_recovers(cls):
    weight = Parameter(torch.ones(2, dtype=FLOAT16))
    optimizer = cls([("head.weight", weight)], lr=1e-2)
    scaler = hs.LossScaler(init_scale=4.0, min_scale=0.5, growth_interval=3)
    told = [iteration(scaler, optimizer) for _ in range(20)]
    assert scaler.get_scale() == 0.5
    name = "the first non-finite gradient is that of parameter 'head.weight' (shape (2,), torch.float16)"
    assert [i for i, messages in enumerate(told) if floors(messages)] == [3], "4, 2, 1, and then at 0.5"
    assert floors(told[3]) == [
        f"halfstep: the loss scale is at its minimum, 0.5, and gradients still overflow ({name}): they are too large "
        "for their dtype, or the loss is not finite"
    ]
    skips = [m for messages in told for m in messages if "skipped" in m]
    assert len(skips) == 5  # 1, 2, 4, 8, 16
    assert all(name in m for m in skips)
    assert (weight == 1).all()

    assert [iteration(scaler, optimizer, bad=False) for _ in range(2)] == [[], []]
    assert floors(iteration(scaler, optimizer)) == [], "it never left the floor: told once"
    assert [iteration(scaler, optimizer, bad=False) for _ in range(6)] == [[]] * 6
    assert scaler.get_scale() == 2.0
    told = [iteration(scaler, optimizer) for _ in range(5)]
    assert [len(floors(messages)) for messages in told] == [0, 0, 1, 0, 0], "it had left the floor: told again"
    assert (weight != 1).all()


@pytest.mark.parametrize("low", [0.1, 0.3, 0.7, 1.0])
def test_a_floor_that_float32_rounds_is_noticed(low):
    """float32(0.1) lies above 0.1: compared as a Python number, the scale would never be at its minimum."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=1.0, min_scale=low)
    told = [m for _ in range(8) for m in iteration(scaler, optimizer)]
    assert len(floors(told)) == 1


def test_no_overflow_at_the_floor_no_warning():
    """One overflow that brings the scale down to its minimum says nothing about what happens there."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=2.0, min_scale=1.0)
    assert floors(iteration(scaler, optimizer)) == []
    assert scaler.get_scale() == 1.0
    assert floors(iteration(scaler, optimizer, bad=False)) == []
    assert len(floors(iteration(scaler, optimizer))) == 1


def test_hysteresis_is_not_yet_the_floor():
    optimizer = hs.AdamW(parameters(FLOAT16))
    scaler = hs.LossScaler(init_scale=1.0, min_scale=1.0, hysteresis=3)
    assert [len(floors(iteration(scaler, optimizer))) for _ in range(4)] == [0, 0, 1, 0]


def test_a_static_scale_has_no_floor():
    optimizer = hs.AdamW(parameters(FLOAT16))
    scaler = hs.LossScaler(init_scale=128.0, growth_factor=1.0, backoff_factor=1.0, min_scale=128.0)
    assert [len(floors(iteration(scaler, optimizer))) for _ in range(4)] == [0] * 4
    assert scaler.get_scale() == 128.0


def test_of_several_optimizers_the_one_that_overflowed_is_named():
    clean = torch.optim.SGD([("clean", Parameter(torch.ones(2)))], lr=0.1)
    foreign = torch.optim.SGD([("first", Parameter(torch.ones(3))), ("second", Parameter(torch.ones(4)))], lr=0.1)
    scaler = hs.LossScaler(init_scale=1.0)
    (told,) = floors(iteration(scaler, clean, hs.AdamW(parameters(FLOAT16)), foreign))
    assert "that of parameter 'second' (shape (4,), torch.float32)" in told


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.SGD], ids=["halfstep", "foreign"])
def test_what_unscale_saw_is_named_though_it_was_repaired(cls):
    params = parameters(FLOAT32)
    optimizer, scaler = cls(params), hs.LossScaler(init_scale=1.0)
    set_grads(params, 1)
    params[0].grad = None
    params[2].grad.view(-1)[0] = math.inf
    scaler.unscale_(optimizer)
    params[2].grad.zero_()
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        assert scaler.step(optimizer)
    with pytest.warns(RuntimeWarning, match=rf"{AT_THE_FLOOR}, 1, .* parameter 2 of group 0 \(shape \(4, 2, 3\)"):
        scaler.update()


def test_a_warning_that_is_an_error_ends_a_whole_update():
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=2.0, growth_interval=1)
    iteration(scaler, optimizer)
    set_grads(params_of(optimizer), 1)
    params_of(optimizer)[0].grad[0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="2 steps in a row were skipped"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeWarning, match=AT_THE_FLOOR):
            scaler.update()
    with pytest.raises(RuntimeError, match=r"update\(\) before a step\(\)"):
        scaler.update()
    assert iteration(scaler, optimizer, bad=False) == []
    assert scaler.get_scale() == 2.0


# ---- devices that are not waited for ---------------------------------------------------------------------------------
def test_a_device_is_not_waited_for(monkeypatch):
    clock = DeviceClock(monkeypatch)
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=2.0)
    assert [iteration(scaler, optimizer) for _ in range(3)] == [[], [], []]
    clock.finish()
    told = iteration(scaler, optimizer, bad=False)
    assert ["skipped" in m for m in told] == [True, True, False]
    assert "parameter 2 of group 0 (shape (4, 2, 3), torch.float16)" in told[2]
    assert floors(told) == told[2:]
    assert clock.waits == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.state_dict()
    assert scaler.get_scale() == 1.0


def test_a_checkpoint_waits_for_what_is_pending(monkeypatch):
    clock = DeviceClock(monkeypatch)
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler(init_scale=1.0)
    assert iteration(scaler, optimizer) == []
    with pytest.warns(RuntimeWarning, match=AT_THE_FLOOR):
        scaler.state_dict()
    assert clock.waits == 1


def test_a_foreign_optimizer_costs_one_wait_a_step(monkeypatch):
    clock = DeviceClock(monkeypatch)
    optimizer, scaler = torch.optim.SGD(parameters(FLOAT32)), hs.LossScaler()
    assert ["skipped" in m for m in iteration(scaler, optimizer)] == [True]
    assert iteration(scaler, optimizer, bad=False) == []
    assert clock.waits == 2


def test_the_rule_reads_no_number():
    """Tensors without data cannot be read: the scale grows, shrinks and is compared on the device alone."""
    meta = torch.device("meta")
    scale = LossScale(meta, 8.0, Pace(2.0, 0.5, 1), hysteresis=1, min_scale=1.0, max_scale=16.0)
    assert scale.learn(torch.ones((), dtype=torch.bool, device=meta)).device == meta
    assert scale.inverse().device == meta
    with pytest.raises(RuntimeError, match="meta tensors"):
        scale.value()


def test_a_flag_without_a_name_is_told_too():
    floor = FloorReports(1.0)
    with pytest.warns(RuntimeWarning, match=r"at its minimum, 1, and gradients still overflow \(found_inf was set\)"):
        floor.add(torch.tensor([True, False]), [StepOutcome(torch.tensor(True))])
