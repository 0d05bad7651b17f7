"""Limits of the GPU architectures, and how many blocks they let an SM hold.

Source: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability", and the occupancy rules of
NVIDIA's occupancy calculator. Registers: 65,536 an SM, at most 255 a thread, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
KIB = 1024


@dataclass(frozen=True)
class Gpu:
    warps: int  # resident on an SM
    blocks: int  # likewise
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, with what the system takes
    unseen: int  # bytes a block that the system takes and cuobjdump does not show


GPUS = {
    75: Gpu(32, 16, 64 * KIB, 64 * KIB, 0),
    80: Gpu(64, 32, 164 * KIB, 164 * KIB, KIB),
    86: Gpu(48, 16, 100 * KIB, 100 * KIB, KIB),
    89: Gpu(48, 24, 100 * KIB, 100 * KIB, KIB),
    90: Gpu(64, 32, 228 * KIB, 228 * KIB, 0),
    100: Gpu(64, 32, 228 * KIB, 228 * KIB, 0),
    120: Gpu(48, 24, 100 * KIB, 100 * KIB, 0),
}


def occupancy(arch: int, registers: int, threads: int, shared: int) -> float:
    """Share of an SM's warps that are resident when blocks of this kernel fill it.

    Args:
        registers: of a thread. They are given out to warps in units of 256, and to four warps at a time.
        threads: of a block.
        shared: bytes of a block, as cuobjdump shows them.
    """
    gpu = GPUS[arch]
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // 256) * 256
    warps_by_registers = 65_536 // of_warp // 4 * 4
    blocks = min(gpu.blocks, gpu.warps // warps, warps_by_registers // warps)
    of_block = shared + gpu.unseen
    if of_block:
        blocks = min(blocks, gpu.shared_per_sm // of_block)
    return blocks * warps / gpu.warps
