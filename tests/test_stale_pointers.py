"""Tensors that move between two steps: the cached table must notice, and the step must be right.

Guards: a step that writes through the pointers of the step before (into freed memory, or a copy nobody looks at).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from optimizer_runs import assert_same, held
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("either_reader")
SHAPE = (7, 7)  # square: a transposed parameter keeps its shape
DTYPES = {"float32": (FLOAT32, {}), "fp32 master": (BFLOAT16, {}), "split": (BFLOAT16, {"master": "split"})}


def replace_data(p: Parameter, state: dict[str, Any]) -> None:
    p.data = p.data.clone()


def point_into_a_buffer(p: Parameter, state: dict[str, Any]) -> None:
    """As wrappers do that flatten parameters: one element off, in the middle of a larger tensor."""
    flat = torch.full((1 + p.numel() + 5,), 9.0, dtype=p.dtype)
    flat[1:-5] = p.data.reshape(-1)
    p.data = flat[1:-5].view(p.shape)


def transpose_in_place(p: Parameter, state: dict[str, Any]) -> None:
    """The same memory in another order: no pointer changes."""
    for tensor in (p.data, *(v for v in state.values() if v.ndim)):
        tensor.copy_(tensor.t().clone())
    p.data = p.data.t()
    for key, value in state.items():
        if value.ndim:
            state[key] = value.t().contiguous()


def swap_storage(p: Parameter, state: dict[str, Any]) -> None:
    p.data.set_(p.data.clone())


def to_and_fro(p: Parameter, state: dict[str, Any]) -> None:
    """A module moved to another device and back: new memory under the same Parameter."""
    p.data = p.data.to(torch.float64).to(p.dtype)


def replace_states(p: Parameter, state: dict[str, Any]) -> None:
    for key in state:
        state[key] = state[key].clone()


def set_states(p: Parameter, state: dict[str, Any]) -> None:
    for value in state.values():
        value.set_(value.clone())


def data_of_states(p: Parameter, state: dict[str, Any]) -> None:
    for value in state.values():
        value.data = value.clone()


def states_in_another_order(p: Parameter, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if value.ndim:
            state[key] = value.t().contiguous().t()


def reload(p: Parameter, state: dict[str, Any]) -> None:
    """p.data and every state at once, the old ones freed."""
    replace_data(p, state)
    replace_states(p, state)
    gc.collect()


MOVES: list[Callable[[Parameter, dict[str, Any]], None]] = [
    replace_data, point_into_a_buffer, transpose_in_place, swap_storage, to_and_fro, replace_states, set_states,
    data_of_states, states_in_another_order, reload,
]  # fmt: skip


@pytest.mark.parametrize("mode", DTYPES)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_steps_go_on_where_the_tensors_are_now(move, mode):
    dtype, options = DTYPES[mode]
    optimizers = []
    for moved in (True, False):
        params = [Parameter(ordinary(SHAPE, dtype, i)) for i in range(3)]
        optimizer = hs.AdamW(params, lr=0.1, amsgrad=True, max_grad_norm=1.0, **options)
        for t in range(6):
            for i, p in enumerate(params):
                p.grad = ordinary(SHAPE, dtype, 10 * t + i)
            if moved and t in (2, 3, 5):
                before = held(optimizer)
                move(params[1], optimizer.state[params[1]])
                assert_same(held(optimizer), before)
            optimizer.step()
        optimizers.append(optimizer)
    assert_same(held(optimizers[0]), held(optimizers[1]))


@pytest.mark.parametrize("mode", DTYPES)
def test_the_same_memory_in_another_order(mode):
    """p.data = p.data.permute(...): no pointer, size or state changes, only which element is which. The states keep the
    order of the first step, which is not the contiguous one."""
    dtype, options = DTYPES[mode]
    results = []
    for view in (True, False):
        p = Parameter(ordinary((5, 5, 5), dtype, 0))
        optimizer = hs.AdamW([p], lr=0.1, max_grad_norm=1.0, **options)
        for t, order in enumerate([(1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1), (1, 0, 2)]):
            permuted = p.data.permute(order)
            p.data = permuted if view else permuted.contiguous()
            p.grad = ordinary((5, 5, 5), dtype, t)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a float32 master follows the weight, and says so
                optimizer.step()
        results.append(held(optimizer))
    assert_same(*results)


def test_a_gradient_may_be_another_tensor_every_step():
    """Other memory, another dtype of memory order, and one that is freed at once."""
    results = []
    for fresh in (True, False):
        p = Parameter(ordinary(SHAPE, FLOAT32, 0))
        p.grad = torch.empty(SHAPE)
        optimizer = hs.AdamW([p])
        for t in range(6):
            grad = ordinary(SHAPE, FLOAT32, t)
            if fresh:
                p.grad = grad.t().contiguous().t() if t % 2 else grad
            else:
                p.grad.copy_(grad)
            optimizer.step()
        results.append(held(optimizer))
    assert_same(*results)


def test_a_parameter_that_changes_its_dtype_goes_on_with_a_new_master():
    """model.bfloat16() between two steps: nothing of the old float32 pointers is used with the new item size."""
    p = Parameter(torch.ones(1000))
    optimizer = hs.AdamW([p], lr=0.1)
    p.grad = torch.ones(1000)
    optimizer.step()
    p.data = p.data.bfloat16()
    p.grad = None
    p.grad_dtype = BFLOAT16
    p.grad = torch.ones(1000, dtype=BFLOAT16)
    optimizer.step()
    state = optimizer.state[p]
    assert state["step"] == 2
    assert state["master"].dtype == FLOAT32
    assert torch.equal(state["master"].bfloat16(), p)
    assert bool((p < 0.85).all())


def test_a_parameter_whose_memory_is_read_as_another_dtype():
    """p.data = p.data.view(...): the same pointer and size, other numbers."""
    results = []
    for view in (True, False):
        p = Parameter(torch.ones(1000, dtype=BFLOAT16))
        optimizer = hs.AdamW([p], lr=0.1, on_stale="ignore")
        for dtype in (BFLOAT16, torch.float16):
            data = p.data.view(dtype)
            p.data = data if view else data.clone()
            p.grad = None
            p.grad_dtype = dtype
            p.grad = torch.ones(1000, dtype=dtype)
            optimizer.step()
        results.append(held(optimizer))
    assert_same(*results)


def test_a_gradient_left_from_another_shape_of_as_many_elements():
    """Its numbers belong to other elements now."""
    p = Parameter(torch.zeros(2, 3))
    p.grad = torch.ones(2, 3)
    p.data = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match=r"has shape \(3, 2\) on cpu, its gradient \(2, 3\) on cpu; call backward"):
        hs.AdamW([p]).step()
    assert not p.any()
