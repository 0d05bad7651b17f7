"""Sizes of attention's tiles, by GPU, kernel and head dim. tests/compiled holds each of them to machine code that
spills nothing and fits the shared memory; docs/kernels.md shows what they were chosen by.

Warps share the rows of a tile's first product (queries; keys in the kernel of dK and dV): 16 rows a warp on mma.sync,
64 on four warps of wgmma and tcgen05. A tile with less would be computed several times.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    warps: int
    stages: int  # of loads in flight
    edge_stages: int  # likewise, in blocks that are not whole; fewer need less registers


INTERPRETED = Tile(32, 32, 4, 1, 1)

# 16-bit elements: class of GPU -> kernel -> largest head dim -> tile
_TILES = {
    # NVIDIA, at least 232,448 bytes of shared memory: sm_90 and sm_100, with wgmma and tcgen05
    232_448: {
        "forward": {64: Tile(128, 64, 4, 3, 1), 128: Tile(128, 128, 8, 2, 1), 256: Tile(128, 64, 8, 2, 1)},
        "keys": {64: Tile(64, 128, 8, 2, 1), 128: Tile(32, 128, 8, 2, 1), 256: Tile(16, 64, 8, 2, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 1), 128: Tile(128, 64, 8, 2, 1), 256: Tile(128, 32, 8, 2, 1)},
    },
    # 166,912 bytes: sm_80
    166_912: {
        "forward": {64: Tile(128, 128, 8, 2, 2), 128: Tile(128, 64, 8, 2, 2), 256: Tile(64, 64, 8, 2, 1)},
        "keys": {64: Tile(32, 128, 8, 2, 1), 128: Tile(64, 64, 8, 2, 1), 256: Tile(16, 64, 8, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 2), 128: Tile(128, 32, 8, 2, 2), 256: Tile(64, 32, 8, 2, 1)},
    },
    # 101,376 bytes: sm_86, sm_89, sm_120
    101_376: {
        "forward": {64: Tile(128, 128, 8, 2, 2), 128: Tile(128, 64, 8, 2, 2), 256: Tile(64, 32, 8, 2, 1)},
        "keys": {64: Tile(32, 128, 8, 2, 1), 128: Tile(64, 64, 8, 2, 1), 256: Tile(16, 64, 8, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 2), 128: Tile(128, 32, 8, 2, 2), 256: Tile(64, 32, 8, 2, 1)},
    },
    # AMD, 65,536 bytes
    65_536: {
        "forward": {64: Tile(128, 64, 4, 2, 2), 128: Tile(128, 64, 8, 2, 1), 256: Tile(64, 32, 4, 1, 1)},
        "keys": {64: Tile(32, 64, 4, 2, 1), 128: Tile(32, 64, 4, 2, 1), 256: Tile(16, 64, 8, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 1), 128: Tile(64, 32, 4, 2, 1), 256: Tile(64, 16, 8, 1, 1)},
    },
}
# Masks, biases, slopes, caps and dropout take registers of their own; these fit every GPU
_HEAVY = {
    "forward": {64: Tile(64, 64, 4, 2, 1), 128: Tile(64, 32, 4, 2, 1), 256: Tile(64, 32, 8, 1, 1)},
    "keys": {64: Tile(16, 64, 4, 2, 1), 128: Tile(16, 64, 8, 1, 1), 256: Tile(16, 64, 8, 1, 1)},
    "queries": {64: Tile(64, 32, 4, 2, 1), 128: Tile(64, 32, 4, 1, 1), 256: Tile(64, 16, 8, 1, 1)},
    "bias": {64: Tile(64, 32, 4, 1, 1), 128: Tile(64, 32, 4, 1, 1), 256: Tile(64, 32, 8, 1, 1)},
}
# float32 and float64, whose products are no matrix instructions unless TF32 is allowed
_WIDE = {
    "forward": {64: Tile(64, 32, 4, 1, 1), 128: Tile(32, 32, 4, 1, 1), 256: Tile(16, 32, 8, 1, 1)},
    "keys": {64: Tile(32, 32, 4, 1, 1), 128: Tile(16, 32, 4, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
    "queries": {64: Tile(32, 32, 4, 1, 1), 128: Tile(32, 16, 4, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
    "bias": {64: Tile(32, 32, 4, 1, 1), 128: Tile(16, 32, 4, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
}


def tile(kernel: str, width: int, element_size: int, heavy: bool, shared_memory: int) -> Tile:
    """
    Args:
        kernel: "forward", "keys", "queries" or "bias".
        width: the larger head dim, rounded up to a power of 2.
        heavy: scores need more than a scale and a range.
        shared_memory: bytes that a program may have; 0 is the interpreter.
    """
    if not shared_memory:
        return INTERPRETED
    if element_size > 2:
        of_kernel = _WIDE[kernel]
    elif heavy or kernel == "bias":
        of_kernel = _HEAVY[kernel]
    else:
        of_kernel = _TILES[max((limit for limit in _TILES if limit <= shared_memory), default=65_536)][kernel]
    return of_kernel[max(width, 64)]
