"""The scale itself: growth, backoff, hysteresis, bounds, and the state that carries it."""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
import warnings

import numpy as np
import pytest
import torch
from adversarial import FLOAT16, FLOAT32
from optimizer_runs import params_of
from torch.nn import Parameter

import halfstep as hs


def run(scaler: hs.LossScaler, bad: list[bool]) -> list[float]:
    """The scale after each step with or without an overflow; what is said of skips is for others to test."""
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))])
    scales = []
    for overflows in bad:
        params_of(optimizer)[0].grad = torch.full((1,), math.inf if overflows else 0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="halfstep: .* skipped")
            assert scaler.step(optimizer).item() == overflows
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def model(bad: list[bool], init=2.0**16, growth=2.0, backoff=0.5, interval=2000, hysteresis=1, low=1.0, high=2.0**32):
    """The rule in numpy float32: hysteresis counts overflows since the scale last grew, as in Megatron-LM."""
    scale, clean, left, scales = np.float32(init), 0, hysteresis, []
    for overflows in bad:
        if overflows:
            clean, left = 0, max(left - 1, 0)
            scale = scale if left else max(scale * np.float32(backoff), np.float32(low))
        else:
            clean += 1
        if clean == interval:
            clean, left, scale = 0, hysteresis, min(scale * np.float32(growth), np.float32(high))
        scales.append(float(scale))
    return scales


RULES = {
    "default": {},
    "every 3": {"interval": 3},
    "gradual": {"growth": 1.05, "interval": 1},
    "static": {"growth": 1.0, "backoff": 1.0, "interval": 1},
    "hysteresis 2": {"hysteresis": 2, "interval": 4},
    "hysteresis 3, gradual": {"hysteresis": 3, "growth": 1.001, "interval": 1, "backoff": 0.75},
    "narrow": {"interval": 2, "low": 2.0**14, "high": 2.0**17},
    "no growth": {"growth": 1.0},
    "uneven": {"interval": 2, "growth": 3.0, "backoff": 0.3, "low": 0.7, "high": 1e9, "init": 100.0},
}
NAMES = {"init": "init_scale", "growth": "growth_factor", "backoff": "backoff_factor", "interval": "growth_interval",
         "hysteresis": "hysteresis", "low": "min_scale", "high": "max_scale"}  # fmt: skip


@pytest.mark.filterwarnings("ignore:halfstep. the loss scale is at its minimum")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_the_scale_follows_the_rule(rule, share):
    dice = random.Random(f"{sorted(rule.items())} {share}")
    bad = [dice.random() < share for _ in range(200)]
    scales = run(hs.LossScaler(**{NAMES[k]: v for k, v in rule.items()}), bad)
    assert scales == model(bad, **rule)
    low, high = rule.get("low", 1.0), rule.get("high", 2.0**32)
    assert all(np.float32(low) <= s <= np.float32(high) for s in scales)


def test_it_doubles_after_2000_clean_steps():
    scales = run(hs.LossScaler(), [False] * 2000)
    assert scales[-2:] == [2.0**16, 2.0**17]


@pytest.mark.parametrize("never", [10**9, 2**31, 2**32, 2**40, math.inf])
def test_an_interval_that_never_ends(never):
    """Compared with a 32-bit count, 2**32 would wrap to 0, and the scale would grow at every step."""
    scaler = hs.LossScaler(growth_interval=never)
    assert run(scaler, [False, False, True, False]) == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert run(hs.LossScaler(hysteresis=2**40), [True, True]) == [2.0**16, 2.0**16]


def test_the_ceiling():
    scales = run(hs.LossScaler(init_scale=2.0**30, growth_interval=1), [False] * 10)
    assert scales[-1] == 2.0**32
    largest = torch.finfo(FLOAT32).max
    scales = run(hs.LossScaler(init_scale=2.0**126, growth_interval=1, max_scale=largest), [False] * 5)
    assert scales[-1] == largest


@pytest.mark.parametrize(("growth", "interval"), [(1.05, 1), (2.0, 3)])
def test_every_batch_is_used_once_when_a_skipped_one_is_repeated(growth, interval):
    """float16 gradients that really overflow: the batch is tried again with the smaller scale until it fits."""
    weight = Parameter(torch.ones(1, dtype=FLOAT16))
    optimizer = hs.AdamW([weight], lr=1e-3, weight_decay=0.0)
    scaler = hs.LossScaler(init_scale=2.0**20, growth_factor=growth, growth_interval=interval)
    tries = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="halfstep: .* skipped")
        for batch in range(1, 40):
            skipped = True
            while skipped:
                optimizer.zero_grad()
                scaler.scale((weight * float(batch)).sum()).backward()
                skipped = bool(scaler.step(optimizer))
                scaler.update()
                tries += 1
    state = optimizer.state[weight]
    assert state["step"] == 39
    assert tries > 39 + 5, "nothing overflowed on the way"
    exact = Parameter(torch.ones(1, dtype=torch.float64))
    other = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0)
    for batch in range(1, 40):
        exact.grad = torch.full((1,), float(batch), dtype=torch.float64)
        other.step()
    # the gradient was rounded to float16 once, the scale is exact or divides out to float32
    bound = 39 * 1e-3 * torch.finfo(FLOAT16).eps
    assert (state["master"] - exact).abs() <= bound


