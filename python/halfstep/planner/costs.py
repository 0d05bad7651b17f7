"""What the blocks of a model keep and how high they rise, whichever way it is known: from a shape or by measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .ends import embedding_tape, head_tape, input_bytes, shared_bytes
from .job import Job
from .layers import Layers
from .model import ModelShape
from .tape import GRADIENTS, TEMPORARIES, Tape, Value, by_part

Bytes = Mapping[str, int]


def add(*parts: Bytes) -> dict[str, int]:
    sums: dict[str, int] = {}
    for one in parts:
        for part, size in one.items():
            sums[part] = sums.get(part, 0) + size
    return sums


def times(count: int, parts: Bytes) -> dict[str, int]:
    return {part: count * size for part, size in parts.items()}


def highest(moments: Iterable[Bytes]) -> Bytes:
    return max(moments, key=lambda parts: sum(parts.values()))


@dataclass(frozen=True)
class BlockCost:
    """One block, for one micro-batch. Moments are bytes by part while its backward runs: GRADIENTS are those of its own
    weights so far, TEMPORARIES those of activations. A recomputation is the first moment."""

    kept: Bytes  # from forward to backward
    forward_peak: int  # the highest sum of bytes while its forward runs, its input included
    moments: tuple[Bytes, ...]
    output: int  # bytes of its result, and of the gradient that its backward starts with
    movable: Bytes  # of what is kept, what hs.offload_activations moves: not the results that a policy keeps

    @cached_property
    def forward(self) -> Bytes:
        """The highest moment of the forward: everything kept, the rest as TEMPORARIES."""
        return add(self.kept, {TEMPORARIES: max(self.forward_peak - sum(self.kept.values()), 0)})

    @cached_property
    def making(self) -> Bytes:
        """The highest moment of a backward that makes the gradients of weights."""
        return highest(self.moments)

    @cached_property
    def adding(self) -> Bytes:
        """... that adds every gradient to one that is there, or uses it up, as soon as it is made."""
        moments, before = [], 0
        for moment in self.moments:
            new = moment[GRADIENTS] - before
            before = moment[GRADIENTS]
            moments.append({**moment, GRADIENTS: 0, TEMPORARIES: moment[TEMPORARIES] + new})
        return highest(moments)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of all its weights."""
        return self.moments[-1][GRADIENTS]


@dataclass(frozen=True)
class Costs:
    layer: BlockCost
    head: BlockCost  # final norm, logits and loss
    embedding: BlockCost
    shared: int  # what all layers share
    inputs: int  # token ids; 0 where they are among the rest


def block_cost(tape: Tape, recompute: str = "none") -> BlockCost:
    saved, held = tape.saved(), frozenset[Value]()
    kept = moved = saved
    if recompute == "attention":
        # The scores come back in the middle of the backward; they are counted from its start.
        kept = moved = frozenset(value for value in saved if value.part != "scores")
    elif recompute != "none":
        moved = tape.entry
        kept = held = tape.entry | (tape.kept_results() if recompute == "selective" else frozenset())
    moments = tape.backward(held)
    if held:
        again = Counter(by_part(held))
        # The recomputation runs beside the gradient of the block's output.
        again[TEMPORARIES] = tape.forward(saved | held, held) - sum(again.values()) + tape.exit.size
        again[GRADIENTS] = 0
        moments = [again, *moments]
    return BlockCost(by_part(kept), tape.forward(kept), _frozen(moments), tape.exit.size, by_part(moved))


def _frozen(moments: list[Counter[str]]) -> tuple[Bytes, ...]:
    return tuple(dict(moment) for moment in moments)


@lru_cache(maxsize=4096)
def costs_of_blocks(model: ModelShape, blocks: Job) -> Costs:
    """`blocks`: a Job's `.blocks`."""
    return Costs(
        block_cost(Layers(model, blocks).layer(), blocks.recompute),
        block_cost(head_tape(model, blocks)),
        block_cost(embedding_tape(model, blocks)),
        shared_bytes(model, blocks),
        input_bytes(blocks),
    )
