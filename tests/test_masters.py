"""Masters never go stale: after somebody wrote into a weight the next step goes on from it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, NARROW, ordinary
from bits import assert_same_bits
from optimizer_runs import assert_same, copies, held, parameters, set_grads, train
from torch.nn import Parameter

import halfstep as hs
from halfstep.reference import join_master


def write_with_load_state_dict(model: torch.nn.Module, values: torch.Tensor) -> None:
    model.load_state_dict({"weight": values})


def write_with_copy(model: torch.nn.Module, values: torch.Tensor) -> None:
    model.weight.data.copy_(values)


def write_with_new_data(model: torch.nn.Module, values: torch.Tensor) -> None:
    model.weight.data = values.clone()


def write_in_place(model: torch.nn.Module, values: torch.Tensor) -> None:
    with torch.no_grad():
        model.weight.zero_().add_(values)


WRITES = [write_with_load_state_dict, write_with_copy, write_with_new_data, write_in_place]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_the_next_step_goes_on_from_a_written_weight(write, dtype, steps_before):
    """As a float32 run from the written weight with the same moments: no trace of the old master."""
    model = torch.nn.Linear(6, 5, bias=False, dtype=dtype)
    optimizer = hs.AdamW(model.parameters(), lr=1e-2)
    train(optimizer, range(steps_before))
    values = ordinary((5, 6), FLOAT32, 9).abs().add(1).to(dtype)  # nowhere what was there

    fresh = Parameter(values.float())
    plain = hs.AdamW([fresh], lr=1e-2)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if steps_before:
            plain.state[fresh][key] = optimizer.state[model.weight][key].clone()
    write(model, values)

    if steps_before:
        with pytest.warns(RuntimeWarning, match="30 weights were written by someone else"):
            train(optimizer, [7])
        assert optimizer.healed == 30
    else:
        train(optimizer, [7])  # there was no master yet
    train(plain, [7])
    train(optimizer, [8])
    assert optimizer.healed == 0
    train(plain, [8])
    state = optimizer.state[model.weight]
    assert_same_bits(state["master"], fresh.detach(), "master")
    assert_same_bits(state["exp_avg_sq"], plain.state[fresh]["exp_avg_sq"], "exp_avg_sq")
    assert_same_bits(model.weight.detach(), fresh.detach().to(dtype), "weight")


def test_only_the_written_elements_heal():
    weight = Parameter(ordinary((1000,), BFLOAT16, 0))
    optimizer = hs.AdamW([weight], lr=1e-3)
    train(optimizer, range(3))
    expected = optimizer.state[weight]["master"].clone()
    weight.data[100:200] = 5.0
    expected[100:200] = 5.0
    fresh = Parameter(expected)
    plain = hs.AdamW([fresh], lr=1e-3)
    plain.state[fresh] = {k: optimizer.state[weight][k].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
    train(plain, [4])
    with pytest.warns(RuntimeWarning, match="100 weights were written"):
        train(optimizer, [4])
    assert_same_bits(optimizer.state[weight]["master"], fresh.detach(), "master")


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_refresh_masters_heals_in_silence(master):
    weight = Parameter(ordinary((30,), BFLOAT16, 0))
    optimizer = hs.AdamW([weight], lr=1e-2, master=master)
    train(optimizer, range(3))
    weight.data.copy_(ordinary((30,), BFLOAT16, 9))
    optimizer.refresh_masters()
    fresh = hs.AdamW(copies([weight], FLOAT32), lr=1e-2)
    other, state = fresh.param_groups[0]["params"][0], optimizer.state[weight]
    fresh.state[other] = {k: state[k].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
    train(fresh, [5])
    train(optimizer, [5])
    assert optimizer.healed == 0
    wide = state["master"] if master == "fp32" else join_master(weight.detach(), state["remainder"])
    assert_same_bits(wide, other.detach(), "master")


def test_on_stale_ignore_trusts_the_master():
    written, left = (hs.AdamW(parameters(BFLOAT16), on_stale="ignore") for _ in range(2))
    train(written, range(3))
    train(left, range(3))
    for p in written.param_groups[0]["params"]:
        p.data.zero_()
    train(written, [4])
    train(left, [4])
    assert written.healed == 0
    assert_same(held(written), held(left))


def test_a_written_weight_takes_the_old_low_half_of_a_split_master_along():
    """At most half a spacing of bfloat16, as documented: the pair is consistent whatever the weight is."""
    weight = Parameter(torch.ones(1000, dtype=BFLOAT16))
    optimizer = hs.AdamW([weight], lr=1e-3, master="split")
    train(optimizer, range(3))
    weight.data.fill_(1.5)
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, [4])
    wide = join_master(weight.detach(), optimizer.state[weight]["remainder"])
    assert (wide != 1.5).any()
    assert ((wide - 1.5).abs() <= torch.finfo(BFLOAT16).eps / 2).all()


def test_a_skipped_step_heals_nothing_and_the_next_one_does():
    weight = Parameter(ordinary((5,), BFLOAT16, 0))
    optimizer = hs.AdamW([weight])
    train(optimizer, [1])
    weight.data.fill_(3.0)
    before = held(optimizer)
    set_grads([weight], 2)
    weight.grad[0] = math.nan
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    assert_same(held(optimizer), before)
    with pytest.warns(RuntimeWarning, match="5 weights were written"):
        train(optimizer, [3])


def test_a_weight_that_changes_its_dtype_gets_the_state_it_needs():
    model = torch.nn.Linear(4, 3, bias=False, dtype=BFLOAT16)
    optimizer = hs.AdamW(model.parameters())
    train(optimizer, [1])
    shown = model.weight.detach().clone()
    model.weight.grad = None
    model.float()
    assert torch.equal(model.weight, shown.float())
    train(optimizer, [2])
    assert sorted(optimizer.state[model.weight]) == ["exp_avg", "exp_avg_sq", "step"]
    model.weight.grad = None
    model.half()
    train(optimizer, [3])
    assert sorted(optimizer.state[model.weight]) == ["exp_avg", "exp_avg_sq", "master", "step"]
    assert torch.equal(optimizer.state[model.weight]["master"].half(), model.weight)


def test_copies_of_an_optimizer_heal_on_their_own():
    weight = Parameter(ordinary((5,), BFLOAT16, 0))
    optimizer = hs.AdamW([weight])
    train(optimizer, [1])
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.data.fill_(2.0)
    train(optimizer, [2])
    with pytest.warns(RuntimeWarning, match="5 weights were written"):
        train(twin, [2])
