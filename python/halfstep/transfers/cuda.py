"""Transfers of a CUDA (or ROCm) device."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .host_buffers import HostBuffers


class CudaTransfers:
    """As `Transfers`, with torch.cuda's streams and events.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = HostBuffers(self)

    @cached_property
    def outgoing(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @cached_property
    def incoming(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy_(self, stream: torch.cuda.Stream, dst: Tensor, src: Tensor) -> None:
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pin(self, memory: Tensor) -> str | None:
        """Registers the memory with the driver as it is. (torch's pin_memory() rounds up to a power of two.)"""
        runtime: Any = torch.cuda.cudart()
        portable = 1  # cudaHostRegisterPortable: pinned for every device
        with torch.cuda.device(self.device):
            error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)
            if error == runtime.cudaError.success:
                return None
            self._clear_error()
        return f"the driver refused to pin {memory.nbytes:,} bytes (CUDA error {int(error)})"

    def _clear_error(self) -> None:
        """The runtime remembers a failed call until somebody asks, and torch asks after each launch: it would raise
        the refusal in place of the next operator, whose work is done all the same."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            pass

    @staticmethod
    def unpin(memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(memory.data_ptr())
