"""The other way round: the largest model of a family, and the longest sequence, that hardware can train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from .hardware import Hardware
from .memory import Model
from .model import ModelShape
from .search import Space, Wish, any_fits, largest_that

SEQUENCE_STEP = 128  # longest sequences are multiples of it
LONGEST = 2**24
LARGEST = 2**16  # of what is scaled: layers, heads of width, attention heads; vocabularies in steps of VOCABULARY_STEP
VOCABULARY_STEP = 128


def deeper(model: ModelShape, layers: int) -> ModelShape:
    return replace(model, layers=layers, name=f"{model.name} with {layers} layers")


def wider(model: ModelShape, heads: int) -> ModelShape:
    """More heads of the same size, and width, FFN and KV heads in proportion."""
    group = model.heads // model.kv_heads
    heads = max(group, heads // group * group)
    hidden = model.hidden * heads // model.heads
    ffn = max(8, round(model.ffn * heads / model.heads / 8) * 8)
    rank = model.embedding_rank and min(model.embedding_rank, hidden)
    return replace(model, heads=heads, kv_heads=heads // group, hidden=hidden, ffn=ffn, embedding_rank=rank,
                   name=f"{model.name} with width {hidden}")  # fmt: skip


def more_heads(model: ModelShape, heads: int) -> ModelShape:
    """More attention heads in the same width; as many times more KV heads."""
    group = model.heads // model.kv_heads
    heads = max(group, heads // group * group)
    return replace(model, heads=heads, kv_heads=heads // group, name=f"{model.name} with {heads} heads")


def larger_vocabulary(model: ModelShape, steps: int) -> ModelShape:
    vocabulary = steps * VOCABULARY_STEP
    return replace(model, vocabulary=vocabulary, name=f"{model.name} with {vocabulary} tokens")


SCALES: dict[str, Callable[[ModelShape, int], ModelShape]] = {
    "depth": deeper,
    "width": wider,
    "heads": more_heads,
    "vocabulary": larger_vocabulary,
}


def largest_model(
    model: Model, hardware: Hardware, wish: Wish, spaces: Iterable[Space], scale: str = "depth"
) -> ModelShape | None:
    """The largest model made of `model` by changing its depth, width, heads or vocabulary; None if not even one fits.

    Raises:
        ValueError: a scale that is none of SCALES.
    """
    if not isinstance(model, ModelShape):
        raise ValueError(f"model={model.name!r} was measured: expected a shape, whose sizes can be changed")
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}: expected one of {', '.join(SCALES)}")
    spaces = tuple(spaces)
    count = largest_that(lambda n: any_fits(SCALES[scale](model, n), hardware, wish, spaces), LARGEST)
    return SCALES[scale](model, count) if count else None


def longest_sequence(model: Model, hardware: Hardware, wish: Wish, spaces: Iterable[Space]) -> int | None:
    """Tokens of the longest sequence, a multiple of 128, that trains one at a time; None if 128 do not."""
    spaces = tuple(spaces)

    def holds(steps: int) -> bool:
        return any_fits(model, hardware, replace(wish, sequence=steps * SEQUENCE_STEP), spaces)

    positions = model.positions if isinstance(model, ModelShape) else 0
    count = largest_that(holds, min(LONGEST, positions or LONGEST) // SEQUENCE_STEP)
    return count * SEQUENCE_STEP if count else None
