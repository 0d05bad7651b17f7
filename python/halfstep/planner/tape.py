"""A block of a model as a list of operators: what autograd keeps of it, and how high memory rises on both ways.

Every tensor has a size in bytes and a part of the model it belongs to. Autograd keeps what an operator's backward needs
(`saves`); everything else is freed as soon as no later operator reads it. Views are the tensor that they look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TEMPORARIES = "temporaries"
GRADIENTS = "gradients"


@dataclass(frozen=True)
class Value:
    """A tensor between two operators. `key` tells it from others of the same tape."""

    key: int
    part: str
    elements: int
    item: int  # bytes of an element

    @property
    def size(self) -> int:
        return self.elements * self.item


@dataclass(frozen=True)
class Op:
    inputs: tuple[Value, ...]
    output: Value
    saves: tuple[Value, ...]  # may hold values that are neither input nor output (statistics, masks)
    weight: int  # bytes of the gradients of its weights
    kept: bool  # policy "selective" keeps its results
    hidden: int  # bytes that its backward needs besides the gradients of inputs and weights
    adds: bool  # hands the gradient of its output to its inputs as it is


@dataclass
class Tape:
    """Operators in the order of the forward. What the first one reads is the block's input."""

    ops: list[Op] = field(default_factory=list)
    values: int = 0

    def value(self, part: str, elements: int, item: int = 1) -> Value:
        self.values += 1
        return Value(self.values, part, elements, item)

    def op(
        self, part: str, inputs: Value | Sequence[Value], elements: int, item: int, saves: Iterable[Value] = (), *,
        save_output: bool = False, extra: Iterable[int] = (), weight: int = 0, kept: bool = False,
        hidden: int = 0, adds: bool = False,
    ) -> Value:  # fmt: skip
        """Appends an operator and returns its output. `extra`: bytes of tensors that are made for backward alone."""
        inputs = (inputs,) if isinstance(inputs, Value) else tuple(inputs)
        output = self.value(part, elements, item)
        kept_for_backward = list(saves)
        kept_for_backward += [output] if save_output else []
        kept_for_backward += [self.value(part, each) for each in extra if each]
        self.ops.append(Op(inputs, output, tuple(kept_for_backward), weight, kept, hidden, adds))
        return output

    # ---- what is kept ------------------------------------------------------------------------------------------------
    @property
    def entry(self) -> frozenset[Value]:
        return frozenset(self.ops[0].inputs)

    @property
    def exit(self) -> Value:
        return self.ops[-1].output

    def saved(self) -> frozenset[Value]:
        """What autograd keeps from forward to backward."""
        return frozenset(value for op in self.ops for value in op.saves)

    def kept_results(self) -> frozenset[Value]:
        """Results of products and attention that a recomputation gets to. It ends with the last tensor that is saved:
        of the last operator that saves only inputs, it needs no result."""
        last = max((number for number, op in enumerate(self.ops) if op.saves), default=-1)
        made = set(self.entry)
        kept: set[Value] = set()
        for number, op in enumerate(self.ops[: last + 1]):
            if op.kept and (number < last or op.output in op.saves):
                kept |= {op.output, *op.saves} - made
            made |= {op.output, *op.saves}
        return frozenset(kept)

    # ---- how high memory rises ---------------------------------------------------------------------------------------
    def forward(self, pinned: frozenset[Value], present: frozenset[Value] = frozenset()) -> int:
        """Highest sum of bytes while the forward runs: its input, `pinned` values from when they are made, `present`
        ones from the start."""
        last_use = {value: number for number, op in enumerate(self.ops) for value in op.inputs}
        last_use[self.exit] = len(self.ops)
        live = set(self.entry | present)
        peak = 0
        for number, op in enumerate(self.ops):
            live |= {op.output, *op.saves}
            peak = max(peak, sum(value.size for value in live))
            live = {v for v in live if v in pinned or v in present or last_use.get(v, -1) > number}
        return peak

    def backward(self, held: frozenset[Value]) -> list[Counter[str]]:
        """Bytes by part at each operator of the backward, when it has allocated its results and freed nothing yet:
        saved tensors and `held` ones, which stay to the end, under their parts; gradients of activations as
        TEMPORARIES, of weights as GRADIENTS."""
        saved = self.saved()
        users = Counter(value for op in self.ops for value in set(op.saves))
        live = Counter(by_part(saved | held))
        grads = {self.exit: [self.exit]}  # by value, the tensors that its gradient stands in; sums share them
        weights = 0
        moments = []
        for op in reversed(self.ops):
            if op.output not in grads:  # made from what needs no gradient
                continue
            arrived = grads[op.output]
            new = {value: arrived if op.adds else [value] for value in op.inputs if value.size}
            weights += op.weight
            moment = Counter(live)
            # A second gradient of one tensor is added to the first one, and freed.
            there = {id(tensors): tensors for tensors in [*grads.values(), *new.values()]}
            moment[TEMPORARIES] = op.hidden + sum(value.size for tensors in there.values() for value in tensors)
            moment[GRADIENTS] = weights
            moments.append(moment)
            del grads[op.output]
            grads.update({value: tensors for value, tensors in new.items() if value not in grads})
            for value in set(op.saves):
                users[value] -= 1
                if not users[value] and value not in held:
                    live[value.part] -= value.size
        return moments


def by_part(values: Iterable[Value]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for value in values:
        sums[value.part] += value.size
    return dict(sums)
