"""What makes another graph of step(): other gradients, groups or kinds of learning rates.

Guards: a graph of before that goes on with parameters that are gone, or without those that came.
"""

from __future__ import annotations

import copy

import pytest
import torch
from adversarial import FLOAT32
from compile_twins import BACKENDS, compiled, graphs, keep_grad_mode, only_step, run_both, step, two_groups
from optimizer_runs import parameters, params_of, set_grads, train

import halfstep as hs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_come_and_go(backend) -> None:
    def some(optimizer: hs.Adam, t: int) -> None:
        params = params_of(optimizer)
        for p in {1: params[:1], 2: params[2:], 4: params}.get(t, []):
            p.grad = None

    run_both(step, backend, between=some, steps=6)
    assert graphs() == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learning_rate_becomes_a_tensor_and_a_number_again(backend) -> None:
    def another(optimizer: hs.Adam, t: int) -> None:
        optimizer.param_groups[0]["lr"] = [0.1, torch.tensor(0.2), torch.tensor(0.3), 0.4][t]

    run_both(step, backend, between=another, steps=4)


def test_groups_are_added_and_states_loaded() -> None:
    def change(optimizer: hs.Adam, t: int) -> None:
        if t == 1:
            optimizer.add_param_group({"params": parameters(FLOAT32, [(3,)])})
            set_grads(params_of(optimizer), t)
        if t == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    run_both(step, "aot_eager", between=change)
    assert graphs() == 2


def test_groups_are_replaced() -> None:
    """By a list that holds the same parameters, then by one that does not: no guard sees it."""
    optimizer = two_groups()
    call = compiled(only_step, "eager")
    train(optimizer, range(1))
    set_grads(params_of(optimizer), 1)
    call(optimizer, params_of(optimizer))
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    kept, moved = params_of(optimizer)[0].detach().clone(), params_of(optimizer)[5].detach().clone()
    call(optimizer, params_of(optimizer))
    assert torch.equal(params_of(optimizer)[0], kept)
    assert not torch.equal(params_of(optimizer)[5], moved)
    optimizer.param_groups = [optimizer.param_groups[1]]
    left = params_of(optimizer)
    before = [p.detach().clone() for p in left]
    replaced = r"param_groups was replaced .* nothing was updated\. Call the compiled"
    with keep_grad_mode(), pytest.raises(RuntimeError, match=replaced):
        call(optimizer, params_of(optimizer))
    assert all(map(torch.equal, left, before))
    call(optimizer, params_of(optimizer))
    assert not any(map(torch.equal, left, before))
