"""Checkpoints both ways between torch.optim and halfstep, of bfloat16 and float16 parameters.

torch.optim keeps 16-bit moments and computes in 16 bits: what halfstep takes over is exact, and what torch takes over
is the float32 state, rounded once.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, NARROW
from bits import assert_same_bits
from optimizer_runs import (
    assert_as_good_as,
    assert_goes_on,
    assert_same,
    copies,
    held,
    on_copies,
    parameters,
    params_of,
    saved_and_loaded,
    train,
)
from torch import Tensor

import halfstep as hs
from halfstep.reference import join_master, round_to

LARGE = [(20, 30), (1001,)]
# float16 rounds torch's own 1e-8 to 0, and then divides 0 by 0
HYPER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
MASTERS = [(BFLOAT16, "fp32"), (BFLOAT16, "split"), (FLOAT16, "fp32")]


def masters(optimizer: hs.AdamW) -> list[Tensor]:
    found = []
    for p in params_of(optimizer):
        state = optimizer.state[p]
        found.append(state["master"] if "master" in state else join_master(p.detach(), state["remainder"]))
    return found


def torch_run(dtype: torch.dtype, saved: dict[str, Any] | None = None, like: Any = None, **options: Any) -> Any:
    params = parameters(dtype, LARGE) if like is None else copies(like, dtype)
    optimizer = torch.optim.AdamW(params, foreach=False, **HYPER, **options)
    if saved:
        optimizer.load_state_dict(saved)
    return optimizer


@pytest.mark.parametrize(("dtype", "master"), MASTERS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
def test_from_torch_a_16_bit_run_goes_on_as_in_float32(dtype, master, options):
    """From one 16-bit checkpoint: the masters are no further from the float64 run than torch's float32 run is."""
    begin = torch_run(dtype, **options)
    train(begin, range(10))
    saved, weights = saved_and_loaded(begin.state_dict()), params_of(begin)
    ours = hs.AdamW(copies(weights), master=master)
    ours.load_state_dict(saved)
    naive, exact = (torch_run(wide, saved, weights, **options) for wide in (FLOAT32, torch.float64))
    for optimizer in (ours, naive, exact):
        train(optimizer, range(10, 20))
    assert ours.healed == 0
    assert_as_good_as(masters(ours), params_of(naive), params_of(exact))
    if master == "fp32":
        for p, wide in zip(params_of(ours), masters(ours), strict=True):
            assert_same_bits(p.detach(), round_to(wide, dtype), "weight")


@pytest.mark.parametrize(("dtype", "master"), MASTERS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"state_dtype": BFLOAT16}], ids=str)
def test_to_torch_a_16_bit_run_loses_one_rounding_of_the_state(dtype, master, options):
    """torch goes on with the bits it has when somebody writes the rounded moments into it by hand."""
    ours = hs.AdamW(parameters(dtype, LARGE), master=master, **HYPER, **options)
    train(ours, range(10))
    amsgrad = {"amsgrad": True} if "amsgrad" in options else {}
    loaded = torch_run(dtype, saved_and_loaded(ours.state_dict()), params_of(ours), **amsgrad)
    by_hand = torch_run(dtype, None, params_of(ours), **amsgrad)
    for p, q in zip(params_of(ours), params_of(by_hand), strict=True):
        moments = {k: v for k, v in ours.state[p].items() if k.startswith(("exp_avg", "max_exp_avg"))}
        by_hand.state[q] = {k: round_to(v.float(), dtype) for k, v in moments.items()}
        by_hand.state[q]["step"] = torch.tensor(10.0)
    for optimizer in (loaded, by_hand):
        train(optimizer, range(10, 20))
    for i, (p, q) in enumerate(zip(params_of(loaded), params_of(by_hand), strict=True)):
        assert_same_bits(p.detach(), q.detach(), f"weight {i}")
        for key in by_hand.state[q]:
            assert_same_bits(loaded.state[p][key], by_hand.state[q][key], f"{key} {i}")


def test_bfloat16_states_come_back_from_torch_with_the_same_bits():
    """Weights without a master and bfloat16 moments: torch has a place for all of it."""
    options = {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16, "seed": 3}
    optimizer = hs.AdamW(parameters(BFLOAT16), amsgrad=True, **options)
    train(optimizer, range(3))
    through = torch_run(BFLOAT16, optimizer.state_dict(), params_of(optimizer)).state_dict()
    assert {v.dtype for k, v in through["state"][0].items() if k != "step"} == {BFLOAT16}
    assert_goes_on(optimizer, on_copies(optimizer, saved_and_loaded(through), **options))


# ---- masters that somebody else has carried along --------------------------------------------------------------------
@pytest.mark.parametrize("dtype", NARROW)
def test_a_master_carried_by_a_float32_optimizer_is_taken_while_it_is_true(dtype):
    """A float32 run keeps the master's dtype, not its truth: while it trains, the weights move on."""
    ours = hs.AdamW(parameters(dtype), **HYPER)
    train(ours, range(3))
    carrier = torch_run(FLOAT32, ours.state_dict(), params_of(ours))
    assert_same(held(on_copies(ours, saved_and_loaded(carrier.state_dict()))), held(ours))
    train(carrier, range(3, 6))
    other = hs.AdamW(copies(params_of(carrier), dtype))
    with pytest.warns(UserWarning, match="the saved master does not round to the weight"):
        other.load_state_dict(saved_and_loaded(carrier.state_dict()))
    for p in params_of(other):
        assert_same_bits(other.state[p]["master"], p.detach().float(), "master")


def test_a_remainder_cast_by_a_float32_optimizer_is_not_taken():
    ours = hs.AdamW(parameters(BFLOAT16), master="split", **HYPER)
    train(ours, range(3))
    carrier = torch_run(FLOAT32, ours.state_dict(), params_of(ours))
    other = hs.AdamW(copies(params_of(ours)), master="split")
    with pytest.warns(UserWarning, match="the saved remainder is torch.float32 for a torch.bfloat16 weight"):
        other.load_state_dict(carrier.state_dict())
    assert not any(other.state[p]["remainder"].any() for p in params_of(other))


@pytest.mark.parametrize("spoiled", ["one element", "float64"])
def test_every_parameter_is_judged_by_itself(spoiled):
    """One master that is not the weight's: told by name, and the others keep every bit."""
    ours = hs.AdamW(parameters(BFLOAT16), **HYPER)
    train(ours, range(3))
    saved = saved_and_loaded(ours.state_dict())
    if spoiled == "float64":
        saved["state"][1]["master"] = saved["state"][1]["master"].double()
    else:
        saved["state"][1]["master"].view(-1)[-1] += 1.0
    other = hs.AdamW(copies(params_of(ours)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other.load_state_dict(saved)
    assert ["parameter 1 of group 0" in str(w.message) for w in told] == [True]
    expected = held(ours)
    expected["1.master"] = params_of(ours)[1].detach().float()
    assert_same(held(other), expected)
