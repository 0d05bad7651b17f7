"""Sizes of attention's tiles, by GPU, kernel and head dim. docs/kernels.md shows what they were chosen by.

tests/compiled holds them to machine code that spills nothing and fits the shared memory; but for exact products beyond
64 columns, which spill at 256, and for several of the heavy options at once.

Warps share the rows of a tile's first product (queries; keys in the kernel of dK and dV): 16 rows a warp on mma.sync,
64 on four warps of wgmma and tcgen05. A tile with less would be computed several times; Triton multiplies tiles of less
than 64 rows with mma.sync on every GPU, which is how dK and dV of 256 columns fit the registers.
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
        "forward": {64: Tile(128, 64, 4, 3, 1), 128: Tile(128, 128, 8, 2, 1), 256: Tile(128, 16, 8, 2, 1)},
        "keys": {64: Tile(64, 128, 8, 2, 1), 128: Tile(32, 128, 8, 2, 1), 256: Tile(16, 32, 4, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 1), 128: Tile(128, 64, 8, 2, 1), 256: Tile(128, 16, 8, 2, 1)},
    },
    # 166,912 bytes: sm_80
    166_912: {
        "forward": {64: Tile(128, 64, 8, 3, 2), 128: Tile(128, 64, 8, 2, 2), 256: Tile(64, 64, 8, 2, 1)},
        "keys": {64: Tile(32, 128, 8, 2, 1), 128: Tile(64, 64, 8, 2, 1), 256: Tile(16, 64, 8, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 2), 128: Tile(128, 32, 8, 2, 2), 256: Tile(64, 32, 8, 2, 1)},
    },
    # 101,376 bytes: sm_86, sm_89, sm_120
    101_376: {
        "forward": {64: Tile(128, 64, 8, 3, 2), 128: Tile(128, 64, 8, 2, 2), 256: Tile(64, 32, 8, 2, 1)},
        "keys": {64: Tile(32, 128, 8, 2, 1), 128: Tile(64, 64, 8, 2, 1), 256: Tile(16, 64, 8, 1, 1)},
        "queries": {64: Tile(64, 64, 4, 2, 2), 128: Tile(128, 32, 8, 2, 2), 256: Tile(64, 16, 8, 2, 1)},
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
    "keys": {64: Tile(16, 64, 4, 2, 1), 128: Tile(16, 32, 4, 1, 1), 256: Tile(16, 32, 4, 1, 1)},
    "queries": {64: Tile(64, 32, 4, 2, 1), 128: Tile(64, 32, 4, 1, 1), 256: Tile(64, 16, 8, 1, 1)},
    "bias": {64: Tile(64, 32, 4, 1, 1), 128: Tile(64, 16, 4, 1, 1), 256: Tile(64, 16, 8, 1, 1)},
}
# float32 in TF32
_TF32 = {
    "forward": {64: Tile(64, 32, 4, 1, 1), 128: Tile(64, 32, 4, 1, 1), 256: Tile(32, 16, 8, 1, 1)},
    "keys": {64: Tile(16, 32, 4, 1, 1), 128: Tile(16, 32, 4, 1, 1), 256: Tile(16, 16, 4, 1, 1)},
    "queries": {64: Tile(64, 32, 4, 1, 1), 128: Tile(64, 16, 4, 1, 1), 256: Tile(16, 16, 4, 1, 1)},
    "bias": {64: Tile(64, 32, 4, 1, 1), 128: Tile(64, 16, 4, 1, 1), 256: Tile(64, 16, 8, 1, 1)},
}
# float32 and float64 in full: no matrix instructions, and operands that a thread has in registers as a whole
_EXACT = {
    "forward": {64: Tile(32, 32, 4, 1, 1), 128: Tile(32, 32, 8, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
    "keys": {64: Tile(16, 32, 8, 1, 1), 128: Tile(16, 16, 8, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
    "queries": {64: Tile(32, 32, 8, 1, 1), 128: Tile(16, 16, 8, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
    "bias": {64: Tile(32, 32, 8, 1, 1), 128: Tile(16, 16, 8, 1, 1), 256: Tile(16, 16, 8, 1, 1)},
}
_OF_PRODUCTS = {"heavy": _HEAVY, "tf32": _TF32, "exact": _EXACT}


def tile(kernel: str, width: int, kind: str, shared_memory: int) -> Tile:
    """
    Args:
        kernel: "forward", "keys", "queries" or "bias".
        width: the larger head dim, rounded up to a power of 2.
        kind: "plain": products of 16-bit elements, scores that need but a scale and a range; "heavy": scores that need
            more; "tf32"; "exact".
        shared_memory: bytes that a program may have; 0 is the interpreter.
    """
    return candidates(kernel, width, kind, shared_memory)[0]


def candidates(kernel: str, width: int, kind: str, shared_memory: int) -> list[Tile]:
    """The table's tile, then others that may be faster on a GPU of another kind, of what fits its shared memory."""
    if not shared_memory:
        return [INTERPRETED, Tile(16, 32, 4, 1, 1)]
    tables = [_OF_PRODUCTS.get(kind, _HEAVY)]
    if kind == "plain" and kernel != "bias":
        tables = [_TILES[limit] for limit in _TILES if limit <= max(shared_memory, 65_536)] + tables
    return list(dict.fromkeys(table[kernel][max(width, 64)] for table in tables))
