"""Python threads beside the native calls: the GIL is free while kernels run, and two calls at once do not mix."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_all_same_bits
from conditions import Conditions
from optimizer_runs import assert_same, held
from torch.nn import Parameter

import halfstep as hs
from halfstep import _cpu
from halfstep.ops import lists, native_cpu

# A call takes a twentieth of a second at least: time enough for another thread to wake up in on a busy machine
SIZE, TIMES = 2**20, 512


@pytest.fixture
def nobody_is_preempted() -> Iterator[None]:
    """Python never takes the GIL from a running thread: another one can run only if it is let go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


def plan_call(method: str) -> Callable[[], object]:
    """A long list out of one small row, again and again (one thread works on it)."""
    p, g, m, v, step = torch.ones(SIZE), torch.ones(SIZE), torch.zeros(SIZE), torch.zeros(SIZE), torch.tensor(0)
    zeros = [0] * TIMES
    plan = _cpu.AdamPlan([SIZE] * TIMES, zeros, zeros, zeros, zeros, zeros)
    columns = [[t.data_ptr()] * TIMES for t in (p, m, v, step)]
    plan.set_tensors(*columns[:3], zeros, zeros, zeros, columns[3])
    plan.set_grads([g.data_ptr()] * TIMES, zeros)
    keep = (p, g, m, v, step)
    group = (1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    arguments = {"grad_stats": (1.0,), "update": ([group], 1.0, 0, False, True)}[method]
    return lambda: (keep, getattr(plan, method)(*arguments, 1, "baseline"))


LISTS = ("grad_stats", "scale_", "cast_", "sums_of_squares", "accumulate_")


def list_call(name: str) -> Callable[[], object]:
    x, y, sums = torch.ones(SIZE), torch.ones(SIZE), torch.empty(TIMES, dtype=torch.float64)
    first, second, sizes, float32 = ([value] * TIMES for value in (x.data_ptr(), y.data_ptr(), SIZE, 0))
    arguments = {
        "grad_stats": (first, sizes, float32, 1.0),
        "scale_": (first, sizes, float32, 1.0),
        "cast_": (first, float32, second, float32, sizes, False, 0),
        "sums_of_squares": (first, sizes, float32, sums.data_ptr(), TIMES),
        "accumulate_": (first, float32, second, float32, sizes),
    }[name]
    return lambda: (x, y, sums, getattr(_cpu, name)(*arguments, 1, "baseline"))


def probe_call() -> Callable[[], object]:
    x = torch.zeros(64 * SIZE)
    return lambda: _cpu.probe_(*[x.data_ptr()] * 4, x.numel(), 1, "baseline")


CALLS = {
    "AdamPlan.update": lambda: plan_call("update"),
    "AdamPlan.grad_stats": lambda: plan_call("grad_stats"),
    **{name: lambda name=name: list_call(name) for name in LISTS},
    "probe_": probe_call,
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
@pytest.mark.usefixtures("nobody_is_preempted")
def test_another_thread_runs_during_a_call(make):
    """The other thread wakes up before the call, cannot get the GIL, and gets it when the call lets it go."""
    call = make()
    wake, ran = threading.Event(), []
    other = threading.Thread(target=lambda: (wake.wait(), ran.append(True)))
    other.start()
    wake.set()
    before = list(ran)
    call()
    during = list(ran)
    other.join()
    assert (before, during) == ([], [True])


def test_a_table_keeps_its_tensors_alive_whatever_becomes_of_the_list():
    tensors = [torch.zeros(3) for _ in range(4)]
    alive = [weakref.ref(t) for t in tensors]
    table = _cpu.read_list(native_cpu.tensor_reader(), tensors)
    tensors.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del table
    assert all(ref() is None for ref in alive)


def cast_to(dst: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], object]:
    return lambda given: native_cpu.cast_(lists.read(dst) or [], lists.read(given) or [], stochastic=False, seed=0)


def accumulate_into(dst: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], object]:
    return lambda given: native_cpu.accumulate_(lists.read(dst) or [], lists.read(given) or [])


# Nothing in them lets go of the GIL before the list is read
LIST_CALLS = {
    "grad_stats": lambda: hs.grad_stats,
    "l2_norms": lambda: hs.l2_norms,
    "accumulate_": lambda: accumulate_into([torch.ones(SIZE)] * TIMES),
    "unscale_": lambda: lambda given: native_cpu.unscale_(lists.read(given) or [], torch.tensor(1.0)),
    "cast_": lambda: cast_to([torch.ones(SIZE, dtype=BFLOAT16)] * TIMES),
}


@pytest.mark.parametrize("make", LIST_CALLS.values(), ids=LIST_CALLS)
@pytest.mark.usefixtures("nobody_is_preempted")
def test_another_thread_empties_the_list_during_a_call(make):
    """It gets the GIL when the kernels let it go, and drops the last reference that anybody but the call has."""
    call, given = make(), [torch.ones(SIZE)] * TIMES
    alive, seen, wake = weakref.ref(given[0]), [], threading.Event()

    def empty() -> None:
        wake.wait()
        given.clear()
        seen.append(alive() is not None)

    other = threading.Thread(target=empty)
    other.start()
    wake.set()
    with Conditions("baseline", 1).hold():
        call(given)
    during = list(seen)
    other.join()
    assert (during, alive()) == ([True], None)


def test_a_list_that_another_thread_changes_all_the_time():
    """Each call sees one state of it, and all tensors that come and go are ones: the squares are whole numbers."""
    shared, stop = [torch.ones(64)], threading.Event()

    def change() -> None:
        while not stop.is_set():
            shared[:] = [torch.ones(64) for _ in range(len(shared) % 200 + 1)]
            shared.append(torch.ones(64))

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        squares = [hs.grad_stats(shared)[0].item() ** 2 / 64 for _ in range(300)]
        stop.set()
        changing.result()
    assert squares == pytest.approx([round(s) for s in squares])
    assert 1 <= min(squares) < max(squares) < 202


def train(seed: int) -> hs.AdamW:
    weights = [
        Parameter(ordinary(n, dtype, seed)) for n, dtype in ((70001, BFLOAT16), (513, FLOAT32), (40000, BFLOAT16))
    ]
    optimizer = hs.AdamW(weights, lr=0.1, max_grad_norm=1.0, state_dtype=BFLOAT16)
    for t in range(5):
        for p in weights:
            p.grad = ordinary(p.numel(), p.dtype, 100 * seed + t)
        optimizer.step()
    return optimizer


def convert(seed: int) -> list[torch.Tensor]:
    src = [ordinary(n, FLOAT32, seed) for n in (70001, 3, 40000)]
    dst = [torch.empty(s.shape, dtype=BFLOAT16) for s in src]
    for _ in range(5):
        hs.cast_(dst, src, rounding="stochastic", seed=seed)
        hs.unscale_(src, 0.5, torch.zeros(()))
        hs.accumulate_(src, dst)
    return [*dst, *src, *hs.grad_stats(src), *hs.l2_norms(dst)]


def test_two_threads_at_once_get_what_each_gets_alone():
    """More Python threads than cores, each with an OpenMP team of its own."""
    with Conditions("", 2).hold(), ThreadPoolExecutor(4) as pool:
        trained = [pool.submit(train, seed) for seed in (1, 2, 3)]
        converted = [pool.submit(convert, seed) for seed in (4, 5, 6)]
        for seed, result in zip((1, 2, 3), trained, strict=True):
            assert_same(held(result.result()), held(train(seed)))
        for seed, result in zip((4, 5, 6), converted, strict=True):
            assert_all_same_bits(result.result(), convert(seed), f"seed {seed}")
