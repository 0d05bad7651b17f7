"""Whose the gradients' memory is: held as long as the step needs it, whoever drops it, and not a moment longer.

Guards: kernels that read freed memory; gradients that outlive zero_grad() because a cached table still refers to them.
Each gradient is a numpy array that the test watches: when it is gone, its memory is.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import FLOAT32, ordinary
from optimizer_runs import assert_same, held, params_of
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, native_cpu

SIZES = {"small": 100, "large": 2**17}  # a large step lets other threads run


def optimizer_of(size: int, count: int = 3, **options: Any) -> hs.AdamW:
    return hs.AdamW([Parameter(ordinary(size, FLOAT32, i)) for i in range(count)], **{"lr": 0.1, **options})


def watched_grads(optimizer: hs.AdamW, t: int, missing: int | None = None) -> list[weakref.ref[Any]]:
    """Sets the gradients of step t; references to their memory."""
    memory = []
    for i, p in enumerate(params_of(optimizer)):
        array = ordinary(p.numel(), FLOAT32, 100 * t + i).numpy().copy()
        p.grad = None if i == missing else torch.from_numpy(array)
        if i != missing:
            memory.append(weakref.ref(array))
    return memory


def alive(memory: list[weakref.ref[Any]]) -> list[bool]:
    return [ref() is not None for ref in memory]


def warm(optimizer: hs.AdamW) -> None:
    for t in range(3):
        watched_grads(optimizer, t)
        optimizer.step()
    optimizer.zero_grad()


each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
each_backend = pytest.mark.parametrize("backend", [None, "reference"])


# ---- let go after the step -------------------------------------------------------------------------------------------
@each_size
@each_backend
def test_after_a_step(size, backend):
    optimizer = optimizer_of(size, backend=backend)
    for t in range(4):
        memory = watched_grads(optimizer, t)
        optimizer.step()
        assert alive(memory) == [True] * 3
        optimizer.zero_grad()
        assert alive(memory) == [False] * 3


@each_size
def test_after_a_skipped_step(size):
    optimizer = optimizer_of(size, max_grad_norm=1.0)
    warm(optimizer)
    memory = watched_grads(optimizer, 5)
    params_of(optimizer)[1].grad[7] = math.inf
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        optimizer.step()
    optimizer.zero_grad()
    assert alive(memory) == [False] * 3


@each_size
def test_when_layers_take_turns(size):
    """Every pattern has its table, and each looks at the parameters before it finds that it is another's turn."""
    optimizer = optimizer_of(size, count=6)
    for t in range(24):
        memory = watched_grads(optimizer, t, missing=[5, 4, 3, 5, 2, 1, 0][t % 7])
        optimizer.step()
        optimizer.zero_grad()
        assert not any(alive(memory)), t


class BrokenError(Exception):
    pass


class BreaksWhenRead:
    def __float__(self) -> float:
        raise BrokenError


