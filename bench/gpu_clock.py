"""Times on a CUDA device: by its own events, with the host's share beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from halfstep.bench.cases import Case
from halfstep.bench.clocks import Clock, Probe, Runner, Sample

_FASTEST_CLOCK = 2.2e9  # cycles a second that no GPU of today exceeds by much: a pause is never too short
_PROBE_BYTES = 2**31  # of each of the two buffers
_NO_KERNEL = ("Memcpy", "Memset", "Optimizer.", "ProfilerStep")  # what else a profile shows on the device


class CudaClock(Clock):
    """Each call is timed twice: on an idle device, as its user sees it, and behind work that keeps the device busy
    until the host has queued all of the job, which gives the device's own time and the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, runner: Runner) -> Sample:
        runner.prepare()
        cpu = time.process_time()
        wall, host = self._between_events(runner, 0.0)
        cpu = time.process_time() - cpu
        runner.prepare()
        device, host_busy = self._between_events(runner, 2 * host + 1e-4)
        return Sample(wall, cpu, device, host, host_busy)

    def _between_events(self, runner: Runner, pause: float) -> tuple[float, float]:
        """Seconds (on the device, until the call returned), behind a pause of so many seconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        if pause:
            torch.cuda._sleep(int(pause * _FASTEST_CLOCK))
        begin.record()
        host = time.perf_counter()
        runner()
        host = time.perf_counter() - host
        end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end) / 1e3, host

    def extra_bytes(self, runner: Runner) -> int:
        runner.prepare()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        runner()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def launches(self, runner: Runner) -> int:
        runner.prepare()
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            runner()
            torch.cuda.synchronize(self._device)
        names = [event.name for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
        return sum(not name.startswith(_NO_KERNEL) for name in names)

    def probe(self, case: Case) -> Probe:
        torch.cuda.empty_cache()  # of the jobs before
        return CopyProbe(self._device, min(_PROBE_BYTES, math.ceil(torch.cuda.mem_get_info(self._device)[0] / 8)))


class CopyProbe(Probe):
    """A copy from device memory to device memory, of the same size for every case: the caches hold little of it."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.bytes_moved = 2 * size
        self._buffers = [torch.ones(size // 4, device=device) for _ in range(2)]

    def __call__(self) -> None:
        self._buffers[0].copy_(self._buffers[1])

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {}
