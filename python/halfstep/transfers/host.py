"""Transfers of a device that is not there: tensors on the host stand for its memory.

What the streams of copies are given happens later: some of it at random, in each stream's order, the rest when somebody
waits for it. Until then the destination holds NaNs (bytes of 0xFF). Operators run at once, on `current()`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .host_buffers import HostBuffers
from .races import Clock, Memories, Watch

_POISON = 0xFF  # NaN in every floating dtype, -1 in integers


class HostStream:
    """What it was given, in order. A stream of operators (`lazy=False`) has done everything that it was given."""

    def __init__(self, name: str, lazy: bool) -> None:
        self.name, self.lazy = name, lazy
        self.clock: Clock = {self: 1}  # of each stream, how much comes before what this one is given next
        self.steps: deque[Callable[[], None]] = deque()
        self.finished = 1  # as the own clock counts
        self.kept: list[torch.UntypedStorage] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def given(self) -> int:
        return self.clock[self]

    def add(self, step: Callable[[], None] | None) -> int:
        """Returns the step's number."""
        self.clock[self] += 1
        if step is None:
            self.finished += 1
        else:
            self.steps.append(step)
        return self.given

    def run_one(self) -> None:
        self.steps.popleft()()
        self.finished += 1
        if not self.steps:
            self.kept.clear()

    def run_to(self, number: int) -> None:
        while self.finished < number:
            self.run_one()


@dataclass(frozen=True)
class HostEvent:
    stream: HostStream
    clock: Clock

    @property
    def number(self) -> int:
        return self.clock[self.stream]


class HostTransfers:
    """As `Transfers`.

    A copy that does not wait for who wrote what it reads, or for who uses what it writes, raises RuntimeError, and so
    does one from or into memory that was freed too early. Inside `with transfers.watch():` operators are held to the
    same rules; outside they find NaNs where a copy is yet to happen. `finish()` at the end.

    Args:
        seed: of the random times. The same seed and calls, the same times.

    Example:
        >>> import torch
        >>> from halfstep.transfers.host import HostTransfers
        >>> device = HostTransfers(seed=0)
        >>> x, copy = device.empty(4).fill_(7), torch.zeros(4, dtype=torch.uint8)
        >>> device.wait(device.outgoing, device.record(device.current()))
        >>> device.copy_(device.outgoing, copy, x)
        >>> device.synchronize(device.record(device.outgoing))
        >>> copy.tolist()
        [7, 7, 7, 7]
    """

    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.outgoing = HostStream("the outgoing stream", lazy=True)
        self.incoming = HostStream("the incoming stream", lazy=True)
        self._current = HostStream("the operators' stream", lazy=False)
        self._memories = Memories()
        self._went_wrong = ""
        self.copying = False
        self.buffers = HostBuffers(self)

    def current(self) -> HostStream:
        return self._current

    def other(self) -> HostStream:
        """Another stream of operators, for `on`."""
        return HostStream("another stream of operators", lazy=False)

    @contextmanager
    def on(self, stream: HostStream) -> Iterator[None]:
        """Inside, operators run on this stream, as far as order is concerned."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def watch(self) -> Watch:
        """Inside `with transfers.watch():` an operator raises RuntimeError that does not wait for a copy."""
        return Watch(self, self._memories)

    def record(self, stream: HostStream) -> HostEvent:
        self._go_on()
        return HostEvent(stream, dict(stream.clock))

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        self._go_on()
        for other, number in event.clock.items():
            if other is not stream:
                stream.clock[other] = max(stream.clock.get(other, 0), number)
        if stream.lazy:
            stream.add(lambda: event.stream.run_to(event.number))
        else:
            event.stream.run_to(event.number)

    def copy_(self, stream: HostStream, dst: Tensor, src: Tensor) -> None:
        self._go_on()
        if dst.shape != src.shape or dst.dtype != torch.uint8 or src.dtype != torch.uint8 or dst.dim() != 1:
            raise TypeError(
                f"copy_ expects flat uint8 tensors of one length, got {dst.dtype} {tuple(dst.shape)} and "
                f"{src.dtype} {tuple(src.shape)}; pass the bytes: t.view(torch.uint8)"
            )
        for tensor, writes in ((src, False), (dst, True)):
            self._memories.check(tensor, stream, writes, unknown_by=self._current)
        for earlier in self._memories.of(dst).users():  # which this copy comes after
            earlier.stream.run_to(earlier.number)
        self._unwatched(lambda: dst.fill_(_POISON))
        number = stream.add(self._step(dst, src))
        self._memories.of(src).use(stream, number, writes=False)
        self._memories.of(dst).use(stream, number, writes=True)

    def keep(self, tensor: Tensor, stream: HostStream) -> None:
        if stream.lazy and stream.steps:
            stream.kept.append(tensor.untyped_storage())
        self._memories.of(tensor).kept_for.add(stream)

    def done(self, event: HostEvent) -> bool:
        self._go_on()
        if event.stream.finished < event.number:
            return False
        self._memories.see(event.clock)
        return True

    def synchronize(self, event: HostEvent) -> None:
        event.stream.run_to(event.number)
        self._memories.see(event.clock)

    def finish(self) -> None:
        """Everything happens that is left to do. RuntimeError if something went wrong where nobody could see it: an
        error at a copy that happens to be made while Python frees an object goes no further."""
        for stream in (self.outgoing, self.incoming):
            stream.run_to(stream.given)
        if self._went_wrong:
            raise RuntimeError(self._went_wrong)

    def empty(self, nbytes: int) -> Tensor:
        memory = torch.full((nbytes,), _POISON, dtype=torch.uint8, device="cpu")
        self._memories.of(memory).made_on(self._current, self._current.add(None))
        return memory

    def pin(self, memory: Tensor) -> str | None:
        return None

    @staticmethod
    def unpin(memory: Tensor) -> None:
        pass

    def _go_on(self) -> None:
        """Time passes: some of the copies happen."""
        streams = [stream for stream in (self.outgoing, self.incoming) if stream.steps]
        while streams and self._random.random() < 0.3:
            stream = self._random.choice(streams)
            stream.run_one()
            streams = [stream for stream in streams if stream.steps]

    def _step(self, dst: Tensor, src: Tensor) -> Callable[[], None]:
        """The copy, which does not hold the memory."""
        places = [(StorageWeakRef(t.untyped_storage()), int(t.storage_offset()), t.shape) for t in (dst, src)]

        def run() -> None:
            to, source = (_alive(*place) for place in places)
            if to is None or source is None:
                does = "write" if to is None else "read"
                self._went_wrong = (
                    f"a copy was still to {does} memory that has been freed; hold it until the copy is done or the "
                    "memory's stream waits for it, or keep() it for the copy's stream"
                )
                raise RuntimeError(self._went_wrong)
            self._unwatched(lambda: to.copy_(source))

        return run

    def _unwatched(self, work: Callable[[], Any]) -> None:
        before, self.copying = self.copying, True
        try:
            work()
        finally:
            self.copying = before


def _alive(ref: StorageWeakRef, offset: int, shape: torch.Size) -> Tensor | None:
    # torch has no public way from a weak reference to a storage
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    if storage is None:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, shape, (1,))  # type: ignore[call-overload]
