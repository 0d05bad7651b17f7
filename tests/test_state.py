"""State that survives: state_dict, deepcopy and pickle, and checkpoints of other times and makes."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from bits import assert_same_bits
from optimizer_runs import (
    SHAPES,
    assert_goes_on,
    assert_same,
    copies,
    held,
    on_copies,
    parameters,
    params_of,
    saved_and_loaded,
    set_grads,
    train,
)

import halfstep as hs

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {}),
    "bfloat16": (BFLOAT16, {}),
    "float16": (FLOAT16, {}),
    "split": (BFLOAT16, {"master": "split"}),
    "amsgrad": (BFLOAT16, {"amsgrad": True}),
    "bfloat16 states": (BFLOAT16, {"state_dtype": BFLOAT16}),
    "stochastic": (BFLOAT16, {"master": None, "stochastic_rounding": True, "seed": 3}),
}
each_mode = pytest.mark.parametrize(("dtype", "options"), MODES.values(), ids=MODES)


# ---- round trips -----------------------------------------------------------------------------------------------------
@each_mode
def test_a_checkpoint_goes_on_with_the_same_bits(dtype, options):
    optimizer = hs.AdamW(parameters(dtype), lr=1e-2, **options)
    train(optimizer, range(3))
    assert_goes_on(optimizer, on_copies(optimizer, saved_and_loaded(optimizer.state_dict()), **options))


@each_mode
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_with_the_same_bits_and_settings(how, dtype, options):
    settings = {"max_grad_norm": 0.5, "on_stale": "ignore", "skip_nonfinite": False, "backend": "reference"}
    optimizer = hs.AdamW(parameters(dtype), lr=1e-2, **{"seed": 9, **settings, **options})
    train(optimizer, range(3))
    other = how(optimizer)
    assert {key: getattr(other, key) for key in settings} == settings
    assert (other.seed, other.stochastic_rounding) == (optimizer.seed, optimizer.stochastic_rounding)
    assert other._step_supports_amp_scaling
    assert not {id(p) for p in params_of(other)} & {id(p) for p in params_of(optimizer)}
    assert_goes_on(optimizer, other)


def test_a_model_and_its_optimizer_are_copied_together():
    model = torch.nn.Linear(4, 3, dtype=BFLOAT16)
    optimizer = hs.AdamW(model.parameters())
    train(optimizer, [1])
    other_model, other = copy.deepcopy((model, optimizer))
    assert [id(p) for p in other_model.parameters()] == [id(p) for p in params_of(other)]
    assert_goes_on(optimizer, other)


def test_the_same_run_writes_the_same_file():
    """The keys of a state come in one order, whatever the process's hash seed."""
    optimizer = hs.AdamW(parameters(BFLOAT16), amsgrad=True)
    train(optimizer, [1])
    keys = [list(state) for state in optimizer.state_dict()["state"].values()]
    assert keys == [["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"]] * len(SHAPES)


@pytest.mark.parametrize("updates", [0, 1, 2**24, 2**24 + 1, 2**40 + 1])
def test_step_is_int64_inside_and_a_float_that_holds_it_outside(updates):
    """torch.optim refuses integers; float32 has gaps beyond 2**24."""
    optimizer = hs.AdamW(parameters(FLOAT32))
    train(optimizer, [1])
    for p in params_of(optimizer):
        optimizer.state[p]["step"].fill_(updates)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        assert state["step"].shape == ()
        assert state["step"].dtype is (torch.float64 if updates > 2**24 else FLOAT32)
        assert state["step"].item() == updates
    other = on_copies(optimizer, saved_and_loaded(saved))
    steps = [other.state[p]["step"] for p in params_of(other)]
    assert [(s.dtype, int(s)) for s in steps] == [(torch.int64, updates)] * len(SHAPES)
    theirs = torch.optim.AdamW(parameters(FLOAT32), foreach=False)
    theirs.load_state_dict(saved)
    train(theirs, [2])


