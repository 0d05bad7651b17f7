"""Values a user or scheduler writes between steps are checked at the next one, alike on every backend."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from optimizer_runs import assert_same, held, parameters, set_grads, train
from torch.nn import Parameter

import halfstep as hs
from halfstep.reports import warn

LATER = [
    ("lr", math.nan, "parameter group 0: lr=nan: expected a finite number >= 0", ValueError),
    ("lr", "fast", "parameter group 0: lr='fast': expected a number or a 1-element tensor, got str", TypeError),
    ("eps", None, "parameter group 0: eps=None: expected a number or a 1-element tensor, got NoneType", TypeError),
    ("betas", 0.9, "parameter group 0: betas=0.9: expected two numbers in [0, 1)", ValueError),
    ("betas", (1.0, 0.999), "parameter group 0: betas=(1.0, 0.999): expected two numbers in [0, 1)", ValueError),
]
SETTINGS = [
    ("max_grad_norm", -1.0, "max_grad_norm=-1.0: expected None or a number >= 0", ValueError),
    ("max_grad_norm", "1", "max_grad_norm='1': expected a number or a 1-element tensor, got str", TypeError),
    ("skip_nonfinite", "yes", "skip_nonfinite='yes': expected None, True or False", ValueError),
    ("on_stale", "heal", "on_stale='heal': expected 'refresh' or 'ignore'", ValueError),
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("key", "value", "message", "error"), LATER)
def test_a_groups_numbers(key, value, message, error, backend):
    optimizer = hs.AdamW(parameters(BFLOAT16), backend=backend)
    train(optimizer, [1])
    optimizer.param_groups[0][key] = value
    before = held(optimizer)
    with pytest.raises(error) as raised:
        train(optimizer, [2])
    assert message in str(raised.value)
    assert_same(held(optimizer), before)


@pytest.mark.parametrize(("key", "value", "message", "error"), SETTINGS)
def test_the_optimizers_settings(key, value, message, error):
    optimizer = hs.AdamW(parameters(BFLOAT16))
    setattr(optimizer, key, value)
    with pytest.raises(error) as raised:
        train(optimizer, [1])
    assert message in str(raised.value)
    with pytest.raises(error):
        hs.AdamW(parameters(BFLOAT16), **{key: value})


@pytest.mark.parametrize("key", ["max_grad_norm", "skip_nonfinite", "stochastic_rounding", "seed", "backend"])
def test_a_setting_of_the_optimizer_is_none_of_a_group(key):
    with pytest.raises(ValueError, match=f"parameter group 0: {key} cannot differ between groups; pass it to the opt"):
        hs.AdamW([{"params": parameters(BFLOAT16), key: None}])


def test_a_group_whose_warning_is_an_error_is_not_added():
    optimizer = hs.AdamW(parameters(FLOAT32))
    with pytest.raises(UserWarning, match="updates smaller than half its spacing are lost"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2, dtype=BFLOAT16))], "master": None})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_largest_norm_may_be_a_tensor(backend):
    runs = [hs.AdamW(parameters(BFLOAT16), max_grad_norm=m, backend=backend) for m in (0.5, torch.tensor(0.5))]
    for optimizer in runs:
        train(optimizer, range(3))
    assert_same(held(runs[0]), held(runs[1]))


def test_a_group_cannot_be_differentiable():
    with pytest.raises(ValueError, match="parameter group 0: differentiable=True: the fused step has no gradient"):
        hs.AdamW([{"params": parameters(FLOAT32), "differentiable": True}])


def test_a_parameter_that_became_float64():
    model = torch.nn.Linear(3, 2)
    optimizer = hs.AdamW(model.parameters())
    model.double()
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 .* dtype torch\.float64 .* use float32, bfloat16"):
        optimizer.step()


def test_a_state_on_another_device():
    weight = Parameter(torch.ones(3))
    optimizer = hs.AdamW([weight])
    train(optimizer, [1])
    optimizer.state[weight]["exp_avg"] = torch.zeros(3, device="meta")
    with pytest.raises(RuntimeError, match="is on cpu, its optimizer state on meta; move the model before the first"):
        train(optimizer, [2])


def test_a_model_without_memory_may_be_given():
    optimizer = hs.AdamW(torch.nn.Linear(3, 3, device="meta").parameters())
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_decoupled_weight_decay_as_in_torch():
    """Adam(decoupled_weight_decay=True) is AdamW; a checkpoint brings its own flag to Adam and none to AdamW."""
    runs = [
        hs.Adam(parameters(FLOAT32), weight_decay=0.5, decoupled_weight_decay=True),
        hs.AdamW(parameters(FLOAT32), weight_decay=0.5),
    ]
    theirs = torch.optim.Adam(parameters(FLOAT32), weight_decay=0.5, decoupled_weight_decay=True)
    loaded = hs.Adam(parameters(FLOAT32))
    loaded.load_state_dict(theirs.state_dict())
    for optimizer in (*runs, loaded):
        train(optimizer, range(3))
    for other in (*runs[1:], loaded):
        assert_same(held(runs[0]), held(other))
    coupled = hs.AdamW(parameters(FLOAT32), weight_decay=0.5)
    coupled.load_state_dict(hs.Adam(parameters(FLOAT32), weight_decay=0.5).state_dict())
    train(coupled, range(3))
    assert_same(held(runs[1]), held(coupled))


def test_update_without_gradients_does_not_grow_the_scale():
    """A step before backward() is no clean step; one empty optimizer among several is nothing special."""
    scaler = hs.LossScaler(init_scale=8.0, growth_interval=1)
    empty, full = hs.AdamW(parameters(BFLOAT16)), hs.AdamW(parameters(BFLOAT16))
    assert not scaler.step(empty)
    with pytest.raises(RuntimeError, match="update\\(\\) before a step\\(\\) or unscale_\\(\\) that saw gradients"):
        scaler.update()
    set_grads(full.param_groups[0]["params"], 1)
    scaler.unscale_(full)
    scaler.step(full)
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_a_disabled_scaler_tells_of_the_optimizers_own_skip():
    weight = Parameter(torch.ones(3, dtype=BFLOAT16))
    weight.grad = torch.full_like(weight, math.nan)
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        assert hs.LossScaler(enabled=False).step(hs.AdamW([weight]))


def test_warnings_made_errors_leave_the_scaler_right():
    """The report of a skip ends step(): under -W error the scale must shrink all the same."""
    weight = Parameter(torch.ones(3, dtype=BFLOAT16))
    weight.grad = torch.full_like(weight, math.nan)
    optimizer, scaler = hs.AdamW([weight]), hs.LossScaler(init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="a step was skipped"):
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert not hasattr(optimizer, "grad_scale")


def test_a_negated_gradient_keeps_its_sign_at_every_step():
    plain, negated = (Parameter(torch.ones(8)) for _ in range(2))
    optimizers = hs.AdamW([plain]), hs.AdamW([negated])
    for _ in range(3):
        plain.grad = -torch.ones(8)
        negated.grad = torch._neg_view(torch.ones(8))
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, negated)


def test_a_folder_that_begins_like_ours_is_the_users(tmp_path):
    """Warnings point at the first line outside halfstep and torch: halfstep_mine/ and torchvision/ are outside."""
    folder = hs.__path__[0] + "_mine"
    code = compile("warn('look here', UserWarning)", f"{folder}/script.py", "exec")
    with pytest.warns(UserWarning, match="look here") as told:
        exec(code, {"warn": warn})
    assert told[0].filename == f"{folder}/script.py"
