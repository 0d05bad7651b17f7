"""Masters and remainders in checkpoints: kept bit for bit, converted exactly, and taken only when true."""

from __future__ import annotations

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, NARROW
from bits import assert_same_bits
from optimizer_runs import copies, on_copies, parameters, params_of, saved_and_loaded, train

import halfstep as hs
from halfstep.reference import join_master


@pytest.mark.parametrize("dtype", NARROW)
def test_masters_and_moments_survive_untouched(dtype):
    optimizer = hs.AdamW(parameters(dtype), lr=1e-3)
    train(optimizer, range(5))
    saved = saved_and_loaded(optimizer.state_dict())
    for i, p in enumerate(params_of(optimizer)):
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert saved["state"][i][key].dtype is FLOAT32
            assert_same_bits(saved["state"][i][key], optimizer.state[p][key], key)
        assert (saved["state"][i]["master"] != p.float()).any()


@pytest.mark.parametrize(("first", "then"), [("fp32", "split"), ("split", "fp32")])
def test_split_and_float32_masters_convert_exactly(first, then):
    """Also exact ties, which the two show differently: the shown weight follows, the master keeps every bit."""
    optimizer = hs.AdamW(parameters(BFLOAT16, [(4000,)]), lr=1e-3, master=first)
    train(optimizer, range(5))
    (p,) = params_of(optimizer)
    other = on_copies(optimizer, saved_and_loaded(optimizer.state_dict()), master=then)
    (q,) = params_of(other)

    def wide(weight, state):
        return state["master"] if "master" in state else join_master(weight.detach(), state["remainder"])

    for t in range(5, 8):
        assert_same_bits(wide(q, other.state[q]), wide(p, optimizer.state[p]), "master")
        assert_same_bits(other.state[q]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"], "exp_avg_sq")
        train(optimizer, [t])
        train(other, [t])
    assert other.healed == 0


def test_a_tie_is_shown_as_the_new_kind_of_master_shows_it():
    tie = 1 + 2.0**-8  # between two bfloat16: nearest even shows 1, half away shows 1 + 2**-7
    weight = torch.nn.Parameter(torch.ones(1, dtype=BFLOAT16))
    optimizer = hs.AdamW([weight], lr=0.0, weight_decay=0.0)
    weight.grad = torch.zeros(1, dtype=BFLOAT16)
    optimizer.step()
    optimizer.state[weight]["master"].fill_(tie)
    split = on_copies(optimizer, optimizer.state_dict(), master="split")
    (shown,) = params_of(split)
    assert shown.item() == 1 + 2.0**-7
    assert join_master(shown.detach(), split.state[shown]["remainder"]).item() == tie
    back = on_copies(split, split.state_dict())
    (shown,) = params_of(back)
    assert (shown.item(), back.state[shown]["master"].item()) == (1.0, tie)


@pytest.mark.parametrize("then", ["fp32", "split"])
def test_a_master_that_is_not_the_weights_is_rebuilt(then):
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2)
    train(optimizer, range(3))
    other = hs.AdamW(parameters(BFLOAT16, seed=50), master=then)
    weights = [p.detach().clone() for p in params_of(other)]
    with pytest.warns(UserWarning, match="the saved master does not round to the weight .load the model before"):
        other.load_state_dict(optimizer.state_dict())
    for p, before in zip(params_of(other), weights, strict=True):
        assert_same_bits(p.detach(), before, "weight")
        state = other.state[p]
        wide = state["master"] if then == "fp32" else join_master(p.detach(), state["remainder"])
        assert_same_bits(wide, p.detach().float(), "master")


@pytest.mark.parametrize(
    ("then", "dtype", "limit"), [("fp32", BFLOAT16, 0.5), ("split", BFLOAT16, 0.5), ("fp32", FLOAT16, 0.0)]
)
def test_a_remainder_never_becomes_garbage(then, dtype, limit):
    """With another weight it is half a spacing of bfloat16 at most; with float16 weights it is nothing."""
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2, master="split")
    train(optimizer, range(3))
    other = hs.AdamW(parameters(dtype, seed=50), master=then)
    if dtype is FLOAT16:
        with pytest.warns(UserWarning, match="the saved remainder is torch.int16 for a torch.float16 weight"):
            other.load_state_dict(optimizer.state_dict())
    else:
        other.load_state_dict(optimizer.state_dict())
    for p in params_of(other):
        state = other.state[p]
        wide = state["master"] if then == "fp32" else join_master(p.detach(), state["remainder"])
        assert ((wide - p.float()).abs() <= limit * torch.finfo(BFLOAT16).eps * p.float().abs()).all()


def test_a_float32_model_takes_a_bfloat16_models_checkpoint():
    optimizer = hs.AdamW(parameters(BFLOAT16))
    train(optimizer, range(3))
    wide = hs.AdamW(copies(params_of(optimizer), FLOAT32))
    wide.load_state_dict(optimizer.state_dict())
    assert sorted(wide.state[params_of(wide)[0]]) == ["exp_avg", "exp_avg_sq", "step"]
    train(wide, [4])


@pytest.mark.parametrize(("first", "then"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)])
def test_moments_take_this_optimizers_dtype(first, then):
    optimizer = hs.AdamW(parameters(BFLOAT16), state_dtype=first)
    train(optimizer, range(3))
    other = on_copies(optimizer, saved_and_loaded(optimizer.state_dict()), state_dtype=then)
    for p, q in zip(params_of(optimizer), params_of(other), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state_dict()["state"][0][key].dtype is first
            assert_same_bits(other.state[q][key], optimizer.state[p][key].to(then), key)
    train(other, [4])
