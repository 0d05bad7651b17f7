"""optimizer.step() under torch.compile(fullgraph=True): one graph, the plain step's bits, nothing compiled twice.

Guards: a graph break or a new graph for every learning rate or step; weights or results of the last step in place of
this one's; a copy of every weight; an optimizer that a graph keeps alive; errors and warnings that change on the way.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from compile_twins import BACKENDS, breaks, compiled, graphs, keep_grad_mode, only_step, run_both, step, two_groups
from optimizer_runs import assert_same, held, overflow, params_of, set_grads, train
from torch.nn import Parameter

import halfstep as hs
from halfstep import compiled_step

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "L2": {"cls": hs.Adam, "weight_decay": 0.1},
    "clipped": {"max_grad_norm": 0.5},
    "split": {"master": "split", "amsgrad": True, "state_dtype": BFLOAT16},
    "stochastic": {"master": None, "stochastic_rounding": True, "seed": 3},
    "tensors": {"lr": torch.tensor(0.02), "betas": (torch.tensor(0.8), 0.99), "max_grad_norm": torch.tensor(1.0)},
}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def one_graph(fresh_dynamo):
    """Fails whoever makes a second graph."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert (graphs(), breaks()) == (1, 0)


def lower_lr(optimizer: hs.Adam, t: int) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.7)
        else:
            group["lr"] *= 0.7


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph_for_every_step_and_learning_rate(options, backend) -> None:
    run_both(step, backend, make=lambda: two_groups(**copy.deepcopy(options)), between=lower_lr)


@pytest.mark.usefixtures("one_graph")
def test_every_setting_is_that_of_the_moment() -> None:
    def change(optimizer: hs.Adam, t: int) -> None:
        optimizer.max_grad_norm, optimizer.on_stale = t or None, ("refresh", "ignore")[t % 2]
        optimizer.param_groups[0].update(betas=(0.9 - t / 10, 0.99), eps=1e-8 * (t + 1), weight_decay=t / 10)

    run_both(step, "aot_eager", between=change)


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("before", [True, False], ids=["schedule first", "step first"])
def test_schedulers(before: bool, lr: Any) -> None:
    """torch.compile traces no step that a scheduler has wrapped: ours is not wrapped. torch's warnings are errors."""
    optimizers = [two_groups(lr=copy.copy(lr)), two_groups(lr=copy.copy(lr))]
    calls = [optimizers[0].step, None]
    if not before:
        calls[1] = torch.compile(optimizers[1].step, backend="eager", fullgraph=True)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in optimizers]
    if before:
        calls[1] = torch.compile(optimizers[1].step, backend="eager", fullgraph=True)
    for t in range(5):
        for optimizer, call, schedule in zip(optimizers, calls, schedules, strict=True):
            set_grads(params_of(optimizer), t)
            call()
            schedule.step()
    assert_same(held(optimizers[1]), held(optimizers[0]))


def test_a_scheduler_still_notices_that_there_was_no_step() -> None:
    optimizer = two_groups()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        schedule.step()


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("backend", BACKENDS)
def test_behind_a_forward_pass(backend) -> None:
    """The loss of the weights before, then the step on the gradients that are there, then the loss again."""
    inputs = ordinary((4, 3), FLOAT32, 5)

    def with_losses(optimizer: hs.Adam, params: list[Parameter]) -> list[torch.Tensor]:
        before = (inputs @ params[1]).square().sum().detach()
        optimizer.step()
        return [before, (inputs @ params[1]).square().sum().detach()]

    run_both(with_losses, backend, between=lower_lr)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's imports
@pytest.mark.skipif(" " in torch.__file__, reason="torch's inductor does not quote paths: it cannot link here")
@pytest.mark.usefixtures("one_graph")
def test_inductor_hands_over_the_weights_themselves(tmp_path, monkeypatch) -> None:
    """No copy of a weight or gradient goes in or out, and the step stays between the reads around it."""
    handed_over: list[bool] = []
    same_memory = compiled_step._is_same_memory

    def watched(a: Any, b: Any) -> bool:
        handed_over.append(same_memory(a, b))
        return handed_over[-1]

    def around(optimizer: hs.Adam, params: list[Parameter]) -> list[torch.Tensor]:
        before = [p * 2 for p in params]
        optimizer.step()
        return [*before, *(p * 2 for p in params), optimizer.grad_norm * 2]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled_step, "_is_same_memory", watched)
    run_both(around, "inductor", make=lambda: two_groups(max_grad_norm=1.0), between=lower_lr)
    assert len(handed_over) == 5 * 2 * 6  # steps, weights and gradients
    assert all(handed_over)


