"""The memory that one forward pass saves for backward: on its way to the host, there, and on its way back.

Where it is, and what must not happen before what:

    here       `source` holds the device's memory; nothing is copied yet
    leaving    the outgoing stream copies it, after the stream it was made on; then `source` is let go: once the host
               has seen the copy done, or once the memory's stream waits for it, before somebody else gets the memory
    away       in `buffer` alone
    back       in `back`, new memory of the current stream, which the incoming stream writes after what that stream
               was given before (the memory was in use there) and after the outgoing copy; who asks waits for that copy
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from ..transfers import Event, Stream, Transfers
    from ..transfers.host_buffers import HostBuffer


@dataclass(frozen=True)
class Limits:
    """Bytes of device memory; see offload_activations."""

    keep_last: int
    in_flight: int
    prefetch: int


@dataclass
class Counts:
    """What one context has moved, on one device."""

    bytes: int = 0
    storages: int = 0
    fetched_bytes: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0


class Stored:
    """One storage, as it was at one version. Who saved it holds it; when nobody does, its memory goes back."""

    def __init__(self, tape: Tape, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tape = tape
        self.position = 0  # in the tape's order
        self.nbytes = storage.nbytes()
        self.identity = StorageWeakRef(storage)  # holds the address, so that no other storage gets it
        self.home: Stream = tape.transfers.current()
        self.source: Tensor | None = _bytes_of(storage, tensor.device)
        self.left: Event | None = None
        self.buffer: HostBuffer | None = None
        self.back: Tensor | None = None
        self.arrived: Event | None = None
        self.times_back = 0
        self.asked_for = False  # since it came back
        self.users: WeakSet[Any] = WeakSet()
        self.waiting: WeakSet[Any] = WeakSet()  # users that have not asked for it since it came back

    def leave(self) -> None:
        transfers, counts = self.tape.transfers, self.tape.counts
        assert self.source is not None
        produced = transfers.record(self.home)
        transfers.wait(transfers.outgoing, produced)
        self.buffer = transfers.buffers.take(self.nbytes, transfers.outgoing)
        transfers.copy_(transfers.outgoing, self.buffer.memory[: self.nbytes], self.source)
        self.left = transfers.record(transfers.outgoing)
        counts.storages += 1
        counts.bytes += self.nbytes
        counts.in_flight += self.nbytes
        counts.peak_in_flight = max(counts.peak_in_flight, counts.in_flight)

    def let_go(self, *, done: bool) -> None:
        """Gives the device's memory back; if the copy may not be done yet, whoever gets it next comes after it."""
        if self.source is None or self.left is None:
            return
        if not done:
            self.tape.transfers.wait(self.home, self.left)
        self.source = None
        self.tape.counts.in_flight -= self.nbytes

    def come_back(self) -> None:
        transfers = self.tape.transfers
        assert self.buffer is not None
        self.home = transfers.current()
        self.back = transfers.empty(self.nbytes)
        transfers.wait(transfers.incoming, transfers.record(self.home))
        transfers.wait(transfers.incoming, self.left)
        transfers.copy_(transfers.incoming, self.back, self.buffer.memory[: self.nbytes])
        self.arrived = transfers.record(transfers.incoming)
        self.times_back += 1
        self.asked_for = False
        self.waiting = WeakSet(self.users)
        self.tape.ahead += self.nbytes
        self.tape.counts.fetched_bytes += self.nbytes

    def memory(self, user: Any) -> Tensor:
        """The bytes on the device, for work on the current stream."""
        transfers = self.tape.transfers
        if self.source is not None:
            return self.source
        if self.back is None:
            self.come_back()
        here = self.back
        assert here is not None
        transfers.wait(transfers.current(), self.arrived)
        transfers.keep(here, transfers.current())
        self._was_asked_for()
        self.waiting.discard(user)
        if not self.waiting:  # a graph that is retained must not retain this
            self.back = None
        return here

    def _was_asked_for(self) -> None:
        if self.back is not None and not self.asked_for:
            self.asked_for = True
            self.tape.ahead -= self.nbytes

    def __del__(self) -> None:
        transfers = self.tape.transfers
        with self.tape.lock:
            self.let_go(done=False)
            if self.back is not None and not self.asked_for:  # fetched ahead of a backward pass that went no further
                transfers.wait(self.home, self.arrived)
                self._was_asked_for()
            if self.buffer is not None:
                transfers.buffers.give(self.buffer, self.arrived or self.left)


class Tape:
    """What one entry of the context saved on one device, in order. Whoever calls it holds its lock."""

    def __init__(self, transfers: Transfers, limits: Limits, counts: Counts) -> None:
        self.transfers, self.limits, self.counts = transfers, limits, counts
        self.lock = transfers.buffers.lock
        self.order: list[ref[Stored]] = []
        self._prune_at = 100
        self.ahead = 0  # bytes that came back and nobody has asked for yet
        self._known: WeakValueDictionary[tuple[int, int | None], Stored] = WeakValueDictionary()
        self._here: deque[tuple[ref[Stored], int]] = deque()
        self._here_bytes = 0
        self._leaving: deque[ref[Stored]] = deque()

    def store(self, tensor: Tensor, version: int) -> Stored:
        """Once for all tensors that share the storage at this version; the last ones stored stay for a while."""
        key = (StorageWeakRef(tensor.untyped_storage()).cdata, version)
        found = self._known.get(key)
        if found is not None:
            return found
        stored = self._known[key] = Stored(self, tensor)
        self._append(stored)
        self._here.append((ref(stored), stored.nbytes))
        self._here_bytes += stored.nbytes
        while self._here_bytes > self.limits.keep_last:
            oldest, nbytes = self._here.popleft()
            self._here_bytes -= nbytes
            leaving = oldest()
            if leaving is not None:
                self._make_way(leaving.nbytes)
                leaving.leave()
                self._leaving.append(oldest)
        return stored

    def _append(self, stored: Stored) -> None:
        if len(self.order) >= self._prune_at:  # the context may be open for a whole loop of steps
            alive = [(entry, found) for entry in self.order if (found := entry()) is not None]
            for position, (_, found) in enumerate(alive):
                found.position = position
            self.order = [entry for entry, _ in alive]
            self._prune_at = 2 * len(alive) + 100
        stored.position = len(self.order)
        self.order.append(ref(stored))

    def memory(self, stored: Stored, user: Any) -> Tensor:
        """The stored bytes on the device; the copies of what was stored before them begin."""
        self.let_go_of_done()
        memory = stored.memory(user)
        position = stored.position
        while position > 0 and self.ahead < self.limits.prefetch:
            position -= 1
            wanted = self.order[position]()
            # Those that were asked for in this pass still live until their operator is done
            if wanted is not None and wanted.source is None and wanted.times_back < max(1, stored.times_back):
                wanted.come_back()
        return memory

    def let_go_of_done(self) -> None:
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None and oldest.source is not None:
                if not self.transfers.done(oldest.left):
                    break
                oldest.let_go(done=True)
            self._leaving.popleft()

    def _make_way(self, nbytes: int) -> None:
        """So that not more is in flight than the limit; the device waits for that, not the host."""
        self.let_go_of_done()
        while self._leaving and self.counts.in_flight + nbytes > self.limits.in_flight:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.let_go(done=False)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
