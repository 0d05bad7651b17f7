"""States that others put into `optimizer.state`, take out or exchange; and what is freed.

Guards: moments of another parameter, or under another's name, behind the cached pointers; memory that lives on.
"""

from __future__ import annotations

import collections
import copy
import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from held_states import State, assert_steps_are_right, one_other_tensor, second, trained
from optimizer_runs import assert_same, held, params_of, train
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("either_reader")


# ---- states put in, taken out and exchanged -------------------------------------------------------------------------
def copied(optimizer: hs.AdamW, factor: float = 0.5) -> dict[Parameter, State]:
    """Other states for every parameter."""
    with torch.no_grad():
        return {
            p: {k: v.clone() if k == "step" or not v.is_floating_point() else v * factor for k, v in s.items()}
            for p, s in optimizer.state.items()
        }


def put(o: hs.AdamW) -> None:
    o.state[second(o)] = copied(o)[second(o)]


def put_behind_the_others(o: hs.AdamW) -> None:
    states = copied(o)
    del o.state[second(o)]
    o.state[second(o)] = states[second(o)]


def exchange_two(o: hs.AdamW) -> None:
    first, other, _ = params_of(o)
    o.state[first], o.state[other] = o.state[other], o.state[first]


def exchange_two_in_place(o: hs.AdamW) -> None:
    """The states come in the same order as before, under the other parameters."""
    states = list(o.state.items())
    o.state.clear()
    for (p, _), (_, state) in zip([states[1], states[0], states[2]], states, strict=True):
        o.state[p] = state


def exchange_two_names(o: hs.AdamW) -> None:
    state = o.state[second(o)]
    items = dict(state)
    state.clear()
    for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state[{"max_exp_avg_sq": "exp_avg_sq", "exp_avg_sq": "max_exp_avg_sq"}.get(key, key)] = items[key]


def exchange_two_tensors(o: hs.AdamW) -> None:
    first, other, _ = (o.state[p] for p in params_of(o))
    torch.utils.swap_tensors(first["exp_avg"], other["exp_avg"])


def share_no_key(o: hs.AdamW) -> None:
    for state in o.state.values():
        state["note"] = 1  # type: ignore[assignment]  # somebody's own, not a tensor


PUTS: list[Callable[[hs.AdamW], Any]] = [
    put, put_behind_the_others, exchange_two, exchange_two_in_place, exchange_two_names, exchange_two_tensors
]  # fmt: skip
UPDATES: dict[str, Callable[[hs.AdamW], Any]] = {
    "update": lambda o: o.state.update(copied(o)),
    "update with pairs": lambda o: o.state.update(list(copied(o).items())),
    "|=": lambda o: operator.ior(o.state, copied(o)),
    "del": lambda o: operator.delitem(o.state, second(o)),
    "pop": lambda o: o.state.pop(second(o)),
    "pop with a default": lambda o: o.state.pop(second(o), None),
    "popitem": lambda o: o.state.popitem(),
    "clear": lambda o: o.state.clear(),
    "assign dict": lambda o: setattr(o, "state", copied(o)),
    "assign defaultdict": lambda o: setattr(o, "state", collections.defaultdict(dict, copied(o))),
    "assign itself": lambda o: setattr(o, "state", o.state.copy()),
    "assign {}": lambda o: setattr(o, "state", {}),
    "assign an empty defaultdict": lambda o: setattr(o, "state", collections.defaultdict(dict)),
    "through __dict__": lambda o: vars(o).update(state=copied(o)),
    "load_state_dict": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    **{put.__name__: put for put in PUTS},
}


def counters(optimizer: hs.AdamW) -> list[int]:
    found = held(optimizer)
    return [int(found.get(f"{i}.step", 0)) for i in range(len(params_of(optimizer)))]


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_states_put_in_and_taken_out(update):
    """What is missing starts anew, with its first step; once more after many steps."""
    optimizer = trained()
    for _ in range(2):
        update(optimizer)
        steps = counters(optimizer)
        assert_steps_are_right(optimizer)
        assert counters(optimizer) == [t + 3 for t in steps]
        one_other_tensor(optimizer.state[second(optimizer)])
        assert_steps_are_right(optimizer)


def test_a_counter_whose_memory_is_read_as_another_dtype():
    """The same pointer; its number would be another."""
    optimizer = trained()
    state = optimizer.state[second(optimizer)]
    train(optimizer, range(2))
    counter = state["step"].data
    for _ in range(2):
        state["step"].data = counter.view(torch.float64)
        for _ in range(2):
            before = held(optimizer)
            with pytest.raises(
                ValueError, match=r"its step is tensor\(.*float64\); expected a whole number of updates"
            ):
                train(optimizer, [5])
            assert_same(held(optimizer), before)
        state["step"].data = counter
        assert_steps_are_right(optimizer)


