"""Checkpoints both ways between torch.optim and halfstep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, NARROW
from bits import assert_same_bits
from optimizer_runs import (
    SHAPES,
    assert_as_good_as,
    assert_goes_on,
    copies,
    on_copies,
    parameters,
    params_of,
    saved_and_loaded,
    train,
)

import halfstep as hs
from halfstep.reference import join_master


def torch_with(saved: dict[str, Any], dtype: torch.dtype = FLOAT32) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters(dtype), foreach=False)
    optimizer.load_state_dict(saved)
    return optimizer


@pytest.mark.parametrize(("ours", "theirs"), [(hs.AdamW, torch.optim.AdamW), (hs.Adam, torch.optim.Adam)])
@pytest.mark.parametrize("first", ["torch", "halfstep"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"lr": torch.tensor(1e-3)}], ids=str)
def test_a_run_may_change_between_torch_and_halfstep(ours, theirs, first, options):
    """float32, 10 steps with one, 10 with the other: no further from the float64 run than torch alone."""
    shapes = [(20, 30), (1001,)]
    mixed, naive, exact = (parameters(FLOAT32, shapes) for _ in range(3))
    exact = copies(exact, torch.float64)
    build = {"torch": lambda p: theirs(p, foreach=False, **options), "halfstep": lambda p: ours(p, **options)}
    begin = build.pop(first)(mixed)
    train(begin, range(10))
    (go_on,) = build.values()
    other = go_on(mixed)
    other.load_state_dict(saved_and_loaded(begin.state_dict()))
    train(other, range(10, 20))
    train(theirs(naive, foreach=False, **options), range(20))
    train(theirs(exact, foreach=False, **options), range(20))
    assert_as_good_as(mixed, naive, exact)


def test_float32_state_comes_back_from_torch_with_the_same_bits():
    optimizer = hs.AdamW(parameters(FLOAT32), amsgrad=True)
    train(optimizer, range(3))
    through = torch_with(optimizer.state_dict()).state_dict()
    assert_goes_on(optimizer, on_copies(optimizer, saved_and_loaded(through)))


def test_hyper_parameters_survive_the_way_through_torch():
    given = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.5, "amsgrad": True, "maximize": True}
    optimizer = hs.AdamW(parameters(FLOAT32), **given)
    train(optimizer, [1])
    through = torch_with(optimizer.state_dict())
    assert {k: through.param_groups[0][k] for k in given} == given
    back = on_copies(optimizer, through.state_dict(), master="split")
    assert {k: back.param_groups[0][k] for k in given} == given
    assert back.param_groups[0]["master"] == "split"


@pytest.mark.parametrize("dtype", NARROW)
def test_a_16_bit_run_of_torch_goes_on_with_a_master(dtype):
    """torch keeps 16-bit moments: they are taken over exactly, and the master starts from the weight."""
    theirs = torch.optim.AdamW(parameters(dtype), foreach=False, eps=1e-4)
    train(theirs, range(3))
    other = hs.AdamW(copies(params_of(theirs)))
    other.load_state_dict(saved_and_loaded(theirs.state_dict()))
    for p, q in zip(params_of(theirs), params_of(other), strict=True):
        state, new = theirs.state[p], other.state[q]
        assert_same_bits(new["exp_avg"], state["exp_avg"].float(), "exp_avg")
        assert_same_bits(new["exp_avg_sq"], state["exp_avg_sq"].float(), "exp_avg_sq")
        assert_same_bits(new["master"], p.detach().float(), "master")
        assert new["step"] == 3
    train(other, [4])


@pytest.mark.parametrize(("master", "key"), [("fp32", "master"), ("split", "remainder")])
def test_what_torch_has_cast_is_not_taken_for_a_master(master, key):
    """torch.optim casts every state to the parameter's dtype: a master comes back as bfloat16, a remainder as noise."""
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2, master=master)
    train(optimizer, range(3))
    through = saved_and_loaded(torch_with(optimizer.state_dict(), BFLOAT16).state_dict())
    assert through["state"][0][key].dtype is BFLOAT16
    fresh = hs.AdamW(copies(params_of(optimizer)), master=master)
    with pytest.warns(UserWarning, match=f"the saved {key} is torch.bfloat16.*another optimizer has cast it") as told:
        fresh.load_state_dict(through)
    assert [w.filename for w in told] == [__file__] * len(SHAPES)
    for p in params_of(fresh):
        state = fresh.state[p]
        wide = state["master"] if master == "fp32" else join_master(p.detach(), state["remainder"])
        assert_same_bits(wide, p.detach().float(), "master")
