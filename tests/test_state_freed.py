"""Old states are freed: the tables that hold them (and pointers into them) go as soon as the states have changed.

Guards: a model that needs its states twice after a checkpoint was loaded, or after a trainer has replaced them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from optimizer_runs import params_of, set_grads
from torch.nn import Parameter

import halfstep as hs

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {}),
    "fp32 master": (BFLOAT16, {}),
    "split": (BFLOAT16, {"master": "split", "state_dtype": BFLOAT16}),
}
each_mode = pytest.mark.parametrize("mode", MODES)
SIZE = 2**16
SMALL = 4096  # bytes: counters, results of a step
PIECE = 2**20  # bytes: a master is judged in pieces; less than half of the smallest optimizer's states


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """What only the garbage collector frees stays for too long: it does not know how much memory a tensor holds."""
    gc.disable()
    yield
    gc.enable()


def stepped(mode: str) -> hs.AdamW:
    """With several tables, each for other gradients; all gradients are set."""
    dtype, options = MODES[mode]
    optimizer = hs.AdamW([Parameter(ordinary((SIZE,), dtype, i)) for i in range(6)], **options)
    params = params_of(optimizer)
    for absent in (None, 0, 3):
        set_grads(params, 1)
        if absent is not None:
            params[absent].grad = None
        optimizer.step()
    set_grads(params, 2)
    return optimizer


def tensors(optimizer: hs.AdamW) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def state_bytes(optimizer: hs.AdamW) -> int:
    return sum(value.nbytes for value in tensors(optimizer))


def replace_entries(optimizer: hs.AdamW) -> None:
    for state in optimizer.state.values():
        for key in state:
            state[key] = state[key].clone()


def replace_data(optimizer: hs.AdamW) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.clone()


def replace_states(optimizer: hs.AdamW) -> None:
    for p in params_of(optimizer):
        optimizer.state[p] = {key: value.clone() for key, value in optimizer.state[p].items()}


REPLACE: list[Callable[[hs.AdamW], None]] = [replace_entries, replace_data, replace_states]


@each_mode
@pytest.mark.parametrize("replace", REPLACE, ids=lambda f: f.__name__)
def test_replaced_states_are_freed_by_the_next_step(replace, mode):
    with hs.measure_activations() as made:
        optimizer = stepped(mode)
        before, size = made.bytes, state_bytes(optimizer)
        for _ in range(3):
            made.peak = made.bytes
            replace(optimizer)
            optimizer.step()
            assert made.peak <= before + size + SMALL, "the states it had, and the new ones"
            assert made.bytes <= before + SMALL


@each_mode
def test_no_old_tensor_is_held_by_anyone(mode):
    optimizer = stepped(mode)
    old = [weakref.ref(value) for value in tensors(optimizer)]
    replace_entries(optimizer)
    assert all(ref() is not None for ref in old), "a step may still be running on them, as far as we know"
    optimizer.step()
    assert [ref() for ref in old] == [None] * len(old)


@each_mode
def test_loading_frees_the_old_states_at_once(mode):
    """No step is needed: the tables are dropped with them."""
    optimizer = stepped(mode)
    saved = copy.deepcopy(optimizer.state_dict())
    old = [weakref.ref(value) for value in tensors(optimizer)]
    with hs.measure_activations() as made:
        optimizer.load_state_dict(saved)
        assert [ref() for ref in old] == [None] * len(old)
        assert made.bytes <= state_bytes(optimizer) + SMALL
        optimizer.step()
    new = [weakref.ref(value) for value in tensors(optimizer)]
    assert all(ref() is not None for ref in new)


@each_mode
def test_loading_after_the_states_were_replaced_frees_the_older_ones_first(mode):
    """Otherwise there would be three of each at a time."""
    with hs.measure_activations() as made:
        optimizer = stepped(mode)
        saved, before = copy.deepcopy(optimizer.state_dict()), made.bytes
        replace_entries(optimizer)
        made.peak = made.bytes
        optimizer.load_state_dict(saved)
        assert made.peak <= before + state_bytes(optimizer) + PIECE
        assert made.bytes <= before + SMALL


@each_mode
def test_states_that_were_taken_away_are_freed_before_new_ones_are_made(mode):
    """optimizer.state.clear() starts again; the step needs the memory of one state, not of two."""
    with hs.measure_activations() as made:
        optimizer = stepped(mode)
        before = made.bytes
        optimizer.state.clear()
        made.peak = made.bytes
        optimizer.step()
        assert made.peak <= before + SMALL
        assert made.bytes <= before + SMALL


@each_mode
def test_a_frozen_part_gives_its_states_back(mode):
    """del optimizer.state[p] for what is trained no more."""
    optimizer = stepped(mode)
    params = params_of(optimizer)
    old = [weakref.ref(value) for p in params[:3] for value in optimizer.state[p].values()]
    for p in params[:3]:
        p.grad = None
        del optimizer.state[p]
    optimizer.step()
    assert [ref() for ref in old] == [None] * len(old)
    assert len(optimizer.state) == 3


@each_mode
def test_state_dict_makes_no_states(mode):
    """Of parameters that were never updated there is nothing to save; saving does not disturb the tables."""
    dtype, options = MODES[mode]
    optimizer = hs.AdamW([Parameter(ordinary((SIZE,), dtype, i)) for i in range(4)], **options)
    with hs.measure_activations() as made:
        assert optimizer.state_dict()["state"] == {}
        params = params_of(optimizer)
        set_grads(params[:2], 1)
        optimizer.step()
        size = made.bytes
        tables = list(optimizer._tables)
        for _ in range(3):
            saved = optimizer.state_dict()
            assert sorted(saved["state"]) == [0, 1]
            optimizer.step()
        assert optimizer._tables == tables
        del saved
        assert made.bytes <= size + SMALL
        assert len(optimizer.state) == 2
