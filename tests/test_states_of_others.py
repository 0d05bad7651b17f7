"""States that somebody wrote past load_state_dict(), as torch's and trainers' recipes do, and what mends them.

Guards: a counter read with the wrong size, a wrong message for what a user can mend, a moved model that is not.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, ordinary
from optimizer_runs import assert_goes_on, assert_same, held, on_copies, only, parameters, params_of, set_grads, train
from torch.nn import Parameter

import halfstep as hs

STEPS = [
    torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64), torch.tensor(3, dtype=torch.int32), torch.tensor([3]),
    torch.tensor([[3.0]]), torch.tensor(3.0, dtype=BFLOAT16), 3, 3.0,
]  # fmt: skip
NO_STEPS = [2.5, -1, torch.tensor(-1.0), torch.tensor(math.nan), torch.tensor(math.inf), torch.zeros(2), "3",
            torch.zeros((), device="meta")]  # fmt: skip
MASTERS: dict[str, dict[str, Any]] = {"master": {}, "split": {"master": "split"}}


def trained(dtype: torch.dtype = BFLOAT16, **options: Any) -> hs.AdamW:
    optimizer = hs.AdamW(parameters(dtype), lr=1e-2, **options)
    train(optimizer, range(3))
    return optimizer


# ---- the step --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", STEPS, ids=repr)
@pytest.mark.parametrize("how", ["replaced", "a new state"])
def test_any_kind_of_step_is_converted(how, step):
    """In one parameter, or all of them at once as ZeroRedundancyOptimizer and torch's recipes write them."""
    optimizer = trained()
    other = copy.deepcopy(optimizer)
    for p in params_of(other) if how == "a new state" else params_of(other)[1:2]:
        if how == "replaced":
            other.state[p]["step"] = copy.deepcopy(step)
        else:
            other.state[p] = {**other.state[p], "step": copy.deepcopy(step)}
    train(optimizer, [4])
    train(other, [4])
    assert_same(held(other), held(optimizer))
    assert {(s["step"].dtype, s["step"].shape, int(s["step"])) for s in other.state.values()} == {(torch.int64, (), 4)}
    assert_goes_on(optimizer, other)


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_any_kind_of_step_is_saved_as_torch_has_it(step):
    """At once, before a step has converted it."""
    optimizer = trained()
    for state in optimizer.state.values():
        state["step"] = copy.deepcopy(step)
    saved = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert [(s.dtype, s.shape, float(s)) for s in saved] == [(FLOAT32, (), 3.0)] * len(saved)


def test_a_step_shared_by_all_is_counted_for_each():
    """Converted, everyone has its own; and the one that was given stays as it is."""
    optimizer = trained()
    other = copy.deepcopy(optimizer)
    shared = torch.tensor(3.0)
    for state in other.state.values():
        state["step"] = shared
    assert_goes_on_after_a_step(optimizer, other)
    assert shared == 3


def test_a_step_whose_data_was_replaced():
    """state["step"].data = ...: the same tensor object, another dtype."""
    optimizer = trained()
    other = copy.deepcopy(optimizer)
    for state in other.state.values():
        state["step"].data = torch.tensor(3.0)
    assert_goes_on_after_a_step(optimizer, other)


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_an_exported_state_may_be_put_back_as_it_is(options):
    """Past load_state_dict(), with the float32 step of state_dict(), and saved again."""
    optimizer = trained(**options)
    other = hs.AdamW([Parameter(p.detach().clone()) for p in params_of(optimizer)], lr=1e-2, **options)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    for i, p in enumerate(params_of(other)):
        other.state[p] = saved[i]
    again = copy.deepcopy(other.state_dict())
    assert {float(s["step"]) for s in again["state"].values()} == {3.0}
    assert_goes_on_after_a_step(optimizer, other)


def assert_goes_on_after_a_step(optimizer: hs.AdamW, other: hs.AdamW) -> None:
    train(optimizer, [4])
    train(other, [4])
    assert_goes_on(optimizer, other)


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_what_is_no_step_is_refused_by_name(step):
    optimizer = trained()
    p = params_of(optimizer)[1]
    before = held(optimizer)
    right = optimizer.state[p]["step"]
    optimizer.state[p]["step"] = step
    message = f"parameter 1 of group 0 (shape (3, 5), torch.bfloat16): its step is {step!r}; expected a whole number"
    with pytest.raises(ValueError, match=re.escape(message)):
        train(optimizer, [4])
    optimizer.state[p]["step"] = right
    assert_same(held(optimizer), before)
    train(optimizer, [4])


def test_a_right_step_is_left_where_it_is():
    """Others may hold it; converting it in every step would cost a look at the device."""
    optimizer = trained()
    steps = [state["step"] for state in optimizer.state.values()]
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()  # the states are looked at again
    train(optimizer, [4])
    assert all(state["step"] is step for state, step in zip(optimizer.state.values(), steps, strict=True))


