"""Times what several providers make of one job: in one process, in shuffled rounds, after checking their results.

A bench hands over `Comparison`s, one at a time, so that the next one's tensors are made after the last one's are gone.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.bench.cases import Case, Flat
from halfstep.bench.clocks import HOST, Clock, Runner, Sample, Timing

PROBE = "bandwidth probe"
FAILED = "FAILED:"  # how the reason begins why a provider that should run is left out
_VISIT_SECONDS = 0.02  # a provider's turn in a round repeats short calls for this long
_MOST_CALLS = 50  # ... but not more often than this


class UnavailableError(Exception):
    """A provider that cannot run here; the text says why."""


class WrongResultError(RuntimeError):
    """A provider computes something else than it should, so its time means nothing."""


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
        memory: whether rows have `extra_bytes`, what one call takes at its worst moment.
        flops: floating-point operations of one call, if rows have `tflops` of the device's own time.
    """

    case: Case
    what: str
    baseline: str
    providers: Sequence[Provider]
    expected: Expected
    check_calls: int = 1
    elements: int | None = None
    memory: bool = False
    flops: float | None = None


def run(
    comparisons: Iterable[Comparison], rounds: int, seed: int = 0, clock: Clock = HOST, go_on: bool = False
) -> Iterator[dict[str, Any]]:
    """Checks and times each comparison; yields its rows (without the facts of machine and run, see machine.py).

    Args:
        go_on: a provider that gives wrong results or runs out of memory is left out and says so in its row, as one that
            is not there. Otherwise WrongResultError, before anything of that comparison is timed.
    """
    for comparison in comparisons:
        yield from _rows_of(comparison, rounds, seed, clock, go_on)


def _rows_of(comparison: Comparison, rounds: int, seed: int, clock: Clock, go_on: bool) -> list[dict[str, Any]]:
    runners, errors, skipped = _checked(comparison, go_on)
    launches = {name: clock.launches(runner) for name, runner in runners.items()}
    extra = {name: clock.extra_bytes(runner) for name, runner in runners.items()} if comparison.memory else {}
    providers, probe_bytes = [*comparison.providers], 0.0
    if comparison.case.bandwidth:
        runners[PROBE] = probe = clock.probe(comparison.case)
        probe_bytes = probe.bytes_moved
        providers.append(Provider(PROBE, lambda: probe, probe_bytes / comparison.case.elements))
    load_before = os.getloadavg()[0]
    timings = measure(runners, rounds, seed, clock)
    load = (round(load_before, 2), round(os.getloadavg()[0], 2))
    rows = []
    for provider in providers:
        rows.append(
            _row(comparison, provider, timings, probe_bytes) | {"error": errors.get(provider.name), "load": load}
        )
        rows[-1] |= {"skipped": skipped.get(provider.name), "launches": launches.get(provider.name)}
        if comparison.memory:
            rows[-1]["extra_bytes"] = extra.get(provider.name)
        if comparison.flops:
            milliseconds = rows[-1]["device_ms"]
            rows[-1]["tflops"] = None if milliseconds is None else comparison.flops / milliseconds / 1e9
    return rows


def _checked(comparison: Comparison, go_on: bool) -> tuple[dict[str, Runner], dict[str, float], dict[str, str]]:
    """(who is ready to be timed, their errors, why the others are not), by the providers' names."""
    runners: dict[str, Runner] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for provider in comparison.providers:
        try:
            runner = provider.make()
            errors[provider.name] = check(comparison, provider, runner)
            runners[provider.name] = runner
        except UnavailableError as reason:
            skipped[provider.name] = str(reason)
        except (WrongResultError, torch.OutOfMemoryError) as failure:
            if not go_on:
                raise
            skipped[provider.name] = f"{FAILED} {str(failure).splitlines()[0]}"
    return runners, errors, skipped


def failed(row: dict[str, Any]) -> bool:
    """True for the row of a provider that should have been timed and could not be."""
    return (row["skipped"] or "").startswith(FAILED)


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
    at_once = comparison.case.at_once
    for begin in range(0, total, at_once):
        expected = (provider.expected or comparison.expected)(begin, min(begin + at_once, total))
        for key, result in results.items():
            truth, allowed = expected[key]
            found = result[begin : begin + at_once].double()
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


def measure(runners: dict[str, Runner], rounds: int, seed: int, clock: Clock = HOST) -> dict[str, Timing]:
    """Every runner has a turn in each round, in an order shuffled anew. Python's collector stays on, as in training."""
    calls = {}
    for name, runner in runners.items():
        seconds = clock.time(runner).wall
        calls[name] = max(1, min(_MOST_CALLS, math.ceil(_VISIT_SECONDS / seconds)))
    samples: dict[str, list[Sample]] = {name: [] for name in runners}
    order = list(runners)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            samples[name] += (clock.time(runners[name]) for _ in range(calls[name]))
    return {name: Timing.of(taken) for name, taken in samples.items()}


def _row(
    comparison: Comparison, provider: Provider, timings: dict[str, Timing], probe_bytes: float = 0.0
) -> dict[str, Any]:
    """The figures of one provider; those that do not apply are None. One call of the probe moves `probe_bytes`."""
    case = comparison.case
    row: dict[str, Any] = {
        "case": case.name, "tensors": len(case.shapes), "elements": case.elements, "what": comparison.what,
        "provider": provider.name, "baseline": comparison.baseline, "calls": 0,
        "bytes_per_element": provider.bytes_per_element,
        **dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "cpu_ms", "cpu_per_wall", "speedup", "gb_per_s", "of_probe")),
        **dict.fromkeys(("device_ms", "host_us", "host_busy_us")),
    }  # fmt: skip
    timing = timings.get(provider.name)
    if timing is None:
        return row
    p20, median, p80 = quantiles(timing.wall, (0.2, 0.5, 0.8))
    row |= {"calls": len(timing.wall), "median_ms": median * 1e3, "p20_ms": p20 * 1e3, "p80_ms": p80 * 1e3}
    row["cpu_ms"] = quantiles(timing.cpu, (0.5,))[0] * 1e3
    row["cpu_per_wall"] = sum(timing.cpu) / sum(timing.wall)
    for field, values, unit in (
        ("device_ms", timing.device, 1e3), ("host_us", timing.host, 1e6), ("host_busy_us", timing.host_busy, 1e6),
    ):  # fmt: skip
        row[field] = quantiles(values, (0.5,))[0] * unit if values else None
    if comparison.baseline in timings and provider.name != PROBE:
        row["speedup"] = quantiles(timings[comparison.baseline].wall, (0.5,))[0] / median
    if provider.bytes_per_element is not None and PROBE in timings:
        speed = provider.bytes_per_element * case.elements / median
        row["gb_per_s"] = speed / 1e9
        row["of_probe"] = speed / (probe_bytes / quantiles(timings[PROBE].wall, (0.5,))[0])
    return row


def quantiles(values: Sequence[float], at: Sequence[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor(at, dtype=torch.float64)).tolist()
