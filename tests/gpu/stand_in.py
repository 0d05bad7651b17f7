"""The CPU in the place of a GPU (`pytest tests/gpu --stand-in`): the emulated kernels, and nothing is asynchronous.

It runs the tests of this folder where there is no GPU, so that what they say is known to be right before one is there.
What only a GPU can tell (order on streams, real captures, real waits) it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import emulated_cuda
import torch
from allocations import Allocations
from device_mirror import Mirror
from no_sync import forbid_waits

from halfstep.ops import backend
from halfstep.ops.native_cuda import CudaBackend


class StandIn:
    """As CudaDevice."""

    many_steps = 3

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.others = [torch.device("cpu")]

    def used(self) -> Any:
        return backend.override(unguarded())

    def mirror(self) -> Mirror:
        return Mirror(emulated_cuda.emulated(), self.device)

    def synchronize(self) -> None:
        pass

    def no_waits(self) -> Any:
        return forbid_waits()

    def side_stream(self) -> Any:
        return nullcontext()

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        return work

    def allocated(self) -> int:
        return 0

    def peak_of(self, work: Callable[[], Any]) -> int:
        with Allocations() as seen:
            work()
        return seen.peak

    def free_bytes(self) -> int:
        return 0

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
