"""`optimizer.state` in the hands of others: however they got a state, what they do to it counts at the next step.

Guards: a step that goes on with tensors which are no longer the optimizer's. The steps before every change are many, so
that the quick way is taken; a deep copy made after the change has no cached table, and must do the same steps.
"""

from __future__ import annotations

import collections
import copy
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import FLOAT32
from held_states import MODES, SHAPES, State, assert_steps_are_right, one_other_tensor, second, trained
from optimizer_runs import assert_same, parameters, train
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("either_reader")


# ---- getting hold of one state ---------------------------------------------------------------------------------------
def shallow(optimizer: hs.AdamW) -> hs.AdamW:
    """As wrappers that copy __dict__."""
    wrapper = object.__new__(type(optimizer))
    wrapper.__dict__ = dict(vars(optimizer))
    return wrapper


GETS: dict[str, Callable[[hs.AdamW], State]] = {
    "[]": lambda o: o.state[second(o)],
    "get": lambda o: o.state.get(second(o)),
    "get with a default": lambda o: o.state.get(second(o), None),
    "setdefault": lambda o: o.state.setdefault(second(o), {}),
    "itemgetter": lambda o: operator.itemgetter(second(o))(o.state),
    "items": lambda o: next(state for p, state in o.state.items() if p is second(o)),
    "values": lambda o: list(o.state.values())[1],
    "items backwards": lambda o: next(state for p, state in reversed(o.state.items()) if p is second(o)),
    "values backwards": lambda o: list(reversed(o.state.values()))[1],
    "keys": lambda o: o.state[list(o.state.keys())[1]],
    "iteration": lambda o: o.state[list(o.state)[1]],
    "dict()": lambda o: dict(o.state)[second(o)],
    "{**}": lambda o: {**o.state}[second(o)],
    "|": lambda o: (o.state | {})[second(o)],
    "| from the left": lambda o: ({} | o.state)[second(o)],
    "OrderedDict": lambda o: collections.OrderedDict(o.state)[second(o)],
    "ChainMap": lambda o: collections.ChainMap({}, o.state)[second(o)],
    "proxy": lambda o: types.MappingProxyType(o.state)[second(o)],
    "copy": lambda o: o.state.copy()[second(o)],
    "copy.copy": lambda o: copy.copy(o.state)[second(o)],
    "vars": lambda o: vars(o)["state"][second(o)],
    "__getstate__": lambda o: o.__getstate__()["state"][second(o)],
    "shallow copy": lambda o: copy.copy(o).state[second(o)],
    "wrapper": lambda o: shallow(o).state[second(o)],
    "popitem": lambda o: [o.state.setdefault(*o.state.popitem()) for _ in range(2)][1],
    "pop and put back": lambda o: o.state.setdefault(second(o), o.state.pop(second(o))),
}


def other_tensors(state: State) -> None:
    for key in state:
        state[key] = state[key].clone()


def other_order(state: State) -> None:
    for key, value in list(state.items())[::-1]:
        del state[key]
        state[key] = value.clone()


def data(state: State) -> None:
    for value in state.values():
        value.data = value.clone()


def data_of_the_counter(state: State) -> None:
    state["step"].data = state["step"] + 7


def set_(state: State) -> None:
    for value in state.values():
        value.set_(value.clone())


def larger_storage(state: State) -> None:
    for value in state.values():
        value.untyped_storage().resize_(value.nbytes + 4096)


def cleared(state: State) -> None:
    state.clear()


def swapped(state: State) -> None:
    """Every Python object holds another tensor."""
    for value in state.values():
        torch.utils.swap_tensors(value, value.clone())


CHANGES = [
    other_tensors, one_other_tensor, other_order, data, data_of_the_counter, set_, larger_storage, cleared, swapped
]  # fmt: skip