def break_the_lr(optimizer: hs.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer.param_groups[0]["lr"] = BreaksWhenRead()


def break_the_norm(optimizer: hs.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer.max_grad_norm = BreaksWhenRead()  # type: ignore[assignment]


def break_a_call(name: str) -> Callable[[hs.AdamW, pytest.MonkeyPatch], None]:
    def change(optimizer: hs.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(*args: Any) -> None:
            raise BrokenError

        optimizer.max_grad_norm = 1.0
        for plan in (native_cpu.AdamPlan, backend.reference_torch.AdamPlan):
            monkeypatch.setattr(plan, name, call)

    return change


BREAKS = {
    "lr": break_the_lr,
    "max_grad_norm": break_the_norm,
    "grad_stats": break_a_call("grad_stats"),
    "update": break_a_call("update"),
}


@each_size
@each_backend
@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_after_an_error_inside_the_step(change, size, backend, monkeypatch):
    optimizer = optimizer_of(size, backend=backend)
    warm(optimizer)
    memory = watched_grads(optimizer, 5)
    change(optimizer, monkeypatch)
    with pytest.raises(BrokenError):
        optimizer.step()
    optimizer.zero_grad()
    assert alive(memory) == [False] * 3


@each_size
def test_module_conversion_by_swapping(size):
    """torch.__future__.set_swap_module_params_on_conversion: refused while anybody refers to a parameter."""
    model = torch.nn.Linear(size, 3)
    optimizer = hs.AdamW(model.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for t in range(6):
            other = copy.deepcopy(optimizer)
            for changed in (optimizer, other):
                for i, p in enumerate(params_of(changed)):
                    p.grad = None if i < t % 2 else ordinary(tuple(p.shape), p.dtype, t)
                changed.step()
            assert_same(held(optimizer), held(other))
            model.to(memory_format=torch.contiguous_format)
            model._apply(lambda tensor: tensor.clone())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# ---- held during the step -------------------------------------------------------------------------------------------
class DropsTheGradients:
    """A norm to clip to that is checked first, and read again after the step has found its gradients."""

    def __init__(self, optimizer: hs.AdamW, memory: list[weakref.ref[Any]]) -> None:
        self.optimizer, self.memory, self.seen, self.reads = optimizer, memory, [], 0

    def __float__(self) -> float:
        self.reads += 1
        if self.reads == 2:
            for p in params_of(self.optimizer):
                p.grad = None
            self.seen.append(alive(self.memory))
        return 1e9


@each_size
def test_gradients_that_are_dropped_between_two_calls(size):
    """A small step keeps Python's lock inside its calls; between them anything may run."""
    optimizer, plain = optimizer_of(size), optimizer_of(size)
    warm(optimizer)
    warm(plain)
    memory = watched_grads(optimizer, 5)
    watched_grads(plain, 5)
    optimizer.max_grad_norm, plain.max_grad_norm = DropsTheGradients(optimizer, memory), 1e9
    optimizer.step()
    plain.step()
    assert optimizer.max_grad_norm.seen == [[True] * 3]
    assert alive(memory) == [False] * 3
    assert_same(held(optimizer), held(plain))


@each_size
def test_a_thread_that_drops_the_gradients_between_norm_and_update(size, monkeypatch):
    optimizer, plain = (optimizer_of(size, max_grad_norm=1.0) for _ in range(2))
    warm(optimizer)
    warm(plain)
    memory = watched_grads(optimizer, 5)
    watched_grads(plain, 5)
    seen, grad_stats = [], native_cpu.AdamPlan.grad_stats

    def drop() -> None:
        optimizer.zero_grad()
        seen.append(alive(memory))

    def then_another_thread_runs(*args: Any) -> Any:
        result = grad_stats(*args)
        other = threading.Thread(target=drop)
        other.start()
        other.join()
        return result

    plain.step()
    monkeypatch.setattr(native_cpu.AdamPlan, "grad_stats", then_another_thread_runs)
    optimizer.step()
    assert seen == [[True] * 3]
    assert alive(memory) == [False] * 3
    assert_same(held(optimizer), held(plain))


def test_a_thread_that_drops_the_gradients_while_the_kernel_runs(monkeypatch):
    """The kernel runs without Python's lock: another thread's zero_grad() then frees nothing that it still reads.

    The other thread touches .grad only in that time. Two threads that read and write one parameter's .grad at once
    crash torch by themselves (2.13: a heap corrupted within seconds, without halfstep).
    """
    optimizer, plain = optimizer_of(2**18, count=4), optimizer_of(2**18, count=4)
    update, seen = native_cpu.AdamPlan.update, []

    def update_while_another_thread_drops(*args: Any) -> Any:
        begins = threading.Event()

        def drop() -> None:
            begins.wait()
            optimizer.zero_grad()
            seen.append(alive(memory))

        other = threading.Thread(target=drop)
        other.start()
        begins.set()  # it comes to run once the kernel has let go of Python's lock
        result = update(*args)
        other.join()
        return result

    for t in range(40):
        watched_grads(plain, t)
        plain.step()
        memory = watched_grads(optimizer, t)
        with monkeypatch.context() as patch:
            patch.setattr(native_cpu.AdamPlan, "update", update_while_another_thread_drops)
            optimizer.step()
        assert alive(memory) == [False] * 4
    assert seen == [[True] * 4] * 40
    assert_same(held(optimizer), held(plain))
