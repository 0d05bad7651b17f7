"""The cached tables: how many are kept, when one is taken without a look, and that they keep no state alive.

Guards: a fast way that is never taken (only a clock would tell), states of before a load that live on, endless tables.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from adversarial import FLOAT32, ordinary
from held_states import second, trained
from optimizer_runs import assert_same, held, params_of, train
from torch.nn import Parameter

import halfstep as hs
from halfstep import _cpu
from halfstep.ops import native_cpu


@contextmanager
def close_looks(optimizer: hs.AdamW, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps inside the block had to ask Python about every tensor."""
    looks, look = [], optimizer._table_after_a_close_look
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_table_after_a_close_look", lambda *args: looks.append(1) or look(*args))
        yield looks


def patterned_step(optimizer: hs.AdamW, missing: int, t: int = 0) -> None:
    for i, p in enumerate(params_of(optimizer)):
        p.grad = None if i == missing else ordinary(tuple(p.shape), p.dtype, 10 * t + i)
    optimizer.step()


def test_usual_steps_take_the_table_as_it_is(monkeypatch):
    optimizer = trained()
    with close_looks(optimizer, monkeypatch) as looks:
        train(optimizer, range(5))
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.max_grad_norm = 1.0
        train(optimizer, range(5))
    assert not looks


@pytest.mark.parametrize("held_by_others", [False, True])
def test_up_to_four_patterns_take_turns_without_a_look(held_by_others, monkeypatch):
    optimizer = hs.AdamW([Parameter(ordinary((3, 3), FLOAT32, i)) for i in range(6)])
    for t in range(6):
        patterned_step(optimizer, 5 if t < 1 else t % 4)
    states = list(optimizer.state.values()) if held_by_others else []
    for t in range(4):
        patterned_step(optimizer, t)
    with close_looks(optimizer, monkeypatch) as looks:
        for t in range(12):
            patterned_step(optimizer, t % 4, t)
    assert not looks
    with close_looks(optimizer, monkeypatch) as looks:
        for t in range(12):
            patterned_step(optimizer, t % 6, t)
    assert len(looks) >= 8
    assert len(optimizer._tables) == 4
    del states


def test_a_state_that_is_looked_at_costs_one_look(monkeypatch):
    optimizer = trained()
    with close_looks(optimizer, monkeypatch) as looks:
        for _ in range(3):
            list(optimizer.state.items())
            optimizer.state_dict()
            train(optimizer, range(3))
    assert len(looks) == 1


def test_without_a_reader_every_step_looks(monkeypatch):
    monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)
    optimizer = trained()
    with close_looks(optimizer, monkeypatch) as looks:
        train(optimizer, range(5))
    assert len(looks) == 5


@pytest.mark.parametrize("wait_for_a_step", [False, True])
def test_old_states_are_freed(wait_for_a_step):
    """After a load at once, after a replacement by the next step, however many tables knew them."""
    optimizer = trained()
    for t in range(8):
        patterned_step(optimizer, t % 3, t)
    old = [weakref.ref(value) for state in dict.values(optimizer.state) for value in state.values()]
    gc.collect()
    gc.disable()
    try:
        if wait_for_a_step:
            for p in params_of(optimizer):
                optimizer.state[p] = copy.deepcopy(dict.__getitem__(optimizer.state, p))
            train(optimizer, [1])
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert [ref() for ref in old] == [None] * len(old)
    finally:
        gc.enable()


def test_a_table_of_another_pattern_sees_what_happened_meanwhile():
    """A state, a weight, a group: changed while another table was in use."""
    optimizer, plain = trained(), trained()
    for t in range(6):
        for other in (optimizer, plain):
            patterned_step(other, t % 2, t)
    kept = optimizer.state[second(optimizer)]
    for t, change in enumerate(
        (
            lambda: kept.update(exp_avg=kept["exp_avg"].clone()),
            lambda: setattr(second(optimizer), "data", second(optimizer).detach().clone()),
            lambda: optimizer.param_groups.append({**optimizer.param_groups[0], "params": []}),
            lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        )
    ):
        for missing in (1, 1, 0, 0, 1, 0):
            patterned_step(optimizer, missing, t)
            patterned_step(plain, missing, t)
            if missing == 1:
                change()
            assert_same(held(optimizer), held(plain))


# ---- the reader itself -----------------------------------------------------------------------------------------------
def test_what_the_reader_says_of_a_tensor():
    reader = native_cpu.tensor_reader()
    base = torch.arange(24.0).reshape(4, 6)
    for tensor in (base, base[1:], base[0, 0], base[:0], Parameter(base[2]), base.bfloat16(), base.half(), base.int()):
        address, _, sizes = reader.facts(tensor)
        assert (address, sizes) == (tensor.data_ptr(), list(tensor.shape))
    dtypes = {reader.facts(base.to(d))[1] for d in (torch.float32, torch.bfloat16, torch.float16, torch.int32)}
    assert len(dtypes) == 4

    class Mine(torch.Tensor):
        pass

    others = [
        base.t(), base[:, ::2], base.to("meta"), base.to_sparse(), torch._neg_view(base), base.as_subclass(Mine),
        torch.ones(1, 1, 1, 1, 1, 1), torch._efficientzerotensor(3), None, 3, "text", torch.Tensor, base.numpy(),
    ]  # fmt: skip
    assert [reader.facts(other) for other in others] == [None] * len(others)


def test_what_the_reader_says_of_a_gradient():
    reader = native_cpu.tensor_reader()
    p = Parameter(torch.ones(3))
    assert reader.grad(p) == 0
    for _ in range(2):
        p.grad = torch.ones(3)
        assert reader.grad(p) == p.grad._cdata
        p.grad = None
        assert reader.grad(p) == 0
    for wrong in (None, 3, torch.Tensor):
        with pytest.raises(ValueError, match=r"expected a torch\.Tensor or Parameter"):
            reader.grad(wrong)


def test_what_a_plan_refuses_to_watch():
    reader, params = native_cpu.tensor_reader(), [torch.ones(3), torch.ones(2)]
    plan = _cpu.AdamPlan([3], [0], [0], [0], [0], [0])
    assert not plan.read(reader, params)  # nothing to go by
    with pytest.raises(ValueError, match=r"halfstep\._cpu: one row per parameter, or -1"):
        plan.watch(reader, params, [0])
    with pytest.raises(ValueError, match=r"halfstep\._cpu: no such row"):
        plan.watch(reader, params, [0, 1])
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        _cpu.StateWatch(reader, [{}, 3])
    states = [{"a": params[0]}, {}]
    watch = _cpu.StateWatch(reader, states)
    assert watch.still(reader, states)
    for other in ([], states[:1], [{}, {}], [{"b": params[0]}, {}], [{"a": params[1]}, {}], [3, {}]):
        assert not watch.still(reader, other)
    assert not _cpu.StateWatch(reader, [{3: params[0]}]).still(reader, [{3: params[0]}])