def test_update_takes_a_new_scale_within_the_bounds():
    scaler = hs.LossScaler(min_scale=2.0, max_scale=2.0**20)
    for given, kept in [(32.0, 32.0), (torch.tensor([64.0]), 64.0), (0.0, 2.0), (-1.0, 2.0), (math.inf, 2.0**20)]:
        scaler.update(given)
        assert scaler.get_scale() == kept
    with pytest.raises(ValueError, match="the new loss scale is NaN; expected a number"):
        scaler.update(math.nan)
    assert scaler.get_scale() == 2.0**20


# ---- state -----------------------------------------------------------------------------------------------------------
def test_state_before_the_first_use():
    scaler = hs.LossScaler(init_scale=128.0, hysteresis=2, growth_interval=5)
    saved = scaler.state_dict()
    assert saved == {"scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5,
                     "_growth_tracker": 0, "_hysteresis_tracker": 2}  # fmt: skip
    other = hs.LossScaler()
    other.load_state_dict(saved)
    assert other.state_dict() == saved


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_copy_goes_on_as_the_original(how, used):
    rule = {"growth_interval": 4, "hysteresis": 2, "growth_factor": 3.0, "min_scale": 0.5}
    scaler, bad = hs.LossScaler(**rule), [False, True, False, False, False]
    run(scaler, bad)
    if how == "state_dict":
        other = hs.LossScaler(**rule)
        if used:
            run(other, [False, True, True])
        other.load_state_dict(scaler.state_dict())
    else:
        other = copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    rest = [True, False, True, True, False, False, False, False, True]
    assert run(other, rest) == run(scaler, rest)
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_in_mid_iteration_is_refused(copied):
    """The copy would not know which optimizers are unscaled."""
    optimizer, scaler = torch.optim.SGD([Parameter(torch.zeros(1))]), hs.LossScaler()
    params_of(optimizer)[0].grad = torch.zeros(1)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"only after update\(\) and before the next step\(\)"):
        copied(scaler)
    scaler.update()
    copied(scaler)