def test_moving_the_states_to_the_device_they_are_on():
    """As Lightning does with every entry but the step when it loads."""
    optimizer = trained()
    other = copy.deepcopy(optimizer)
    tensors = [value for state in other.state.values() for value in state.values()]
    for state in other.state.values():
        for key, value in state.items():
            if key != "step":
                state[key] = value.to("cpu")
    train(optimizer, [4])
    train(other, [4])
    assert all(a is b for a, b in zip(tensors, (v for s in other.state.values() for v in s.values()), strict=True))
    assert_goes_on(optimizer, other)


# ---- the meta device -------------------------------------------------------------------------------------------------
def on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq", "master"])
def test_a_checkpoint_on_meta_is_refused(key):
    optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"] = {i: dict(state) for i, state in saved["state"].items()}
    saved["state"][2][key] = on_meta(saved["state"][2][key])
    saved["param_groups"][0]["lr"] = 0.5
    other = trained()
    before = held(other)
    message = r"parameter 2 of group 0 .*: the saved " + key + r" is on the meta device, .* with map_location='cpu'"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert_same(held(other), before)
    assert other.param_groups[0]["lr"] == 1e-2
    assert_goes_on(optimizer, other)


def test_a_meta_learning_rate_is_refused():
    """torch.load(map_location="meta") of a checkpoint whose states were not saved."""
    optimizer = trained()
    saved = {**optimizer.state_dict(), "state": {}}
    saved["param_groups"][0]["lr"] = torch.tensor(0.5, device="meta")
    before = held(optimizer)
    with pytest.raises(
        ValueError, match=r"parameter group 0: the saved lr is on the meta device, .* map_location='cpu'"
    ):
        optimizer.load_state_dict(saved)
    assert_same(held(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_a_meta_model_is_given_memory_first():
    optimizer = trained()
    saved = optimizer.state_dict()
    other = hs.AdamW([Parameter(p.detach().to("meta")) for p in params_of(optimizer)], lr=1e-2)
    message = r"parameter 0 of group 0 .* is on the meta device, .* give the model memory \(to_empty\(\)\) and load its"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert not other.state
    real = [Parameter(p.detach().clone()) for p in params_of(optimizer)]
    for p, value in zip(params_of(other), real, strict=True):
        torch.utils.swap_tensors(p, value)  # as to_empty() may do
    other.load_state_dict(saved)
    assert_goes_on(optimizer, other)


# ---- a mode that is switched on later --------------------------------------------------------------------------------
TRANSPOSED = ordinary((3, 4), FLOAT32, 0).t()
STRIDES = r"stochastic rounding needs contiguous states, got strides \(1, 4\), .*load_state_dict\(optimizer.state_dict"


def assert_reloading_mends(optimizer: hs.AdamW, message: str) -> None:
    p, _ = only(optimizer)
    before = held(optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same({k: v for k, v in held(optimizer).items() if k in before}, before)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


@pytest.mark.filterwarnings("ignore:.* with master=None and nearest rounding:UserWarning")
def test_stochastic_rounding_switched_on_later():
    optimizer = hs.AdamW([Parameter(TRANSPOSED.bfloat16().t().contiguous().t())], master=None)
    train(optimizer, [1])
    optimizer.stochastic_rounding = True
    assert_reloading_mends(optimizer, STRIDES)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_transposed_weight_that_became_narrow(dtype):
    p = Parameter(TRANSPOSED.clone())
    optimizer = hs.AdamW([p], master=None, stochastic_rounding=True)
    train(optimizer, [1])
    p.grad = None
    p.data = p.data.to(dtype)
    p.grad_dtype = dtype
    set_grads([p], 2)
    assert_reloading_mends(optimizer, STRIDES)
    assert optimizer.state[p]["exp_avg"].is_contiguous()


def test_a_weight_that_changed_its_dtype_and_its_order():
    """The new master lies as the weight does now, the moments as it did at the first step."""
    p = Parameter(TRANSPOSED.clone())
    optimizer = hs.AdamW([p])
    train(optimizer, [1])
    p.grad = None
    p.data = p.data.bfloat16().contiguous()
    p.grad_dtype = BFLOAT16
    set_grads([p], 2)
    assert_reloading_mends(optimizer, r"have different memory layouts .*load_state_dict\(optimizer.state_dict\(\)\)")


def test_another_state_dtype():
    optimizer = hs.AdamW([Parameter(TRANSPOSED.clone())])
    train(optimizer, [1])
    optimizer.param_groups[0]["state_dtype"] = BFLOAT16
    message = (
        r"its exp_avg is torch.float32, the group's state_dtype torch.bfloat16. Load states through load_state_dict"
    )
    assert_reloading_mends(optimizer, message)
    assert only(optimizer)[1]["exp_avg"].dtype is BFLOAT16


def test_a_reloaded_optimizer_is_the_one_it_was():
    """What the messages tell people to do changes nothing where nothing had to change."""
    optimizer = trained()
    other = on_copies(optimizer, optimizer.state_dict())
    other.load_state_dict(other.state_dict())
    assert_goes_on(optimizer, other)
