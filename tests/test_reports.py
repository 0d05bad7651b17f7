"""Skips and healed masters are told at the 1st, 2nd, 4th, 8th ... in a row, by name, where the user called step()."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from device_clock import DeviceClock
from optimizer_runs import SHAPES, parameters, params_of, set_grads
from torch.nn import Parameter

import halfstep as hs


def told_by(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return told


def step(optimizer: hs.AdamW, bad: int | None) -> list[warnings.WarningMessage]:
    """One step whose gradient of parameter `bad` has a NaN; what it told."""
    params = params_of(optimizer)
    set_grads(params, 1)
    if bad is not None:
        params[bad].grad.view(-1)[-1] = math.nan
    return told_by(optimizer.step)


def test_a_row_of_skips_is_told_at_powers_of_two():
    optimizer = hs.AdamW(parameters(BFLOAT16))
    told = [[str(w.message) for w in step(optimizer, 1)] for _ in range(17)]
    assert [i + 1 for i, messages in enumerate(told) if messages] == [1, 2, 4, 8, 16]
    name = "the first non-finite gradient is that of parameter 1 of group 0 (shape (3, 5), torch.bfloat16)"
    assert told[0] == [f"halfstep: a step was skipped, 1 in all ({name}); weights and states are unchanged"]
    assert told[7] == [f"halfstep: 8 steps in a row were skipped, 8 in all ({name}); weights and states are unchanged"]


def test_a_clean_step_ends_the_row():
    optimizer = hs.AdamW(parameters(BFLOAT16))
    told = [len(step(optimizer, bad)) for bad in (0, 0, 0, None, 0, None, None, 0, 0)]
    assert told == [1, 1, 0, 0, 1, 0, 0, 1, 1]


def test_the_first_of_several_is_named_with_the_name_the_user_gave():
    params = parameters(BFLOAT16)
    optimizer = hs.AdamW([("embed", params[0]), ("layers.0.weight", params[1]), ("head", params[2])])
    set_grads(params, 1)
    params[0].grad = None
    for p in params[1:]:
        p.grad.fill_(math.inf)
    with pytest.warns(
        RuntimeWarning, match=r"that of parameter 'layers\.0\.weight' \(shape \(3, 5\), torch\.bfloat16\)"
    ):
        optimizer.step()


def test_the_place_in_the_group_is_named_over_all_groups():
    optimizer = hs.AdamW([{"params": [p]} for p in parameters(FLOAT32)], max_grad_norm=1.0)
    optimizer.param_groups[2]["params"][0].grad = torch.full(SHAPES[2], math.nan)
    with pytest.warns(RuntimeWarning, match=r"that of parameter 0 of group 2 \(shape \(4, 2, 3\), torch\.float32\)"):
        optimizer.step()


def test_what_somebody_else_found_has_no_name():
    optimizer = hs.AdamW(parameters(BFLOAT16))
    optimizer.found_inf = torch.ones(())
    assert ["(found_inf was set)" in str(w.message) for w in step(optimizer, None)] == [True]


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_warnings_point_at_the_users_line(schedule, scaled):
    """Through torch's profiling and no_grad wrappers, a scheduler's counter and a scaler."""
    optimizer, scaler = hs.AdamW(parameters(BFLOAT16)), hs.LossScaler()
    if schedule:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    set_grads(optimizer.param_groups[0]["params"], 1)
    optimizer.param_groups[0]["params"][0].grad[0] = math.nan
    told = told_by((lambda: scaler.step(optimizer)) if scaled else (lambda: optimizer.step()))
    assert [w.filename for w in told] == [__file__]


def test_a_row_of_healed_steps_is_told_at_powers_of_two():
    weight = Parameter(torch.zeros(6, dtype=BFLOAT16))
    optimizer = hs.AdamW([weight])
    assert step(optimizer, None) == []
    counts = []
    for i in range(8):
        weight.data[: i % 3 + 1] = 7.0 + i
        told = step(optimizer, None)
        assert all("weights were written by someone else since the last step" in str(w.message) for w in told)
        assert optimizer.healed == i % 3 + 1
        counts.append(len(told))
    assert counts == [1, 1, 0, 1, 0, 0, 0, 1]
    assert step(optimizer, None) == []
    weight.data[0] = 50.0
    (told,) = step(optimizer, None)
    assert str(told.message).startswith("halfstep: 1 weights were written by someone else")
    assert told.filename == __file__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_counts_its_own_row(copied):
    optimizer = hs.AdamW(parameters(BFLOAT16))
    assert [len(step(optimizer, 0)) for _ in range(3)] == [1, 1, 0]
    other = copied(optimizer)
    assert [len(step(other, 0)) for _ in range(3)] == [1, 1, 0]
    assert len(step(optimizer, 0)) == 1  # its fourth


def test_a_device_is_never_waited_for(monkeypatch):
    """What is not known yet is told at a later step, in order; a checkpoint waits for the rest."""
    clock = DeviceClock(monkeypatch)
    optimizer = hs.AdamW(parameters(BFLOAT16))
    assert [step(optimizer, bad) for bad in (0, 0, None)] == [[], [], []]
    clock.finish()
    told = [str(w.message) for w in step(optimizer, 2)]
    assert ["a step was skipped, 1 in all" in m for m in told] == [True, False]
    assert ["2 steps in a row were skipped, 2 in all" in m for m in told] == [False, True]
    assert all("parameter 0 of group 0" in m for m in told)
    assert clock.waits == 0
    with pytest.warns(RuntimeWarning, match="3 in all .* parameter 2 of group 0"):
        optimizer.state_dict()
    assert clock.waits == 1
    optimizer.state_dict()
    assert clock.waits == 1


def test_a_report_that_is_an_error_is_made_once():
    optimizer = hs.AdamW(parameters(BFLOAT16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_grads(params_of(optimizer), 1)
        params_of(optimizer)[0].grad[0] = math.nan
        with pytest.raises(RuntimeWarning, match="1 in all"):
            optimizer.step()
        optimizer.state_dict()
    assert [len(step(optimizer, 0)) for _ in range(3)] == [1, 0, 1]


def test_two_separate_skips_are_two_messages() -> None:
    """Python's default filter shows one text once a line: the running count tells the two apart."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = hs.AdamW([weight])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for gradient in (math.nan, 1.0, math.nan, 1.0):
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
    assert [str(w.message).count("1 in all") for w in caught] == [1, 0]
    assert "2 in all" in str(caught[1].message)
