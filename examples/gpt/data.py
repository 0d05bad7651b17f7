"""Real text that every machine has: the sources of the Python standard library, byte by byte.

The split is by files, so no validation file is ever seen in training. Counted n-gram tables say what a model must
beat: looking one byte back (bigram) or two (trigram).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
# Installed packages differ from machine to machine, and many systems leave the standard library's own tests out.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
VALIDATION_EVERY = 20  # every 20th file: about 5 % of the text


@dataclass(frozen=True)
class Text:
    """Training and validation bytes (uint8 vectors) and one line on where they come from."""

    train: Tensor
    validation: Tensor
    source: str

    def batch(self, seed: int, index: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Batch number `index` of an endless, shuffled stream of blocks: inputs and targets [size, context], int64.

        Every epoch cuts the text at another offset and visits each block once. A batch depends on the arguments
        alone, so a resumed, retried or compared run needs no saved position but the number of its batch.
        """
        blocks = (len(self.train) - 1) // context - 1  # one fewer than fit: room for the epoch's offset
        rows = []
        for row in range(index * size, (index + 1) * size):
            epoch, place = divmod(row, blocks)
            order, offset = _shuffled(seed, epoch, blocks, context)
            start = int(order[place]) * context + offset
            rows.append(self.train[start : start + context + 1])
        block = torch.stack(rows).long()
        return block[:, :-1], block[:, 1:]

    def validation_windows(self, count: int, context: int) -> Tensor:
        """Positions [windows, context + 1] of up to `count` evenly spread windows of the validation text."""
        count = min(count, len(self.validation) // (context + 1))
        # from 1: a trigram looks one byte further back than a window's first input
        starts = torch.linspace(1, len(self.validation) - context - 1, count, dtype=torch.float64).long()
        return starts[:, None] + torch.arange(context + 1)


def load() -> Text:
    """The .py files of the running interpreter's standard library, sorted by name: the same text on every call."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts))
    texts = [file.read_bytes() for file in files]
    size = sum(map(len, texts))
    if size < 1_000_000:
        raise RuntimeError(
            f"expected the Python standard library's sources (several MB of .py files) under {root}, found {size:,} "
            "bytes; install them (Debian: libpython3-stdlib) or run with a Python that has them"
        )
    return Text(
        train=_bytes(texts, lambda number: number % VALIDATION_EVERY != 0),
        validation=_bytes(texts, lambda number: number % VALIDATION_EVERY == 0),
        source=f"{len(files)} files, {size / 1e6:.1f} MB of Python's standard library in {root}",
    )


def ngram_nats(text: Text, positions: Tensor) -> dict[str, float]:
    """Loss of "bigram" and "trigram" tables of the training bytes, on the validation bytes at `positions`.

    Each table adds one pseudo-count spread like the next shorter table's prediction, down to the uniform one: a
    byte that was never seen after its context costs much, but never infinitely much.
    """
    before, previous, target = (text.validation[positions - back].long() for back in (2, 1, 0))
    train = text.train.long()
    singles = torch.bincount(train, minlength=VOCABULARY)
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256**2)
    triples = torch.bincount((train[:-2] * 256 + train[1:-1]) * 256 + train[2:], minlength=256**3)

    probability = torch.full(target.shape, 1 / VOCABULARY, dtype=torch.float64)
    probability = (singles[target] + probability) / (len(train) + 1)
    losses = {}
    for name, counts, context in (("bigram", pairs, previous), ("trigram", triples, before * 256 + previous)):
        totals = counts.view(-1, 256).sum(1)
        probability = (counts[context * 256 + target] + probability) / (totals[context] + 1)
        losses[name] = -probability.log().mean().item()
    return losses


@lru_cache(maxsize=2)  # consecutive batches share an epoch, at times two
def _shuffled(seed: int, epoch: int, blocks: int, context: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    offset = int(torch.randint(context, (), generator=generator))
    return torch.randperm(blocks, generator=generator), offset


def _bytes(texts: list[bytes], wanted: Callable[[int], bool]) -> Tensor:
    joined = b"".join(text for number, text in enumerate(texts) if wanted(number))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)
