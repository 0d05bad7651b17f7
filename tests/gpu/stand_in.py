"""The CPU in the place of a GPU (`pytest tests/gpu --stand-in`): CUDA kernels emulated, or Triton's interpreted if
TRITON_INTERPRET=1; nothing is asynchronous.

It runs the tests of this folder where there is no GPU, so that what they say is known to be right before one is there.
What only a GPU can tell (order on streams, real captures, real waits) it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import emulated_cuda
import torch
from device_mirror import Mirror
from no_sync import forbid_waits

import halfstep as hs
from halfstep.ops import backend, triton_gpu
from halfstep.ops.native_cuda import CudaBackend


class StandIn:
    """As CudaDevice."""

    many_steps, many_tensors, large = 3, 1000, 2**17 + 5
    compiles = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.others = [torch.device("cpu")]

    def shapes(self, wanted: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return list(wanted)

    def synchronize(self) -> None:
        pass

    def no_waits(self) -> Any:
        return forbid_waits()

    def side_stream(self) -> Any:
        return nullcontext()

    def unordered_stream(self) -> Any:
        return nullcontext()

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        return work

    def allocated(self) -> int:
        return 0

    def peak_of(self, work: Callable[[], Any]) -> int:
        with hs.measure_activations() as seen:
            work()
        return seen.peak

    def free_bytes(self) -> int:
        return 2**40


def instead(kernels: Any) -> Any:
    """As backend.override, but without its counting, which is another backend each time: plans would be made anew."""
    return mock.patch.object(backend, "_override", kernels)


class Emulated(StandIn):
    name = "native"

    def used(self) -> Any:
        return instead(unguarded())

    def mirror(self) -> Mirror:
        return Mirror(emulated_cuda.emulated(), self.device)

    @contextmanager
    def launches(self) -> Iterator[list[str]]:
        made: list[str] = []
        with emulated_cuda.launches() as emulated:
            yield made
        made.extend(str(launch) for launch in emulated)


@cache
def unguarded() -> CudaBackend:
    """Without guards around its scratch memory: whoever looks at them reads, which `no_waits` takes for a wait."""
    return CudaBackend(emulated_cuda.emulated().module)


class Interpreted(StandIn):
    name = "triton"
    many_tensors, large = 20, 2**12 + 5  # 1,024 elements take the interpreter some 40 ms

    def used(self) -> Any:
        return instead(triton_gpu.of_device(self.device))

    def mirror(self) -> Mirror:
        return Mirror(triton_gpu.of_device(self.device), self.device)

    def shapes(self, wanted: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """So much of the first dimension that there is a whole block and a rest."""
        return [
            (min(shape[0], max(1, 1100 // max(1, math.prod(shape[1:])))), *shape[1:]) if shape else ()
            for shape in wanted
        ]

    @contextmanager
    def launches(self) -> Iterator[list[str]]:
        from triton.runtime.interpreter import GridExecutor

        made: list[str] = []
        call = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **options: Any) -> None:
            made.append(executor.fn.__name__)
            call(executor, *args, **options)

        with mock.patch.object(GridExecutor, "__call__", counted):
            yield made
