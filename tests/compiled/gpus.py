"""Limits of the GPU architectures, and how many blocks they let an SM (AMD: a compute unit) hold.

Source: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability", and the occupancy rules of
NVIDIA's occupancy calculator. Registers: 65,536 an SM, at most 255 a thread, everywhere. AMD: "AMD Instinct MI300"
CDNA3 Instruction Set Architecture, and LLVM's AMDGPU target, which prints the same occupancy (scalar registers apart).
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


@dataclass(frozen=True)
class AmdGpu:
    simds: int  # of a compute unit
    waves: int  # resident on a SIMD
    registers: int  # vector registers of a SIMD, for each lane
    granule: int  # of which so many are given out at a time
    lanes: int  # of a wave
    shared_per_block: int  # bytes, also of a compute unit


AMD_GPUS = {"gfx942": AmdGpu(4, 8, 512, 8, 64, 64 * KIB)}


def shared_limit(target: int | str) -> int:
    """Bytes that the tools may show for a block."""
    if isinstance(target, str):
        return AMD_GPUS[target].shared_per_block
    return GPUS[target].shared_per_block - GPUS[target].unseen


def occupancy(target: int | str, registers: int, threads: int, shared: int) -> float:
    """Share of an SM's warps that are resident when blocks of this kernel fill it; 0: not one block fits.

    Args:
        registers: of a thread. NVIDIA gives them out to warps in units of 256, and to four warps at a time.
        threads: of a block.
        shared: bytes of a block, as the tools show them.
    """
    if isinstance(target, str):
        return _amd_occupancy(AMD_GPUS[target], registers, threads, shared)
    gpu = GPUS[target]
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // 256) * 256
    warps_by_registers = 65_536 // of_warp // 4 * 4
    blocks = min(gpu.blocks, gpu.warps // warps, warps_by_registers // warps)
    of_block = shared + gpu.unseen
    if of_block:
        blocks = min(blocks, gpu.shared_per_sm // of_block)
    return blocks * warps / gpu.warps


def _amd_occupancy(gpu: AmdGpu, registers: int, threads: int, shared: int) -> float:
    of_wave = -(-max(registers, 1) // gpu.granule) * gpu.granule
    resident = gpu.simds * min(gpu.waves, gpu.registers // of_wave)
    waves = -(-threads // gpu.lanes)
    blocks = resident // waves
    if shared:
        blocks = min(blocks, gpu.shared_per_block // shared)
    return blocks * waves / (gpu.simds * gpu.waves)
