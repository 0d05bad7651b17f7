"""Host memory that copies from and to a device may use: of exact size, pinned, used again."""

from __future__ import annotations

import mmap
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import finalize

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import Event, Stream, Transfers

PAGE = mmap.PAGESIZE  # bytes: memory is pinned page by page, and no page may be pinned twice


class HostBuffer:
    """`memory` is whole pages, or less of the last one; its first bytes are used."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last_use: Event | None = None


class HostBuffers:
    """A device's pool. Pinning takes some milliseconds for 10 MB, so memory goes round instead of back.

    Together, used and free, the buffers never take more than were in use at the worst moment so far: what fits no
    request any longer, as when the length of batches changes, makes room for what does.

    Args:
        transfers: whose streams use the buffers.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        # For whoever moves the device's memory: one lock, because the garbage collector may free what was moved, in any
        # thread, inside of what holds it. Reentrant for the same reason.
        self.lock = threading.RLock()
        self._returned: deque[tuple[HostBuffer, Event | None]] = deque()
        self._free: list[HostBuffer] = []  # the one that was given back first comes first
        self._refused = False
        self._used = 0
        self._most_used = 0
        self._pinned: dict[int, Tensor] = {}
        # unpin() knows no transfers, which know their buffers and would live as long as this
        unpinning = finalize(self, _unpin_all, transfers.unpin, self._pinned)
        unpinning.atexit = False  # then the system does it, and a forked process must not

    @property
    def used_bytes(self) -> int:
        with self.lock:
            self._collect()
            return self._used

    @property
    def free_bytes(self) -> int:
        with self.lock:
            self._collect()
            return sum(buffer.memory.nbytes for buffer in self._free)

    def take(self, nbytes: int, stream: Stream) -> HostBuffer:
        """A buffer of at least so many bytes, an eighth more at most, that the stream may write from now on."""
        with self.lock:
            self._collect()
            found = self._fitting(nbytes)
            buffer = found or HostBuffer(self._pages(nbytes))
            self._used += buffer.memory.nbytes
            self._most_used = max(self._most_used, self._used)
            self._make_room()
            if found is None:
                self._pin(buffer)
            elif found.last_use is not None:
                self._transfers.wait(stream, found.last_use)
                found.last_use = None
            return buffer

    def give(self, buffer: HostBuffer, last_use: Event | None) -> None:
        """Takes the buffer back; the event is behind the last copy that reads or writes it.

        From any thread and at any time: also where the garbage collector runs inside of one of the other methods.
        """
        self._returned.append((buffer, last_use))

    def _collect(self) -> None:
        while self._returned:
            buffer, buffer.last_use = self._returned.popleft()
            self._used -= buffer.memory.nbytes
            self._free.append(buffer)

    def _fitting(self, nbytes: int) -> HostBuffer | None:
        fitting = [b for b in self._free if nbytes <= b.memory.nbytes <= nbytes + nbytes // 8]
        if not fitting:
            return None
        best = min(fitting, key=lambda buffer: buffer.memory.nbytes)
        self._free.remove(best)
        return best

    def _make_room(self) -> None:
        free = sum(buffer.memory.nbytes for buffer in self._free)
        while self._free and self._used + free > self._most_used:
            oldest = self._free.pop(0)
            free -= oldest.memory.nbytes
            if oldest.last_use is not None:  # a copy must not go on in memory that is somebody else's by then
                self._transfers.synchronize(oldest.last_use)
            memory = self._pinned.pop(oldest.memory.data_ptr(), None)
            if memory is not None:
                self._transfers.unpin(memory)

    def _pages(self, nbytes: int) -> Tensor:
        """Memory that begins with a page of its own and shares none."""
        try:
            memory = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(
                f"the host has no {nbytes:,} bytes of memory for what {self._transfers.device} moves there, beside "
                f"{self._used:,} in use; move less (smaller batches, checkpoint), or give the job more memory"
            ) from error
        start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]

    def _pin(self, buffer: HostBuffer) -> None:
        if self._refused:  # what the system did not allow once costs time at each try
            return
        why_not = self._transfers.pin(buffer.memory)
        if why_not is None:
            self._pinned[buffer.memory.data_ptr()] = buffer.memory
            return
        self._refused = True
        warnings.warn(
            f"Host memory stays unpinned: {why_not}. Everything is computed as before, but copies between "
            f"{self._transfers.device} and the host no longer run beside the work there. Allow more locked memory "
            "(`ulimit -l`, or --ulimit memlock=-1 of a container), or move less to the host.",
            stacklevel=3,
        )


def _unpin_all(unpin: Callable[[Tensor], None], pinned: dict[int, Tensor]) -> None:
    for memory in pinned.values():
        unpin(memory)
