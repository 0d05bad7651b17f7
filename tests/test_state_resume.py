"""Resuming: model and optimizer from one file, in either order, with groups added, names, devices, nothing saved."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, FLOATS
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
    train,
)
from torch.nn import Parameter

import halfstep as hs
from halfstep import states

MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    *((dtype, {}) for dtype in FLOATS),
    (BFLOAT16, {"master": "split"}),
    (BFLOAT16, {"state_dtype": BFLOAT16}),
]
each_mode = pytest.mark.parametrize(("dtype", "options"), MODES, ids=str)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Conv2d(3, 4, 2)).to(dtype)


@each_mode
def test_model_and_optimizer_from_one_file(dtype, options):
    """As a script does: built anew, the model loaded, then the optimizer; every later step has the same bits."""
    model = model_of(dtype)
    optimizer = hs.AdamW(model.parameters(), lr=torch.tensor(1e-2), **options)
    train(optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    other_model = model_of(dtype)
    other = hs.AdamW(other_model.parameters(), **options)
    other_model.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    assert_goes_on(optimizer, other)
    assert other.healed == 0
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_the_optimizer_before_the_model_warns_and_goes_on_from_the_weights(dtype):
    """What is lost is what the weights do not show; moments, counters and the trajectory are kept."""
    model = model_of(dtype)
    optimizer = hs.AdamW(model.parameters(), lr=1e-2)
    train(optimizer, range(3))
    other_model = model_of(dtype)
    for p in other_model.parameters():
        p.data.mul_(3.0)
    other = hs.AdamW(other_model.parameters())
    with pytest.warns(UserWarning, match="the saved master does not round to the weight .load the model before"):
        other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    other_model.load_state_dict(model.state_dict())
    optimizer.refresh_masters()
    with pytest.warns(RuntimeWarning, match="weights were written by someone else"):
        train(other, [3])
    train(optimizer, [3])
    assert_same(held(other), held(optimizer))


@each_mode
@pytest.mark.parametrize("added", FLOATS, ids=str)
def test_a_group_added_after_loading_starts_fresh(dtype, options, added):
    optimizer = hs.AdamW(parameters(dtype), lr=1e-2, **options)
    train(optimizer, range(3))
    other = on_copies(optimizer, saved_and_loaded(optimizer.state_dict()), **options)
    late = parameters(added, [(4, 4)], seed=7)
    fine = {"master": "auto"} if options.get("master") == "split" else {}  # float16 has no split master
    for run, params in ((optimizer, late), (other, copies(late))):
        run.add_param_group({"params": params, "lr": 1e-3, **fine})
    assert_goes_on(optimizer, other)
    steps = [int(other.state[p]["step"]) for p in params_of(other)]
    assert steps == [7] * len(SHAPES) + [4]
    assert_goes_on(other, _rebuilt(other, options, fine))


def _rebuilt(optimizer: hs.AdamW, options: dict[str, Any], fine: dict[str, Any]) -> hs.AdamW:
    """Of both groups at once, from its checkpoint."""
    first, second = (copies(group["params"]) for group in optimizer.param_groups)
    other = hs.AdamW([{"params": first}, {"params": second, **fine}], **options)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    return other


def test_a_checkpoint_without_states_starts_from_the_beginning():
    """Saved before the first step: loading it is a reset, as with torch.optim; the weights stay."""
    saved = hs.AdamW(parameters(BFLOAT16), lr=1e-2).state_dict()
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2)
    train(optimizer, range(3))
    weights = copies(params_of(optimizer))
    optimizer.load_state_dict(saved_and_loaded(saved))
    assert not optimizer.state
    assert_goes_on(hs.AdamW(weights, lr=1e-2), optimizer)


def test_names_stay_those_of_the_optimizer():
    """Named parameters and plain ones take each other's checkpoints: it is the order that counts."""
    named = hs.AdamW([(f"layer.{i}", p) for i, p in enumerate(parameters(BFLOAT16))])
    train(named, range(3))
    saved = saved_and_loaded(named.state_dict())
    assert saved["param_groups"][0]["param_names"] == ["layer.0", "layer.1", "layer.2"]
    plain = on_copies(named, saved)
    assert "param_names" not in plain.param_groups[0]
    again = hs.AdamW([(f"block.{i}", p) for i, p in enumerate(copies(params_of(plain)))])
    again.load_state_dict(saved_and_loaded(plain.state_dict()))
    assert again.param_groups[0]["param_names"] == ["block.0", "block.1", "block.2"]
    params_of(again)[1].grad = torch.full_like(params_of(again)[1], float("nan"))
    with pytest.warns(RuntimeWarning, match="the first non-finite gradient is that of parameter 'block.1'"):
        again.step()


def test_states_come_to_the_device_of_their_parameter():
    optimizer = hs.AdamW(parameters(FLOAT32), amsgrad=True)
    train(optimizer, range(3))
    saved = saved_and_loaded(optimizer.state_dict())["state"]
    for i, shape in enumerate(SHAPES):
        elsewhere = Parameter(torch.empty(shape, device="meta"))  # past the check that refuses meta in earnest
        state = states.imported(elsewhere, saved[i], optimizer.param_groups[0], False, "p")
        assert {v.device.type for v in state.values()} == {"meta"}
        assert len(state) == 4


def test_a_checkpoint_without_numbers_changes_nothing():
    """torch.load(map_location="meta") keeps shapes only."""
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2)
    train(optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    empty = torch.load(file, map_location="meta", weights_only=True)
    before = held(optimizer)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"parameter 0 of group 0 .*: the saved (step|exp_avg) is on the meta device"
        ):
            optimizer.load_state_dict(empty)
        for state in empty["state"].values():
            state["step"] = 3  # what comes next has no numbers either
    assert_same(held(optimizer), before)
