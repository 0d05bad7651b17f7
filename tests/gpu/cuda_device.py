"""What the tests in this folder do with a GPU, in one place: streams, graphs, waits, memory, launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from device_mirror import Mirror
from emulated_cuda import EmulatedBackend
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from halfstep.ops import backend, triton_attention, triton_gpu, triton_plan

_PAUSE = 20_000_000  # clock cycles: some 10 ms


class CudaDevice:
    """Args: name: the backend whose kernels are used, "native" or "triton"."""

    many_steps, many_tensors = 100, 1000  # until what gathers shows
    large = 2**31 + 5  # elements, which 32 bits do not count
    compiles = True

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name = device, name
        self._profiled = False

    @property
    def others(self) -> list[torch.device]:
        """Further GPUs."""
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != self.device.index]

    def used(self) -> Any:
        """Inside, a GPU's tensors take this backend's kernels: native ones are the usual choice, Triton's come next."""
        if self.name == "native":
            return nullcontext()
        return mock.patch.object(backend, "_native_for_cuda", return_value=(None, "set aside by a test"))

    def mirror(self) -> Mirror:
        """The kernels for tensors on the host, the native ones with guards around their scratch memory."""
        if self.name == "triton":
            return Mirror(triton_gpu.of_device(self.device), self.device)
        return Mirror(EmulatedBackend(backend.native_cuda_module()[0]), self.device)

    def shapes(self, wanted: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """For a test's tensors: the wanted ones, or less of them where a kernel takes long."""
        return list(wanted)

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

    @contextmanager
    def unordered_stream(self) -> Iterator[None]:
        """Inside, a stream that waits for no other; at the end the host waits for it."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

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
    """halfstep's own among the events of a profile: by their namespace, or Triton's by their names."""
    return [e.name for e in events if e.device_type == where and ("halfstep" in e.name or e.name in triton_kernels())]


@cache
def triton_kernels() -> frozenset[str]:
    if not triton_gpu.installed():
        return frozenset()
    families = triton_plan.kernels(), triton_attention.kernels()
    files = [found for family in families for found in vars(family).values() if isinstance(found, ModuleType)]
    return frozenset(name for file in files for name in vars(file) if name.endswith("_kernel"))
