"""Who used which memory last, and who comes after whom: what does not wait for a copy is found, whatever its timing.

Each stream counts what it was given and knows of every other how much of that comes before its own next step (vector
clocks). A step races with an earlier one of another stream, one of the two writing, if it does not know of it.

Source: Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .host import HostStream, HostTransfers

_aten = torch.ops.aten
_TOUCHES_NOTHING = {_aten.set_, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}

Clock = dict[Any, int]  # stream -> number of a step


@dataclass(frozen=True)
class Use:
    stream: HostStream
    number: int


@dataclass
class Memory:
    """One storage."""

    ref: StorageWeakRef
    writer: Use | None = None
    readers: dict[HostStream, Use] = field(default_factory=dict)  # since it was written
    home: HostStream | None = None  # the stream that was current when it was made
    kept_for: set[HostStream] = field(default_factory=set)

    def users(self) -> list[Use]:
        return [*self.readers.values(), *([self.writer] if self.writer else [])]

    def made_on(self, stream: HostStream, number: int) -> None:
        self.home = stream
        self.use(stream, number, writes=True)

    def use(self, stream: HostStream, number: int, *, writes: bool) -> None:
        if writes:
            self.writer, self.readers = Use(stream, number), {}
        else:
            self.readers[stream] = Use(stream, number)

    def check(self, stream: HostStream, writes: bool, seen: Clock) -> None:
        """RuntimeError if the stream does not wait for those whose use is in the way of this one.

        Args: seen: what the host has seen done: whatever it gives to a stream now comes after that.
        """
        for use in self.users() if writes else self.users()[len(self.readers) :]:
            known = max(stream.clock.get(use.stream, 0), seen.get(use.stream, 0))
            if use.stream is not stream and known < use.number:
                did, does = ("writes" if use is self.writer else "reads"), ("writes" if writes else "reads")
                raise RuntimeError(
                    f"{stream} {does} memory that {use.stream} {did}, and does not wait for it: "
                    "wait(stream, record(other)) between the two"
                )
        if not stream.lazy and self.home not in (None, stream) and stream not in self.kept_for:
            raise RuntimeError(
                f"{stream} uses memory of {self.home}, which may be given away while it does: keep(tensor, stream)"
            )


class Memories:
    """By storage, so long as it lives. An address is not used again while there is a weak reference."""

    def __init__(self) -> None:
        self.seen: Clock = {}
        self._known: dict[int, Memory] = {}
        self._prune_at = 1000

    def check(self, tensor: Tensor, stream: HostStream, writes: bool, unknown_by: HostStream | None = None) -> None:
        self.of(tensor, unknown_by).check(stream, writes, self.seen)

    def see(self, clock: Clock) -> None:
        """The host has seen this done."""
        self.seen = {s: max(self.seen.get(s, 0), clock.get(s, 0)) for s in {*self.seen, *clock}}

    def of(self, tensor: Tensor, unknown_by: HostStream | None = None) -> Memory:
        """Args: unknown_by: who is taken for the writer, just now, of memory that is seen for the first time."""
        ref = StorageWeakRef(tensor.untyped_storage())
        if ref.cdata not in self._known:
            if len(self._known) >= self._prune_at:
                self._known = {key: memory for key, memory in self._known.items() if not memory.ref.expired()}
                self._prune_at = 2 * len(self._known) + 1000
            self._known[ref.cdata] = Memory(ref)
            if unknown_by is not None:
                self._known[ref.cdata].use(unknown_by, unknown_by.given, writes=True)
        return self._known[ref.cdata]


class Watch(TorchDispatchMode):
    """Checks what each operator reads and writes; it runs on the current stream."""

    def __init__(self, transfers: HostTransfers, memories: Memories) -> None:
        super().__init__()
        self._transfers, self._memories = transfers, memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._transfers.copying or _only_looks(func):
            return func(*args, **kwargs)
        stream = self._transfers.current()
        number = stream.add(None)
        written = _written(func, args, kwargs)
        for tensor in _tensors((args, kwargs)):
            self._memories.check(tensor, stream, id(tensor) in written)
            self._memories.of(tensor).use(stream, number, writes=id(tensor) in written)
        results = func(*args, **kwargs)
        given = {id(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(results):
            if id(tensor) not in given:
                self._memories.of(tensor).use(stream, number, writes=True)
        return results


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The ids of the tensors among the arguments that the operator writes."""
    values = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {id(tensor) for name in writes for tensor in _tensors(values.get(name))}


def _only_looks(func: Any) -> bool:
    """Views of what is there, another storage for a tensor, and memory that is not filled touch no bytes."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or func.overloadpacket in _TOUCHES_NOTHING


def _tensors(values: Any) -> Iterable[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.layout is torch.strided]
