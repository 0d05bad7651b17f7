"""The CUDA backend under the host emulator: the same kernels, launchers and bindings on CPU tensors.

What the kernels get as scratch memory is filled with NaN patterns and guarded on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from emulated_builds import load

from halfstep.ops.native_cuda import CudaBackend, Workspace

_MARGIN, _GUARD = 256, 0xFF

ASCENDING, DESCENDING, SHUFFLED = (
    (0, 0),
    (1, 0),
    (2, 7),
)  # which of a block's threads, and of a grid's blocks, comes first
ORDERS = [ASCENDING, DESCENDING, SHUFFLED]
ORDER_IDS = ["ascending", "descending", "shuffled"]


class GuardedWorkspace(Workspace):
    def allocate(self, size: int) -> int:
        if size == 0:
            return super().allocate(size)  # torch has no address for nothing: a null pointer
        buffer = torch.full((_MARGIN + size + _MARGIN,), _GUARD, dtype=torch.uint8, device=self._device)
        self._kept.append(buffer)
        return buffer.data_ptr() + _MARGIN

    def __exit__(self, *_: object) -> None:
        for buffer in self._kept:
            for margin in (buffer[:_MARGIN], buffer[-_MARGIN:]):
                assert bool((margin == _GUARD).all()), "a kernel wrote beside its workspace"
        super().__exit__()


class EmulatedBackend(CudaBackend):
    def workspace(self, device: torch.device) -> Workspace:
        return GuardedWorkspace(device)


class ZeroWorkspace(Workspace):
    """What a block that does not run would leave: a sum of 0, no value that is not finite."""

    def allocate(self, size: int) -> int:
        self._kept.append(torch.zeros(size, dtype=torch.uint8))
        return self._kept[-1].data_ptr()


class EndsOnly(EmulatedBackend):
    def workspace(self, device: torch.device) -> Workspace:
        return ZeroWorkspace(device)


@cache
def emulated() -> EmulatedBackend:
    return EmulatedBackend(load())


@contextmanager
def ordered(order: tuple[int, int]) -> Iterator[None]:
    """Threads and blocks run in this order: (mode, seed)."""
    module = emulated().module
    module.set_order(*order)
    try:
        yield
    finally:
        module.set_order(*ASCENDING)


@contextmanager
def ends_only(blocks: int) -> Iterator[EmulatedBackend]:
    """A backend of which only so many blocks at each end of a grid run."""
    emulated().module.set_ends_only(blocks)
    try:
        yield EndsOnly(emulated().module)
    finally:
        emulated().module.reset_machine()


@contextmanager
def launches() -> Iterator[list[Any]]:
    """Afterwards the list holds the launches that were made inside."""
    module, made = emulated().module, []
    module.reset_launches()
    yield made
    made.extend(module.launches())