def test_state_goes_both_ways_with_torch():
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    ours = hs.LossScaler(hysteresis=3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == {**theirs.state_dict(), "_hysteresis_tracker": 3}
    run(ours, [False, False, True, True, True, False])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == {k: v for k, v in ours.state_dict().items() if k != "_hysteresis_tracker"}
    assert theirs.get_scale() == 64.0


@pytest.mark.parametrize("saved", [{}, hs.LossScaler(init_scale=8.0).state_dict()], ids=["empty", "of another"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_a_disabled_scaler_stays_disabled(copied, saved):
    """Copied, or given a checkpoint from a run that had a scale; torch's scaler loads what it saves: nothing."""
    scaler = copied(hs.LossScaler(enabled=False))
    scaler.load_state_dict(saved)
    assert not scaler.is_enabled()
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    torch.amp.GradScaler("cpu", enabled=False).load_state_dict(scaler.state_dict())


def test_a_growth_tracker_beyond_the_interval_grows_at_the_next_clean_step():
    """A checkpoint from a run with a longer interval; a count that is compared for equality would never grow again."""
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    ours = hs.LossScaler()
    ours.load_state_dict({**theirs.state_dict(), "_growth_tracker": 50, "growth_interval": 10})
    assert run(ours, [False, False]) == [128.0, 128.0]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_scale_set_before_the_first_loss_goes_where_the_loss_is(loaded):
    """Made on the CPU, it would be copied to the loss's device at every step."""
    scaler = hs.LossScaler()
    if loaded:
        scaler.load_state_dict(hs.LossScaler(init_scale=32.0).state_dict())
    else:
        scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaler.scale(torch.ones((), device="meta"))
    assert scaler._scale.tensor().device.type == "meta"
    assert hs.LossScaler("meta")._scale.tensor(torch.device("cpu")).device.type == "meta"


@pytest.mark.parametrize(("saved", "scale"), [(0.0, 1.0), (math.inf, 2.0**32), (1e-30, 1.0), (2.0**40, 2.0**32)])
def test_a_scale_that_went_astray_is_brought_back(saved, scale):
    """torch's scaler may end at 0 or Inf; its checkpoint must not end here the same way."""
    state = {**hs.LossScaler().state_dict(), "scale": saved}
    for scaler in (hs.LossScaler(), hs.LossScaler()):
        scaler.load_state_dict(state)
        assert scaler.get_scale() == scale
        run(scaler, [False])


def test_a_state_that_cannot_be_loaded_changes_nothing():
    scaler, good = hs.LossScaler(), hs.LossScaler().state_dict()
    with pytest.raises(RuntimeError, match="the scaler's state is empty: it was saved from a disabled scaler"):
        scaler.load_state_dict({})
    with pytest.raises(ValueError, match="the new loss scale is NaN"):
        scaler.load_state_dict({**good, "growth_factor": 4.0, "scale": math.nan})
    with pytest.raises(ValueError, match=r"expected growth_factor >= 1, .* got 0\.5, 0\.5 and 2000"):
        scaler.load_state_dict({**good, "growth_factor": 0.5})
    with pytest.raises(ValueError, match=r"state lacks _growth_tracker, scale; expected what state_dict\(\) of a Loss"):
        scaler.load_state_dict({k: v for k, v in good.items() if k not in ("scale", "_growth_tracker")})
    assert scaler.state_dict() == good


@pytest.mark.parametrize("count", [-1, 0.5, math.inf, math.nan, "3", None])
@pytest.mark.parametrize("key", ["_growth_tracker", "_hysteresis_tracker"])
def test_a_count_that_is_none(key, count):
    """Refused by name, before anything has changed."""
    scaler = hs.LossScaler(init_scale=128.0)
    good = scaler.state_dict()
    message = re.escape(f"the scaler's state has {key}={count!r}; expected a whole number of steps, 0 or more")
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict({**good, "scale": 2.0, key: count})
    assert scaler.state_dict() == good
    scaler.load_state_dict({**good, key: 3.0})
    assert scaler.state_dict()[key] == 3


# ---- arguments -------------------------------------------------------------------------------------------------------
BOUNDS = "expected 1.175e-38 <= min_scale <= init_scale <= max_scale <= 3.403e+38 (normal float32 numbers), got "
PACE = "expected growth_factor >= 1, backoff_factor in (0, 1] and growth_interval >= 1, got "
ARGUMENTS = [
    ({"init_scale": 0.0}, BOUNDS + "1.0, 0.0, 4294967296.0"),
    ({"init_scale": 0.5}, BOUNDS),
    ({"init_scale": math.nan}, BOUNDS),
    ({"init_scale": 2.0**33}, BOUNDS),
    ({"min_scale": 0.0}, BOUNDS),
    ({"min_scale": 1e-40}, BOUNDS),
    ({"max_scale": math.inf}, BOUNDS),
    ({"max_scale": 1e39}, BOUNDS),
    ({"growth_factor": 0.99}, PACE + "0.99, 0.5 and 2000"),
    ({"growth_factor": math.nan}, PACE),
    ({"backoff_factor": 0.0}, PACE),
    ({"backoff_factor": 1.5}, PACE),
    ({"growth_interval": 0}, PACE + "2.0, 0.5 and 0"),
    ({"hysteresis": 0}, "hysteresis=0: expected an integer >= 1"),
    ({"hysteresis": 1.5}, "hysteresis=1.5: expected an integer >= 1"),
    ({"hysteresis": math.inf}, "hysteresis=inf: expected an integer >= 1"),
    ({"hysteresis": math.nan}, "hysteresis=nan: expected an integer >= 1"),
]


@pytest.mark.parametrize(("options", "message"), ARGUMENTS, ids=[str(a) for a, _ in ARGUMENTS])
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hs.LossScaler(**options)


def test_setters_set_and_refuse():
    scaler = hs.LossScaler()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(2)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 2)
    assert run(scaler, [False, False, True]) == [2.0**16, 2.0**18, 2.0**16]
    for setter, wrong in [("growth_factor", 0.5), ("backoff_factor", 2.0), ("growth_interval", 0)]:
        with pytest.raises(ValueError, match=re.escape(PACE)):
            getattr(scaler, f"set_{setter}")(wrong)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 2)


def test_arguments_by_position_are_those_of_torch():
    ours, theirs = (cls("cpu", 8.0, 3.0, 0.25, 5) for cls in (hs.LossScaler, torch.amp.GradScaler))
    assert theirs.state_dict().items() <= ours.state_dict().items()
