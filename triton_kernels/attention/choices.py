"""Tiles that a measurement chose over the table's, for as long as the process lives; see halfstep.tune_attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .tiles import Tile, candidates, tile


class Work(NamedTuple):
    """What a choice of a kernel's tile holds for."""

    device: str
    kernel: str
    dims: tuple[int, int]
    dtype: str
    kind: str  # tiles.py
    rules: tuple[str, ...]  # that there are: of Rules' names
    lengths: tuple[int, int, int]  # segments, queries, keys: powers of 2 that they are up to

    def __str__(self) -> str:
        return f"{self.kernel} of {self.dtype} {self.dims}, {self.lengths} on {self.device}"


@dataclass
class Trial:
    """What kernels are launched meanwhile, and the tiles that they take instead of their own."""

    tiles: dict[str, Tile] = field(default_factory=dict)  # by kernel
    asked: dict[str, tuple[Work, Tile, list[Tile]]] = field(default_factory=dict)  # the tile it has, and what it may


_chosen: dict[Work, Tile] = {}
_trials: list[Trial] = []


def bucket(n: int) -> int:
    """The power of 2 that n is up to."""
    return 1 << max(n - 1, 0).bit_length()


def anything() -> bool:
    """Whether `tile_of` may answer otherwise than the table."""
    return bool(_chosen or _trials)


def tile_of(work: Work, width: int, shared_memory: int) -> Tile:
    """Chosen, or else the table's; args: see tiles.tile."""
    own = _chosen.get(work) or tile(work.kernel, width, work.kind, shared_memory)
    for trial in _trials:
        trial.asked[work.kernel] = work, own, candidates(work.kernel, width, work.kind, shared_memory)
        own = trial.tiles.get(work.kernel, own)
    return own


@contextmanager
def trying(tiles: dict[str, Tile]) -> Iterator[Trial]:
    """Launches within take these tiles, by kernel. For all threads: tune before a training, not beside one."""
    trial = Trial(tiles)
    _trials.append(trial)
    try:
        yield trial
    finally:
        _trials.remove(trial)


def choose(work: Work, chosen: Tile) -> None:
    _chosen[work] = chosen


def forget() -> None:
    """The table's tiles again."""
    _chosen.clear()
