"""Sizes of attention's tiles, by kernel, head dim and what shared memory a program may have."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    warps: int
    stages: int  # of loads in flight


INTERPRETED = Tile(32, 32, 4, 1)


def tile(kernel: str, width: int, element_size: int, shared_memory: int) -> Tile:
    """
    Args:
        kernel: "forward", "keys", "queries" or "bias".
        width: the larger head dim, rounded up to a power of 2.
        shared_memory: bytes that a program may have; 0 is the interpreter.
    """
    if not shared_memory:
        return INTERPRETED
    return Tile(64, 32, 4, 2)
