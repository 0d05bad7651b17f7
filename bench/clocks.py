"""How calls are timed, and the memory's speed that they are compared with. GPUs: gpu_clock.py."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.bench.cases import Case
from halfstep.ops import backend

PROBE_BYTES = 28  # per element, Adam's float32 traffic: p, m, v read and written, g read


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


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float  # until the job is done
    cpu: float  # of all threads of the process
    # on a GPU; None elsewhere
    device: float | None = None  # of the GPU alone, with the whole job queued before it begins
    host: float | None = None  # until the call returns, the GPU idle before
    host_busy: float | None = None  # until the call returns, the GPU busy before


class Timing(NamedTuple):
    """The samples of one provider, by field."""

    wall: Sequence[float]
    cpu: Sequence[float]
    device: Sequence[float] = ()
    host: Sequence[float] = ()
    host_busy: Sequence[float] = ()

    @staticmethod
    def of(samples: Sequence[Sample]) -> Timing:
        return Timing(*([value for value in field if value is not None] for field in zip(*samples, strict=True)))


class Probe(Runner):
    """The memory's speed: a job that does as little as possible but move bytes. `bytes_moved`: by one call."""

    bytes_moved: int


class Clock(ABC):
    """How calls are timed on one kind of device, and what they are compared with."""

    @abstractmethod
    def time(self, runner: Runner) -> Sample:
        """One call; what it needs before is prepared outside the clock."""

    @abstractmethod
    def probe(self, case: Case) -> Probe: ...

    @abstractmethod
    def extra_bytes(self, runner: Runner) -> int:
        """Of tensors, at the worst moment of one call, beside those that were there before."""

    def launches(self, runner: Runner) -> int | None:
        """Kernels that one call starts; None where that means nothing."""
        return None


class HostClock(Clock):
    """For what is done when the call returns."""

    def time(self, runner: Runner) -> Sample:
        runner.prepare()
        cpu, wall = time.process_time(), time.perf_counter()
        runner()
        wall = time.perf_counter() - wall
        return Sample(wall, time.process_time() - cpu)

    def probe(self, case: Case) -> Probe:
        return AdamProbe(case.elements)

    def extra_bytes(self, runner: Runner) -> int:
        """Every allocation of torch's is counted, those inside of its kernels, too."""
        runner.prepare()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            runner()
        inner: Any = profiler.profiler
        changes = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return max(0, *accumulate(event.nbytes() for event in changes))


class AdamProbe(Probe):
    """Adam's traffic with three additions for arithmetic."""

    def __init__(self, elements: int):
        self.bytes_moved = PROBE_BYTES * elements
        self._kernels: Any = backend.native_cpu_module()[0]
        # Not zeros: the kernel would map their untouched pages to one, and reading it costs nothing.
        self._buffers = [torch.full((elements,), 0.5**24) for _ in "pgmv"]

    def __call__(self) -> None:
        addresses = [b.data_ptr() for b in self._buffers]
        self._kernels.probe_(*addresses, n=self._buffers[0].numel(), threads=torch.get_num_threads(), isa="")

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {}


HOST = HostClock()