@pytest.mark.parametrize("get", GETS.values(), ids=GETS)
@pytest.mark.parametrize("change", [one_other_tensor, data], ids=lambda change: change.__name__)
def test_a_state_that_somebody_holds(get, change):
    """Changed right away, and again after many steps."""
    optimizer = trained()
    state = get(optimizer)
    for _ in range(2):
        change(state)
        assert_steps_are_right(optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_a_state(change, mode):
    optimizer = trained(mode)
    state = optimizer.state[second(optimizer)]
    train(optimizer, range(3))
    change(state)
    if change is cleared:
        train(optimizer, [3])  # makes the missing ones
    assert_steps_are_right(optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_the_tensors_of_a_state_dict(mode):
    """They are the optimizer's own, but for the counter; so are those of a copy of it."""
    optimizer = trained(mode)
    saved = copy.copy(optimizer.state_dict())
    train(optimizer, range(3))
    state = {key: value for key, value in saved["state"][1].items() if key != "step"}
    for change in (data, set_, larger_storage):
        change(state)
        assert_steps_are_right(optimizer)
    saved["state"][1].clear()  # the dict is not the optimizer's
    assert_steps_are_right(optimizer)


# ---- kept since before the states were there ------------------------------------------------------------------------
def later(kept: Any) -> Callable[[], list[State]]:
    """The states, when asked for, through what is kept now: a map, a view, or whose `state` is one."""
    if hasattr(kept, "state"):
        return lambda: list(kept.state.values())
    if hasattr(kept, "keys"):
        return lambda: list(kept.values())
    return lambda: [entry if isinstance(entry, dict) else entry[1] for entry in kept]


EARLY: dict[str, Callable[[hs.AdamW], Any]] = {
    "the map": lambda o: o.state,
    "items": lambda o: o.state.items(),
    "values": lambda o: o.state.values(),
    "wrapper": lambda o: shallow(o).state,
    "the wrapper itself": shallow,
}


@pytest.mark.parametrize("keep", EARLY.values(), ids=EARLY)
@pytest.mark.parametrize("made", ["built", "deepcopy", "pickle"])
def test_what_was_kept_before_a_state_existed_shows_it(keep, made):
    optimizer = trained(steps=2)
    (late,) = parameters(FLOAT32, [(4, 4)], seed=9)
    if made == "built":
        optimizer = hs.AdamW(parameters(FLOAT32, SHAPES), lr=0.1, amsgrad=True)
    else:
        optimizer = copy.deepcopy(optimizer) if made == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    kept = later(keep(optimizer))
    train(optimizer, range(3))
    optimizer.add_param_group({"params": [late]})
    train(optimizer, range(3))
    states = kept()
    assert len(states) == 4
    assert states[3] is dict.__getitem__(optimizer.state, late)
    one_other_tensor(states[3])
    assert_steps_are_right(optimizer)


def test_a_view_is_a_view():
    optimizer = trained()
    items, values = optimizer.state.items(), optimizer.state.values()
    p, state = next(iter(items))
    assert (len(items), len(values)) == (3, 3)
    assert (p, state) in items
    assert (Parameter(torch.ones(1)), state) not in items
    assert (Parameter(torch.ones(1)) in optimizer.state, len(optimizer.state)) == (False, 3)
    assert [id(s) for s in values] == [id(s) for _, s in items]
    assert isinstance(optimizer.state, collections.defaultdict)


# ---- copies and pickles ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_copy_of_the_map_is_a_plain_defaultdict(protocol):
    """Files hold no class of ours."""
    optimizer = trained()
    for made in (
        copy.deepcopy(optimizer.state),
        pickle.loads(pickle.dumps(optimizer.state, protocol)),
        copy.copy(optimizer.state),
        optimizer.state | {},
    ):
        assert type(made) is collections.defaultdict
        assert made.default_factory is dict
        states = list(optimizer.state.values())
        for state, mine in zip(made.values(), states, strict=True):
            assert_same(state, mine)
    assert b"halfstep" not in pickle.dumps(optimizer.state, protocol)


def test_what_torch_says_to_a_wrong_operand():
    optimizer = trained()
    for wrong in ([], None, 3):
        with pytest.raises(TypeError, match="unsupported operand"):
            optimizer.state | wrong
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong | optimizer.state
    with pytest.raises(KeyError):
        optimizer.state.pop(Parameter(torch.ones(1)))
    with pytest.raises(KeyError):
        del optimizer.state[Parameter(torch.ones(1))]
    assert_steps_are_right(optimizer)
