"""What torch brings around an optimizer: averages, hooks, the profiler, checkpoints by name, tied and frozen weights.

Guards: an average of weights that are no longer there, a master that takes the average for the weight, hooks or a
profiler that the fused step goes past, states that are made for frozen weights or lost for thawed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from adversarial import BFLOAT16, FLOAT32
from bits import assert_all_same_bits
from loops import CLASSES, INPUTS, assert_same_tree, loss_of, tiny_model
from optimizer_runs import assert_as_good_as, assert_same, held, saved_and_loaded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import halfstep as hs

LR = 1e-2
MASTERS: dict[str, dict[str, Any]] = {"master": {}, "split": {"master": "split"}}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range, *, set_to_none: bool = True) -> None:
    for t in which:
        optimizer.zero_grad(set_to_none)
        loss_of(model, t).backward()
        optimizer.step()


def three_runs(run: Callable[[type[torch.optim.Optimizer], torch.dtype, dict[str, Any]], nn.Module]) -> None:
    """halfstep's float32 weights err as torch's do, measured against float64."""
    ways = [(hs.AdamW, FLOAT32, {}), (torch.optim.AdamW, FLOAT32, {"foreach": False})]
    ways.append((torch.optim.AdamW, torch.float64, {"foreach": False}))
    models = [run(optimizer, dtype, options) for optimizer, dtype, options in ways]
    assert_as_good_as(*([p for p in model.parameters() if p.is_floating_point()] for model in models))


# ---- averages --------------------------------------------------------------------------------------------------------
def test_a_weight_average_with_its_schedule_is_torchs() -> None:
    def run(cls: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
        model = tiny_model(dtype)
        optimizer, averaged = cls(model.parameters(), lr=LR, **options), AveragedModel(model)
        schedule = SWALR(optimizer, swa_lr=1e-3, anneal_epochs=4)
        for epoch in range(8):
            steps(model, optimizer, range(2 * epoch, 2 * epoch + 2))
            averaged.update_parameters(model)
            schedule.step()
        assert averaged.n_averaged == 8
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
        return averaged.module

    three_runs(run)


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_evaluating_the_averaged_weights_leaves_no_trace(options: dict[str, Any]) -> None:
    """The average is swapped in between two steps, and out again: the run goes on with the bits of one without it."""
    plain, swapped = tiny_model(BFLOAT16), tiny_model(BFLOAT16)
    optimizers = [hs.AdamW(model.parameters(), lr=LR, **options) for model in (plain, swapped)]
    average = AveragedModel(swapped, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for t in range(6):
        for model, optimizer in zip((plain, swapped), optimizers, strict=True):
            steps(model, optimizer, range(t, t + 1))
        average.update_parameters(swapped)
        own = [p.detach().clone() for p in swapped.parameters()]
        assert t == 0 or any(not torch.equal(p, a) for p, a in zip(own, average.module.parameters(), strict=True))
        for values in (list(average.module.parameters()), own):
            for p, value in zip(swapped.parameters(), values, strict=True):
                p.data.copy_(value)
    assert_same(held(optimizers[1]), held(optimizers[0]))


# ---- hooks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scaled", [False, True])
def test_hooks_run_around_the_fused_step(scaled: bool) -> None:
    """Once a step, in torch's order; what a hook does to the gradients counts."""
    model, plain = tiny_model(), tiny_model()
    optimizer, other = hs.AdamW(model.parameters(), lr=LR), hs.AdamW(plain.parameters(), lr=LR)
    seen: list[str] = []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def halve(o: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append("before")
        assert o is optimizer
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        for p in model.parameters():
            p.grad /= 2

    def look(o: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append("after")
        assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())

    handles = [
        optimizer.register_step_pre_hook(halve),
        optimizer.register_step_post_hook(look),
        register_optimizer_step_pre_hook(lambda *_: seen.append("any before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("any after")),
    ]
    scaler = hs.LossScaler(init_scale=256.0, enabled=scaled)
    try:
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["any before", "before", "after", "any after"]
    (loss_of(plain, 0) / 2).backward()
    other.step()
    assert_same(held(optimizer), held(other))


def test_the_profiler_sees_the_step() -> None:
    model = tiny_model()
    optimizer = hs.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps(model, optimizer, range(3))
    (count,) = (event.count for event in profile.key_averages() if event.key == "Optimizer.step#AdamW.step")
    assert count == 3


def test_a_step_inside_the_backward_pass() -> None:
    """One optimizer a weight, stepped as soon as its gradient is complete: the bits of one step for all."""
    model, plain = tiny_model(BFLOAT16), tiny_model(BFLOAT16)
    optimizer = hs.AdamW(plain.parameters(), lr=LR)
    each = {p: hs.AdamW([p], lr=LR) for p in model.parameters()}

    def finish(p: torch.Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(finish)
    for t in range(4):
        loss_of(model, t).backward()
    steps(plain, optimizer, range(4))
    assert all(p.grad is None for p in model.parameters())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_tree({"weight": p.detach(), **each[p].state[p]}, {"weight": q.detach(), **optimizer.state[q]})


# ---- tied, frozen, named ---------------------------------------------------------------------------------------------
class Tied(nn.Module):
    """A character model whose output matrix is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(INPUTS, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, INPUTS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x.argmax(dim=1)))))[:, :CLASSES]


def tied(dtype: torch.dtype, seed: int = 1) -> Tied:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tied().to(dtype)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_tied_weights_move_once_and_stay_tied(set_to_none: bool) -> None:
    def run(cls: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
        model = tied(dtype)
        optimizer = cls(model.parameters(), lr=LR, **options)
        steps(model, optimizer, range(10), set_to_none=set_to_none)
        assert model.head.weight is model.embedding.weight
        assert len(optimizer.state) == 3
        assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}
        return model

    three_runs(run)


def test_weights_that_are_frozen_and_thawed_in_mid_run() -> None:
    """Frozen from the start: no state. Thawed: its own first step. Frozen again: neither a step nor weight decay."""

    def run(cls: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
        model = tiny_model(dtype)
        first, last = model[0], model[3]
        first.requires_grad_(False)
        optimizer = cls(model.parameters(), lr=LR, weight_decay=0.1, **options)
        steps(model, optimizer, range(3))
        assert first.weight not in optimizer.state
        first.requires_grad_(True)
        steps(model, optimizer, range(3, 6))
        optimizer.zero_grad()
        last.requires_grad_(False)
        frozen = last.weight.detach().clone()
        steps(model, optimizer, range(6, 8))
        assert torch.equal(last.weight, frozen)
        assert [float(optimizer.state[layer.weight]["step"]) for layer in (first, last)] == [5.0, 6.0]
        return model

    three_runs(run)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_a_checkpoint_by_parameter_name(options: dict[str, Any], flatten: bool) -> None:
    """torch.distributed.checkpoint's form, which also makes the states of a new optimizer by a step of its own."""
    model, other = tied(BFLOAT16), tied(BFLOAT16)
    optimizer, new = (hs.AdamW(m.parameters(), lr=LR, **options) for m in (model, other))
    steps(model, optimizer, range(3))
    settings = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=settings))
    assert ("state.body.weight.exp_avg" in saved) is flatten
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, new, saved, options=settings)
    assert_same_tree(new.state_dict(), optimizer.state_dict())
    steps(model, optimizer, range(3, 6))
    steps(other, new, range(3, 6))
    assert_same(held(new), held(optimizer))
    assert_all_same_bits(list(other.parameters()), list(model.parameters()), "weights")


@pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent is to:UserWarning")
@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_a_distributed_checkpoint_on_disk(options: dict[str, Any], tmp_path: Path) -> None:
    """One process writes it, a new one with other weights fills its own tensors from it."""
    model, other = tied(BFLOAT16), tied(BFLOAT16, seed=2)
    optimizer, new = (hs.AdamW(m.parameters(), lr=LR, **options) for m in (model, other))
    steps(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    weights, states = get_state_dict(other, new)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    set_state_dict(other, new, model_state_dict=weights, optim_state_dict=states)
    steps(model, optimizer, range(3, 6))
    steps(other, new, range(3, 6))
    assert_same(held(new), held(optimizer))
