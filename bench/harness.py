"""Times what several providers make of one job: in one process, in shuffled rounds, after checking their results.

A bench hands over `Comparison`s, one at a time, so that the next one's tensors are made after the last one's are gone.
"""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.bench.cases import AT_ONCE, Case, Flat
from halfstep.ops import backend

PROBE = "bandwidth probe"
PROBE_BYTES = 28  # per element, Adam's float32 traffic: p, m, v read and written, g read
_VISIT_SECONDS = 0.02  # a provider's turn in a round repeats short calls for this long
_MOST_CALLS = 50  # ... but not more often than this


class UnavailableError(Exception):
    """A provider that cannot run here; the text says why."""


class WrongResultError(RuntimeError):
    """A provider computes something else than it should, so its time means nothing."""


class Runner(ABC):
    """One provider at work on its own tensors."""

    @abstractmethod
    def __call__(self) -> None:
        """The job, once."""

    @abstractmethod
    def results(self) -> dict[str, Sequence[Tensor]]:
        """Everything the job has written, by the names the comparison's `expected` uses."""

    def prepare(self) -> None:  # noqa: B027  most jobs have nothing to put back
        """Runs before every call, not timed: puts back what the call uses up."""


# (begin, end) -> {result name: (true values, allowed absolute error)} for those elements of the results laid end to end
Expected = Callable[[int, int], dict[str, tuple[Tensor, Tensor]]]


class Provider(NamedTuple):
    name: str
    make: Callable[[], Runner]  # may raise UnavailableError
    bytes_per_element: float | None  # what the job must move at least; None where bytes are not the point
    expected: Expected | None = None  # where it differs from the comparison's


@dataclass(frozen=True)
class Comparison:
    """One job and those who do it.

    Args:
        baseline: the provider that the ratios are against.
        expected: in float64, after `check_calls` calls.
        elements: of each result; the case's own unless said.
    """

    case: Case
    what: str
    baseline: str
    providers: Sequence[Provider]
    expected: Expected
    check_calls: int = 1
    elements: int | None = None


class Timing(NamedTuple):
    wall: list[float]  # seconds of each call
    cpu: list[float]  # the same, summed over all threads of the process


class Probe(Runner):
    """What this machine's memory can do: Adam's traffic with three additions for arithmetic."""

    def __init__(self, elements: int):
        self._kernels: Any = backend.native_cpu_module()[0]
        # Not zeros: the kernel would map their untouched pages to one, and reading it costs nothing.
        self._buffers = [torch.full((elements,), 0.5**24) for _ in "pgmv"]

    def __call__(self) -> None:
        addresses = [b.data_ptr() for b in self._buffers]
        self._kernels.probe_(*addresses, n=self._buffers[0].numel(), threads=torch.get_num_threads(), isa="")

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {}