# ---- checkpoints of other times and makes ---------------------------------------------------------------------------
STEPS = [
    3, 3.0, torch.tensor(3), torch.tensor([3.0]), torch.tensor([[3]]), torch.tensor(3.0, dtype=torch.float64),
    torch.tensor(3, dtype=torch.int32), torch.tensor(3.0, dtype=BFLOAT16),
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_any_kind_of_step_is_understood(step):
    optimizer = hs.AdamW(parameters(FLOAT32))
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = step
    assert_goes_on(optimizer, on_copies(optimizer, saved))


@pytest.mark.parametrize("missing", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"])
def test_what_is_missing_gets_its_default(missing):
    optimizer = hs.AdamW(parameters(BFLOAT16), amsgrad=True)
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state[missing]
    other = on_copies(optimizer, saved)
    got, expected = held(other), held(optimizer)
    for i, p in enumerate(params_of(other)):
        default = p.detach().float() if missing == "master" else torch.zeros_like(expected[f"{i}.{missing}"])
        expected[f"{i}.{missing}"] = default
    assert_same(got, expected)
    train(other, [4])


def test_a_missing_state_or_setting_is_made_when_it_is_needed():
    """The second parameter never had a gradient; the checkpoint is older than `maximize`."""
    params = parameters(BFLOAT16)
    optimizer = hs.AdamW(params)
    for t in range(3):
        set_grads(params, t)
        params[1].grad = None
        optimizer.step()
    saved = saved_and_loaded(optimizer.state_dict())
    assert sorted(saved["state"]) == [0, 2]
    del saved["param_groups"][0]["maximize"]
    other = on_copies(optimizer, saved)
    assert other.param_groups[0]["maximize"] is False
    assert_goes_on(optimizer, other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_state_after_a_skipped_first_step(dtype):
    optimizer = hs.AdamW(parameters(dtype), skip_nonfinite=True)
    assert optimizer.state_dict()["state"] == {}
    set_grads(params_of(optimizer), 1)
    params_of(optimizer)[0].grad[0] = math.nan
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    saved = saved_and_loaded(optimizer.state_dict())
    assert {float(state["step"]) for state in saved["state"].values()} == {0.0}
    assert_goes_on(optimizer, on_copies(optimizer, saved, skip_nonfinite=True))


def test_keys_of_others_are_kept():
    optimizer = hs.AdamW(parameters(FLOAT32))
    train(optimizer, [1])
    saved = optimizer.state_dict()
    saved["state"][0].update(lookahead=torch.ones(2), name="w")
    other = on_copies(optimizer, saved)
    saved["state"][0]["lookahead"].zero_()
    state = other.state_dict()["state"][0]
    assert (state["lookahead"].tolist(), state["name"]) == ([1.0, 1.0], "w")


def test_loading_copies():
    """Training one of two optimizers that loaded one checkpoint touches neither the other nor the checkpoint."""
    optimizer = hs.AdamW(parameters(BFLOAT16))
    train(optimizer, [1])
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    first, second = on_copies(optimizer, saved), on_copies(optimizer, saved)
    train(first, [2, 3])
    assert_same(held(second), held(optimizer))
    for i, state in before["state"].items():
        for key, value in state.items():
            assert_same_bits(saved["state"][i][key], value, key)


def test_load_hooks_run():
    optimizer = hs.AdamW(parameters(FLOAT32))
    train(optimizer, [1])
    seen = []

    def double_lr(optimizer, state_dict):
        groups = [{**group, "lr": group["lr"] * 2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(double_lr)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [2e-3]


# ---- checkpoints that do not fit ------------------------------------------------------------------------------------
def other_shape(saved: dict[str, Any]) -> None:
    saved["state"][2]["exp_avg_sq"] = torch.zeros(5, 5)


def fewer_parameters(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].pop()


def more_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": [3]})


def negative_step(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = torch.tensor(-1.0)


def half_a_step(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = 2.5


def nan_step(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = torch.tensor(math.nan)


def several_steps(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = torch.zeros(2)


REFUSED = [
    (other_shape, r"parameter 2 of group 0 \(shape \(4, 2, 3\), torch.bfloat16\): the saved exp_avg_sq has shape "
     r"\(5, 5\), the parameter \(4, 2, 3\); the checkpoint belongs to another model"),
    (fewer_parameters, r"the checkpoint has parameter groups of \[2\] parameters, this optimizer of \[3\]; build"),
    (more_groups, r"the checkpoint has parameter groups of \[3, 1\] parameters, this optimizer of \[3\]"),
    (negative_step, r"parameter 1 of group 0 .*: the saved step is tensor\(-1.\); expected a whole number of updates"),
    (half_a_step, r"the saved step is 2.5; expected a whole number of updates, 0 or more"),
    (nan_step, r"the saved step is tensor\(nan\); expected a whole number"),
    (several_steps, r"the saved step is tensor\(\[0., 0.\]\); expected a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_a_checkpoint_that_does_not_fit_changes_nothing(spoil, message):
    """Not even a weight whose master is an exact tie, which loading into a split master shows differently."""
    optimizer = hs.AdamW(parameters(BFLOAT16))
    train(optimizer, [1])
    optimizer.state[params_of(optimizer)[0]]["master"].fill_(1 + 2.0**-8)
    params_of(optimizer)[0].data.fill_(1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    spoil(saved)
    other = hs.AdamW(copies(params_of(optimizer)), master="split")
    before = held(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert_same(held(other), before)
    assert other.param_groups[0]["lr"] == 1e-3