# ---- ways of calling it ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_is_compiled_by_itself_under_a_scaler(backend) -> None:
    """The scaler hands over its scale outside of the graph; a scheduler may come later."""
    plain, traced = two_groups(), two_groups()
    traced.step = torch.compile(traced.step, backend=backend, fullgraph=True)
    for optimizer in (plain, traced):
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = hs.LossScaler(init_scale=8.0)
        for t in range(3):
            set_grads(params_of(optimizer), t, spread=8.0)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
    assert_same(held(traced), held(plain))
    assert (graphs(), breaks()) == (1, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closure(backend) -> None:
    run_both(lambda optimizer, params: optimizer.step(lambda: params[0].sum().detach()), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks(backend) -> None:
    """What one does to the gradients counts; one behind the step sees its results."""

    def make() -> hs.Adam:
        optimizer = two_groups()
        params, seen = params_of(optimizer), torch.zeros(())

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            for p in params:
                p.grad.mul_(0.5)

        def undo(optimizer: Any, args: Any, kwargs: Any) -> None:
            seen.copy_(optimizer.grad_norm)
            params[0].grad.copy_(seen)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(undo)
        return optimizer

    run_both(step, backend, make=make, between=lambda o, t: setattr(o, "max_grad_norm", 1.0))


def test_a_subclass_and_several_optimizers_through_one_function() -> None:
    class Biased(hs.AdamW):
        def step(self, closure=None):
            self.bias.add_(1)
            super().step(closure)
            return self.bias * 2

    def make(cls: type[hs.Adam]) -> hs.Adam:
        optimizer = two_groups(cls)
        optimizer.bias = torch.zeros(())
        return optimizer

    for cls in (hs.Adam, Biased, hs.AdamW):
        run_both(lambda optimizer, params: optimizer.step(), "aot_eager", make=lambda cls=cls: make(cls))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_in_one_buffer_and_in_other_orders(backend) -> None:
    def make() -> hs.AdamW:
        flat = ordinary((40,), FLOAT32, 0)
        odd = ordinary((2, 3, 4, 4), FLOAT32, 1).to(memory_format=torch.channels_last)
        gaps, empty = ordinary((6, 8), BFLOAT16, 2)[:, ::2], torch.empty(0)
        return hs.AdamW([Parameter(t) for t in (flat[:16], flat[16:].view(4, 6), odd, gaps, empty)])

    def spread(optimizer: hs.Adam, t: int) -> None:
        params_of(optimizer)[3].grad = ordinary((6, 1), BFLOAT16, t).expand(6, 4)

    run_both(only_step, backend, make=make, between=spread)


# ---- what comes out --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_and_warnings_are_those_of_the_step(backend) -> None:
    optimizer = two_groups()
    call = compiled(only_step, backend)
    set_grads(params_of(optimizer), 0)
    call(optimizer, params_of(optimizer))
    before = held(optimizer)
    optimizer.max_grad_norm = -1.0
    with keep_grad_mode(), pytest.raises(ValueError, match=r"^max_grad_norm=-1.0: expected None or a number >= 0$"):
        call(optimizer, params_of(optimizer))
    optimizer.max_grad_norm, optimizer.param_groups[1]["lr"] = None, -1.0
    with keep_grad_mode(), pytest.raises(ValueError, match=r"parameter group 1: lr=-1\.0"):
        call(optimizer, params_of(optimizer))
    optimizer.param_groups[1]["lr"] = 1.0
    overflow(optimizer)
    with pytest.warns(RuntimeWarning, match="a step was skipped, 1 in all"):
        call(optimizer, params_of(optimizer))
    assert optimizer.skipped
    assert_same(held(optimizer), before)
    with pytest.warns(
        RuntimeWarning, match="2 steps in a row were skipped"
    ):  # also by a plain step: one count for both
        optimizer.step()


def test_copies_go_their_own_way() -> None:
    optimizer = two_groups()
    train(optimizer, range(1))
    call = compiled(only_step, "aot_eager")
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        before = held(optimizer)
        plain = copy.deepcopy(twin)
        train(plain, range(1, 2))
        set_grads(params_of(twin), 1)
        call(twin, params_of(twin))
        assert_same(held(optimizer), before)
        assert_same(held(twin), held(plain))


def test_nothing_keeps_an_optimizer_alive() -> None:
    optimizer = two_groups()
    set_grads(params_of(optimizer), 0)
    call = compiled(only_step, "aot_eager")
    call(optimizer, params_of(optimizer))
    name, left = optimizer.view.name, [weakref.ref(optimizer), *map(weakref.ref, params_of(optimizer))]
    assert name in compiled_step._optimizers
    del optimizer
    gc.collect()
    assert [r() for r in left] == [None] * len(left)
    assert name not in compiled_step._optimizers