def run(comparisons: Iterable[Comparison], rounds: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Checks and times each comparison; yields its rows (without the facts of machine and run, see machine.py).

    Raises WrongResultError before anything of that comparison is timed.
    """
    for comparison in comparisons:
        yield from _rows_of(comparison, rounds, seed)


def _rows_of(comparison: Comparison, rounds: int, seed: int) -> list[dict[str, Any]]:
    runners: dict[str, Runner] = {}
    skipped: dict[str, str] = {}
    errors: dict[str, float] = {}
    for provider in comparison.providers:
        try:
            runners[provider.name] = provider.make()
        except UnavailableError as reason:
            skipped[provider.name] = str(reason)
            continue
        errors[provider.name] = check(comparison, provider, runners[provider.name])
    if comparison.case.bandwidth:
        runners[PROBE] = Probe(comparison.case.elements)
    load_before = os.getloadavg()[0]
    timings = measure(runners, rounds, seed)
    load = (round(load_before, 2), round(os.getloadavg()[0], 2))
    providers = [*comparison.providers]
    if PROBE in runners:
        providers.append(Provider(PROBE, lambda: runners[PROBE], PROBE_BYTES))
    rows = []
    for provider in providers:
        rows.append(_row(comparison, provider, timings) | {"error": errors.get(provider.name), "load": load})
        rows[-1]["skipped"] = skipped.get(provider.name)
    return rows


def check(comparison: Comparison, provider: Provider, runner: Runner) -> float:
    """Calls the runner `check_calls` times and compares all it wrote; returns the largest error / allowed error."""
    for _ in range(comparison.check_calls):
        runner.prepare()
        runner()
    results = {key: Flat(tensors) for key, tensors in runner.results().items()}
    total = comparison.case.elements if comparison.elements is None else comparison.elements
    for key, result in results.items():
        if len(result) != total:
            raise WrongResultError(f"{provider.name}: {key} has {len(result)} elements, expected {total}")
    worst = 0.0
    for begin in range(0, total, AT_ONCE):
        expected = (provider.expected or comparison.expected)(begin, min(begin + AT_ONCE, total))
        for key, result in results.items():
            truth, allowed = expected[key]
            found = result[begin : begin + AT_ONCE].double()
            error = (found - truth).abs()
            wrong = ~(error <= allowed)  # this way round, NaN is wrong
            if wrong.any():
                i = int(wrong.nonzero()[0])
                raise WrongResultError(
                    f"{comparison.case.name}, {comparison.what}: {provider.name} gives {key}[{begin + i}] = "
                    f"{found[i].item()!r}, expected {truth[i].item()!r} +- {allowed[i].item():.3g}; so it was not timed"
                )
            worst = max(worst, (error / allowed).nan_to_num(0.0).max().item())
    return worst


def measure(runners: dict[str, Runner], rounds: int, seed: int) -> dict[str, Timing]:
    """Every runner has a turn in each round, in an order shuffled anew. Python's collector stays on, as in training."""
    calls = {}
    for name, runner in runners.items():
        seconds = _timed(runner)[0]
        calls[name] = max(1, min(_MOST_CALLS, math.ceil(_VISIT_SECONDS / seconds)))
    timings = {name: Timing([], []) for name in runners}
    order = list(runners)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            for _ in range(calls[name]):
                wall, cpu = _timed(runners[name])
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    return timings


def _timed(runner: Runner) -> tuple[float, float]:
    runner.prepare()
    cpu, wall = time.process_time(), time.perf_counter()
    runner()
    wall = time.perf_counter() - wall
    return wall, time.process_time() - cpu


def _row(comparison: Comparison, provider: Provider, timings: dict[str, Timing]) -> dict[str, Any]:
    """The figures of one provider; those that do not apply are None."""
    case = comparison.case
    row: dict[str, Any] = {
        "case": case.name, "tensors": len(case.shapes), "elements": case.elements, "what": comparison.what,
        "provider": provider.name, "baseline": comparison.baseline, "calls": 0,
        "bytes_per_element": provider.bytes_per_element,
        **dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "cpu_ms", "cpu_per_wall", "speedup", "gb_per_s", "of_probe")),
    }  # fmt: skip
    timing = timings.get(provider.name)
    if timing is None:
        return row
    p20, median, p80 = quantiles(timing.wall, (0.2, 0.5, 0.8))
    row |= {"calls": len(timing.wall), "median_ms": median * 1e3, "p20_ms": p20 * 1e3, "p80_ms": p80 * 1e3}
    row["cpu_ms"] = quantiles(timing.cpu, (0.5,))[0] * 1e3
    row["cpu_per_wall"] = sum(timing.cpu) / sum(timing.wall)
    if comparison.baseline in timings and provider.name != PROBE:
        row["speedup"] = quantiles(timings[comparison.baseline].wall, (0.5,))[0] / median
    if provider.bytes_per_element is not None and PROBE in timings:
        speed = provider.bytes_per_element * case.elements / median
        row["gb_per_s"] = speed / 1e9
        row["of_probe"] = speed / (PROBE_BYTES * case.elements / quantiles(timings[PROBE].wall, (0.5,))[0])
    return row


def quantiles(values: Sequence[float], at: Sequence[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor(at, dtype=torch.float64)).tolist()
