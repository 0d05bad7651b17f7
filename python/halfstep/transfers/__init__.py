"""Copies between a device and the host that run beside its work: streams, events, host memory.

What moves data while something else computes is written against `Transfers` alone, and runs with either of

- `CudaTransfers`: streams and events of torch.cuda, pinned memory;
- `HostTransfers`: tensors on the host in place of a device's, copies that happen later, and an error or NaNs where
  something does not wait for them.

The order between two streams is nobody's but the caller's: what one stream wrote, another may touch after
`wait(other, record(one))`. The device's own work goes on `current()`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .host_buffers import HostBuffers

Stream = Any  # of the implementation: a queue of work, in order
Event = Any  # of the implementation: a point in a stream's work

__all__ = ["Event", "Stream", "Transfers", "transfers_of"]


class Transfers(Protocol):
    """One device's copies. Nothing here waits on the host, but for `synchronize`.

    `outgoing` and `incoming` are the two streams that copies to the host and back belong on: links are duplex.
    """

    device: torch.device
    buffers: HostBuffers

    @property
    def outgoing(self) -> Stream: ...

    @property
    def incoming(self) -> Stream: ...

    def current(self) -> Stream:
        """Where the caller's operators run."""
        ...

    def record(self, stream: Stream) -> Event:
        """The end of what the stream has been given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on starts after the event."""
        ...

    def copy_(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        """Queues the copy of a flat uint8 tensor; it holds neither tensor, which the caller must until it is done."""
        ...

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor's device memory is given to nobody else before the stream has done what it will have been given
        when the tensor dies. For memory that another stream than `stream` was current for when it was made."""
        ...

    def done(self, event: Event) -> bool:
        """True if it has been reached; asks, without waiting."""
        ...

    def synchronize(self, event: Event) -> None:
        """The host waits for the event."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, uint8, which belongs to `current()`."""
        ...

    def pin(self, memory: Tensor) -> str | None:
        """Makes host memory one that copies run beside the host from and to; or says why that cannot be."""
        ...

    @staticmethod
    def unpin(memory: Tensor) -> None: ...


_made: dict[torch.device, Transfers] = {}
_making = threading.Lock()


def transfers_of(device: torch.device) -> Transfers | None:
    """The device's transfers, the same ones at each call, or None if there are none for its kind (the host itself)."""
    if device.type != "cuda":
        return None
    if device not in _made:
        from .cuda import CudaTransfers

        with _making:
            _made.setdefault(device, CudaTransfers(device))
    return _made[device]
