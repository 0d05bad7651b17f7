"""torch.set_default_device() and `with torch.device(...)`: only tensors that a user asks for are made there.

Guards: numbers of the host, or memory whose address a C++ kernel gets, made on a GPU because that is the default.
"""

from __future__ import annotations

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from bits import assert_all_same_bits
from optimizer_runs import assert_same, held, parameters, set_grads

import halfstep as hs
from halfstep.ops import devices, triton_tables
from halfstep.ops.triton_tables import HostMemory

HERE = torch.device("cpu")
ELSEWHERE = torch.device("meta")  # whose tensors hold nothing


def step_and_lists(optimizer: hs.AdamW, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    scaler = hs.LossScaler(init_scale=2.0)
    scaler.scale(params[0].detach().sum())
    results = [scaler.step(optimizer)]
    scaler.update()
    grads = [p.grad for p in params if p.grad is not None]
    found = params[0].new_zeros(1, dtype=FLOAT32)
    hs.unscale_(grads, 0.5, found)
    results += [hs.clip_grad_norm_(params, 0.5), hs.grad_stats(grads)[0], *hs.l2_norms(grads), found]
    copies = [torch.empty_like(p, dtype=BFLOAT16) for p in params]
    hs.cast_(copies, params, rounding="stochastic", seed=1)
    optimizer.load_state_dict(optimizer.state_dict())
    return [*results, optimizer.grad_norm, optimizer.healed, *copies]


@pytest.mark.parametrize("forced", [None, "reference"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_step_and_lists(dtype, forced):
    runs = []
    for default in (HERE, ELSEWHERE):
        params = parameters(dtype)
        set_grads(params, 1)
        with default:
            optimizer = hs.AdamW(params, max_grad_norm=1.0, backend=forced)
            results = step_and_lists(optimizer, params)
        runs.append((held(optimizer), results))
    (mine, my_results), (theirs, their_results) = runs[1], runs[0]
    assert_same(mine, theirs)
    assert_all_same_bits(my_results, their_results, "results")
    assert {t.device for t in my_results} == {HERE}


def test_triton_tables_are_put_together_on_the_host(monkeypatch):
    with ELSEWHERE:
        assert HostMemory(HERE).filled([1, 2]).tolist() == [1, 2]
        monkeypatch.setattr(devices, "is_host", lambda device: False)
        assert HostMemory(HERE).filled([3]).tolist() == [3]
        assert triton_tables._pinned(1, HERE).device == HERE


def test_memory_that_inference_mode_made_serves_a_capture_outside_of_it(monkeypatch):
    monkeypatch.setattr(devices, "is_host", lambda device: False)
    memory = HostMemory(HERE)
    with torch.inference_mode():
        memory.filled([1, 2])
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    assert memory.filled([3, 4]).tolist() == [3, 4]
