"""An optimizer whose parameters lie on several devices: the norm, the skip and the first bad parameter are of all.

Two halves of a table of CPU rows stand in for two devices.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optimizer_runs import assert_same, held, parameters, params_of, set_grads

import halfstep as hs
from halfstep.ops import devices
from halfstep.ops.optimizer import AdamStep

BFLOAT16 = torch.bfloat16


def on_two_devices(optimizer: hs.AdamW) -> None:
    """From the next step on, as if the last parameter lay elsewhere."""
    (table,) = optimizer._tables
    (step,) = table._steps
    names = optimizer.names()
    table._steps = [
        AdamStep(step.rows[place], names[place], None, stochastic_weight=False) for place in (slice(2), slice(2, 3))
    ]
    table._places = [[0, 1], [2]]
    table._quick = False


def pair(**options: object) -> tuple[hs.AdamW, hs.AdamW]:
    """The same optimizer, on one device and on two."""
    one = hs.AdamW(parameters(BFLOAT16), **options)
    set_grads(params_of(one), 1)
    one.step()
    two = copy.deepcopy(one)
    for optimizer in (one, two):
        set_grads(params_of(optimizer), 2)
        optimizer.step()
    on_two_devices(two)
    return one, two


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.25}, {}, {"skip_nonfinite": False}], ids=str)
@pytest.mark.parametrize("scale", [None, 4.0])
def test_it_is_the_step_of_one_device(options, scale):
    one, two = pair(**options, lr=torch.tensor(0.1))
    for optimizer in (one, two):
        params = params_of(optimizer)
        set_grads(params, 3)
        with torch.no_grad():
            params[0].mul_(2)  # healed on the first device, and on the second
            params[2].mul_(2)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor([scale]), torch.zeros(1)
        with pytest.warns(RuntimeWarning, match=f"halfstep: {params[0].numel() + params[2].numel()} weights were writ"):
            optimizer.step()
    assert len(two._tables[0]._steps) == 2
    assert_same(held(two), held(one))
    for name in ("grad_norm", "skipped", "healed"):
        assert torch.equal(getattr(two, name), getattr(one, name)) or (name == "grad_norm" and one.grad_norm.isnan())


@pytest.mark.parametrize("bad", range(3))
def test_one_device_overflows_and_none_steps(bad):
    one, two = pair()
    for optimizer in (one, two):
        set_grads(params_of(optimizer), 3)
        params_of(optimizer)[bad].grad.view(-1)[0] = math.inf
        before = held(optimizer)
        with pytest.warns(RuntimeWarning, match=f"that of parameter {bad} of group 0"):
            optimizer.step()
        assert optimizer.skipped
        assert_same(held(optimizer), before)
    assert len(two._tables[0]._steps) == 2


def test_they_cannot_be_captured(monkeypatch):
    _, two = pair()
    set_grads(params_of(two), 3)
    before = held(two)
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="a step over 2 devices waits for all of them, so no CUDA graph can capture"):
        two.step()
    assert_same(held(two), before)