def test_moments_whose_memory_counts_with_the_other_sign():
    optimizer = trained()
    state = optimizer.state[second(optimizer)]
    for _ in range(2):
        train(optimizer, range(2))
        state["exp_avg"].data = torch._neg_view(state["exp_avg"].data)
        before = state["exp_avg"].clone()
        with pytest.raises(RuntimeError, match="its optimizer states have different memory layouts"):
            train(optimizer, [5])
        assert torch.equal(state["exp_avg"], before)
        state["exp_avg"] = state["exp_avg"].resolve_neg()
        assert_steps_are_right(optimizer)


def test_states_under_other_names():
    """Two moments that trade names do so in the steps, too."""
    optimizer = trained()
    state = optimizer.state[second(optimizer)]
    state["max_exp_avg_sq"].mul_(4)
    train(optimizer, range(3))
    old = {key: value.clone() for key, value in state.items()}
    exchange_two_names(optimizer)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    expected = old["max_exp_avg_sq"] * torch.tensor(0.999)
    assert torch.equal(state["exp_avg_sq"], expected)
    assert torch.equal(state["max_exp_avg_sq"], torch.maximum(old["exp_avg_sq"], expected))


def test_an_assigned_mapping_stays_its_owners():
    """As in torch.optim: they see the states that steps make, and what they write counts."""
    optimizer, mine = trained(), {}
    optimizer.state = mine
    train(optimizer, range(3))
    assert optimizer.state is mine
    assert set(mine) == set(params_of(optimizer))
    mine[second(optimizer)] = copied(optimizer)[second(optimizer)]
    assert_steps_are_right(optimizer)
    one_other_tensor(mine[second(optimizer)])
    assert_steps_are_right(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    before = held(optimizer)
    optimizer.load_state_dict(saved)
    assert_same(held(optimizer), before)
    assert optimizer.state is not mine
    assert len(mine) == 3
    optimizer.refresh_masters()
    assert_steps_are_right(optimizer)


def test_somebodys_own_entries_stay_and_disturb_nothing():
    optimizer, plain = trained(), trained()
    optimizer.state["mine"]["count"] = 1
    share_no_key(optimizer)
    train(optimizer, range(3))
    train(plain, range(3))
    assert all(state.pop("note") == 1 for key, state in optimizer.state.items() if key != "mine")
    assert optimizer.state.pop("mine") == {"count": 1, "note": 1}
    assert_same(held(optimizer), held(plain))
    assert_steps_are_right(optimizer)


def test_two_optimizers_on_one_map():
    """copy.copy shares states, parameters and groups: each sees what the other does to them."""
    optimizer = trained()
    twin = copy.copy(optimizer)
    assert twin.state is optimizer.state
    for one, other in ((optimizer, twin), (twin, optimizer)):
        train(one, range(2))
        one.state.pop(second(one))
        train(other, range(2))
        assert int(one.state[second(one)]["step"]) == 2
        one_other_tensor(one.state[second(one)])
        assert_steps_are_right(other)


# ---- nothing is kept alive -------------------------------------------------------------------------------------------
TAKE_OUT: dict[str, Callable[[hs.AdamW, Parameter], Any]] = {
    "pop": lambda o, p: o.state.pop(p),
    "del": lambda o, p: operator.delitem(o.state, p),
    "popitem": lambda o, p: [o.state.popitem() for _ in range(3)],
    "clear": lambda o, p: o.state.clear(),
    "assign": lambda o, p: setattr(o, "state", {q: s for q, s in o.state.items() if q is not p}),
}


@pytest.mark.parametrize("take_out", TAKE_OUT.values(), ids=TAKE_OUT)
def test_a_parameter_that_was_taken_out_is_freed(take_out):
    """By the next step at the latest, without the garbage collector; its state and gradient too."""
    optimizer = trained()
    state = optimizer.state[second(optimizer)]
    train(optimizer, range(3))
    gone = [weakref.ref(t) for t in (second(optimizer), second(optimizer).grad, *state.values())]
    del state
    gc.collect()
    gc.disable()
    try:
        p = optimizer.param_groups[0]["params"].pop(1)
        take_out(optimizer, p)
        del p
        optimizer.step()
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
    assert_steps_are_right(optimizer)


@pytest.mark.parametrize("looked", [False, True])
def test_an_optimizer_is_freed_with_its_states(looked):
    optimizer = trained()
    states = [weakref.ref(t) for s in (dict.values(optimizer.state)) for t in s.values()]
    if looked:
        list(optimizer.state.items())
        train(optimizer, range(3))
    gone = [weakref.ref(optimizer), *map(weakref.ref, params_of(optimizer)), *states]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
