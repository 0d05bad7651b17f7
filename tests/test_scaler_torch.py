"""halfstep's optimizers under torch.amp.GradScaler: it hands over scale and flag, the step does the rest."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from optimizer_runs import assert_same, assert_unchanged, held, parameters, params_of, set_grads, train

import halfstep as hs


def grad_scaler(**options) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, **options)
    scaler.scale(torch.zeros(()))  # makes its tensors
    return scaler


def set_scaled_grads(optimizer, scaler, t: int, *, bad: bool) -> None:
    set_grads(params_of(optimizer), t)
    for p in params_of(optimizer):
        p.grad *= scaler.get_scale()
    if bad:
        params_of(optimizer)[-1].grad.view(-1)[0] = math.nan


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": False}], ids=str)
def test_the_same_run_as_under_our_scaler(dtype, options):
    ours, theirs = hs.AdamW(parameters(dtype), **options), hs.AdamW(parameters(dtype), **options)
    scalers = hs.LossScaler(init_scale=256.0, growth_interval=2), grad_scaler()
    skips = []
    for t, bad in enumerate([False, True, False, False, True, False]):
        for optimizer, scaler in zip((ours, theirs), scalers, strict=True):
            set_scaled_grads(optimizer, scaler, t, bad=bad)
            if bad:
                with pytest.warns(RuntimeWarning, match="skipped"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(held(theirs), held(ours))
        skips.append(theirs.skipped.item())
    assert skips == [False, True, False, False, True, False]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_unscale_and_clip_first(dtype):
    optimizer, plain = (
        hs.AdamW(parameters(dtype), skip_nonfinite=True),
        hs.AdamW(parameters(dtype), skip_nonfinite=True),
    )
    scaler = grad_scaler()
    set_scaled_grads(optimizer, scaler, 1, bad=False)
    scaler.unscale_(optimizer)
    set_grads(params_of(plain), 1)
    for o in (optimizer, plain):
        torch.nn.utils.clip_grad_norm_(params_of(o), 0.25)
    scaler.step(optimizer)
    plain.step()
    scaler.update()
    assert_same(held(optimizer), held(plain))

    set_scaled_grads(optimizer, scaler, 2, bad=True)
    before = held(optimizer)
    scaler.unscale_(optimizer)
    for p in params_of(optimizer):
        p.grad.nan_to_num_()
    with pytest.warns(RuntimeWarning, match="found_inf was set"):
        scaler.step(optimizer)
    assert_same(held(optimizer), before)


def test_two_optimizers_two_flags():
    good, bad = hs.AdamW(parameters(FLOAT16)), hs.AdamW(parameters(FLOAT16))
    scaler = grad_scaler()
    before = held(bad)
    set_scaled_grads(good, scaler, 1, bad=False)
    set_scaled_grads(bad, scaler, 1, bad=True)
    scaler.step(good)
    with pytest.warns(RuntimeWarning, match="skipped"):
        scaler.step(bad)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert_unchanged(bad, before)
    assert good.state[params_of(good)[0]]["step"] == 1


def test_nothing_is_left_on_the_optimizer():
    """A step without a scaler, with ours, and with torch's, in turn and on a copy."""
    optimizer, plain = hs.AdamW(parameters(FLOAT32)), hs.AdamW(parameters(FLOAT32))
    ours, theirs = hs.LossScaler(init_scale=64.0), grad_scaler()
    for t, scaler in enumerate([theirs, None, ours, theirs, ours, None]):
        train(plain, [t])
        if scaler is None:
            train(optimizer, [t])
        else:
            set_scaled_grads(optimizer, scaler, t, bad=False)
            scaler.step(optimizer)
            scaler.update()
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        optimizer = copy.deepcopy(optimizer)
    assert_same(held(optimizer), held(plain))


def test_an_optimizer_without_gradients_has_nothing_to_do():
    idle, busy = hs.AdamW(parameters(FLOAT16)), hs.AdamW(parameters(FLOAT16))
    scaler = grad_scaler()
    set_scaled_grads(busy, scaler, 1, bad=False)
    scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    assert idle.state_dict()["state"] == {}


def test_autocast_training_with_torchs_scaler_learns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.randn(128, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer, scaler, losses = hs.AdamW(model.parameters(), lr=3e-2), torch.amp.GradScaler("cpu"), []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BFLOAT16):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
