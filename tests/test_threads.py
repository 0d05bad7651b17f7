"""torch.set_num_threads() holds for every native call: the number arrives, and that many threads run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep import _cpu
from halfstep.ops import native_cpu


@pytest.fixture(autouse=True)
def torch_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Together more than one unit of 64K elements; each tensor alone is too small for torch to use a second thread on it, so
# what starts one is halfstep.
TENSORS, SIZE = 160, 1024


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [ordinary(SIZE, dtype, seed) for seed in range(TENSORS)]


def step(method: str) -> Callable[[], object]:
    """A step that needs both of a plan's calls; the first one, which makes the states, has happened."""
    params = [Parameter(t) for t in tensors(BFLOAT16)]
    for p in params:
        p.grad = p.detach().clone()
    optimizer = hs.AdamW(params, max_grad_norm=1.0 if method == "grad_stats" else None, skip_nonfinite=False)
    optimizer.step()
    return optimizer.step


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "AdamPlan.grad_stats": lambda: step("grad_stats"),
    "AdamPlan.update": lambda: step("update"),
    "grad_stats": lambda: partial(hs.grad_stats, tensors(FLOAT32)),
    "sums_of_squares": lambda: partial(hs.l2_norms, tensors(FLOAT32)),
    "accumulate_": lambda: partial(hs.accumulate_, tensors(FLOAT32), tensors(BFLOAT16)),
    "scale_": lambda: partial(hs.unscale_, tensors(FLOAT32), 0.5, torch.zeros(())),
    "cast_": lambda: partial(hs.cast_, tensors(BFLOAT16), tensors(FLOAT32)),
}


class Recording:
    """halfstep._cpu, or one of its plans; notes the thread number of every call that has one."""

    def __init__(self, target: Any, seen: dict[str, set[int]], prefix: str = "") -> None:
        self._target, self._seen, self._prefix = target, seen, prefix

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._target, attribute)

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = self._prefix + attribute
            if name == "AdamPlan":
                return Recording(found(*args), self._seen, "AdamPlan.")
            if name in CALLS:
                *_, threads, _isa = args
                self._seen.setdefault(name, set()).add(threads)
            return found(*args, **kwargs)

        return call


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_given_torchs_number(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {}
    monkeypatch.setattr(native_cpu, "_native", lambda: Recording(_cpu, seen))
    call = CALLS[name]()
    seen.clear()
    torch.set_num_threads(threads)
    call()
    assert name in seen
    assert all(numbers == {threads} for numbers in seen.values()), seen


def threads_started_by(call: Callable[[], object]) -> int:
    """How many threads a call starts when made from a new thread, which has no OpenMP team yet."""
    started: list[int] = []

    def count() -> None:
        before = set(os.listdir("/proc/self/task"))
        call()
        started.append(len(set(os.listdir("/proc/self/task")) - before))

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return started[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_that_many_threads_run(name: str, threads: int) -> None:
    torch.set_num_threads(1)
    call = CALLS[name]()
    torch.set_num_threads(threads)
    assert threads_started_by(call) == threads - 1
