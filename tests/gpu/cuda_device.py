"""What the tests in this folder do with a GPU, in one place: streams, graphs, waits, memory, launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from device_mirror import Mirror
from emulated_cuda import EmulatedBackend
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from halfstep.ops import backend

_PAUSE = 20_000_000  # clock cycles: some 10 ms


class CudaDevice:
    many_steps = 100  # until what gathers shows

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profiled = False

    @property
    def others(self) -> list[torch.device]:
        """Further GPUs."""
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != self.device.index]

    def used(self) -> Any:
        """Inside, tensors of the device take the CUDA kernels: here they do anyway."""
        return nullcontext()

    def mirror(self) -> Mirror:
        """The kernels for tensors on the host, with guards around their scratch memory."""
        return Mirror(EmulatedBackend(backend.native_cuda_module()[0]), self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """RuntimeError where torch waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Inside, a stream of its own, with work in front that takes a while; ordered with the work outside."""
        outside, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_PAUSE)
            yield
        outside.wait_stream(stream)

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Records the work in a CUDA graph, without doing it; the result does it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def allocated(self) -> int:
        """Bytes that tensors occupy."""
        self.synchronize()
        return torch.cuda.memory_allocated(self.device)

    def peak_of(self, work: Callable[[], Any]) -> int:
        """Bytes that the work takes on top, at its worst moment."""
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    @contextmanager
    def launches(self) -> Iterator[list[str]]:
        """Afterwards the list holds the names of halfstep's kernels that ran inside."""
        if not self._profiled:  # the first session starts the tracer, which may miss what comes at once
            with profile(activities=[ProfilerActivity.CUDA]):
                torch.ones(1, device=self.device)
                self.synchronize()
            self._profiled = True
        made: list[str] = []
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield made
            self.synchronize()
        made.extend(kernels(profiler.events(), DeviceType.CUDA))


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")  # said at the first use
        torch.cuda.set_sync_debug_mode(mode)


def kernels(events: Any, where: DeviceType) -> list[str]:
    """halfstep's own among the events of a profile, by their namespace."""
    return [event.name for event in events if event.device_type == where and "halfstep" in event.name]
