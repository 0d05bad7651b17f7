"""What the blocks of one forward do: operators in order, their FLOPs and results, and what autograd would keep of them.

Recorded while every block only keeps its inputs, so that recording needs the least memory there is. Everything is a
function of shapes: no times, no waits for a device.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import kept
from .measure import bytes_moved, flops, plain_tensors, storages

OperatorKey = tuple[Any, int]  # as kept.py counts: the operator, and which of its calls in the block


@dataclass(frozen=True)
class Operator:
    """One call of an operator that makes new storages or costs something."""

    key: OperatorKey
    name: str  # as in torch.ops.aten, without the overload
    flops: int
    moved: int  # bytes read and written
    made: tuple[int, ...]  # numbers of the new storages of its results
    keepable: bool


@dataclass
class BlockCall:
    """One forward of one block. Storages are numbered throughout the model's forward."""

    name: str
    inputs: frozenset[int]
    saved: set[int] = field(default_factory=set)  # what autograd keeps if there is no checkpoint
    operators: list[Operator] = field(default_factory=list)
    last: int = 0  # how many of `operators` a recomputation runs: it stops when it has all that was saved

    def rerun(self) -> list[Operator]:
        return self.operators[: self.last]


class Storages:
    """Numbers for the storages of one forward, and their sizes. Those of parameters, buffers and the model's own
    inputs live anyway: their number is None."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.sizes: list[int] = []
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int | None] = weakref.WeakKeyDictionary()
        self.leave_out([*model.parameters(), *model.buffers(), inputs])

    def leave_out(self, tree: Any) -> None:
        for storage in storages(tree):
            self._numbers[storage] = None

    def number(self, storage: torch.UntypedStorage) -> int | None:
        if storage not in self._numbers:
            self._numbers[storage] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return self._numbers[storage]

    def numbers(self, tree: Any) -> set[int]:
        found = (self.number(storage) for storage in storages(tree))
        return {number for number in found if number is not None and self.sizes[number]}

    def new_numbers(self, tree: Any) -> set[int]:
        """Of those that were not seen before."""
        return self.numbers([t for t in plain_tensors(tree) if not self._seen(t)])

    def _seen(self, tensor: Tensor) -> bool:
        return tensor.layout is not torch.strided or tensor.untyped_storage() in self._numbers


class Recording(TorchDispatchMode):
    """Around the forward of one block: fills a BlockCall."""

    supports_higher_order_operators = True  # flex_attention, and others that take functions

    def __init__(self, name: str, block: nn.Module, inputs: Any, known: Storages) -> None:
        super().__init__()
        known.leave_out([*block.parameters(), *block.buffers()])  # FSDP gathers a block's parameters for its forward
        self.known = known
        self.call = BlockCall(name, frozenset(known.numbers(inputs)))
        self._calls: dict[Any, int] = defaultdict(int)
        self._written: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the contexts in kept.py: functions that are compiled by themselves stay so inside a block."""
        return True

    def __enter__(self) -> Recording:
        self._watching = kept.saved_tensors_seen(self._saved)
        self._watching.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.__exit__(*error)
        written = self._written
        self.call.operators = [
            o if written.isdisjoint(o.made) else Operator(o.key, o.name, o.flops, o.moved, o.made, keepable=False)
            for o in self.call.operators
        ]

    def _saved(self, tensor: Tensor) -> None:
        self.call.last = len(self.call.operators)
        if isinstance(tensor, nn.Parameter):
            self.known.leave_out(tensor)
        self.call.saved |= self.known.numbers(tensor)

    @kept.untraced
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kept.is_bookkeeping():
            return op(*args, **kwargs)
        self.known.leave_out([t for t in args if isinstance(t, nn.Parameter)])
        self.known.numbers((args, kwargs))  # what is new to us now is not made here
        result = op(*args, **kwargs)
        made = tuple(sorted(self.known.new_numbers(result)))
        writes = kept.writes(op)
        if writes:
            self._written |= self.known.numbers(list(_written(op, args, kwargs)))
        counted = not kept.uncounted(op, args)
        if made or writes:
            cost = (flops(op, args, kwargs, result), bytes_moved(op, args, kwargs, result))
            keepable = counted and bool(made) and not writes
            self.call.operators.append(Operator((op, self._calls[op]), _name(op), *cost, made, keepable))
        self._calls[op] += counted
        return result


def _name(op: Any) -> str:
    return str(getattr(op, "__name__", op)).split(".")[0]


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that an operator writes into."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
