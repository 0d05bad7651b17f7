"""How much a program of each kernel takes: one table for all. Never autotuned: these kernels write in place.

Chosen by machine code (registers and accesses, docs/kernels.md); `halfstep bench optimizer --device cuda` measures
them, and no GPU has yet.
"""

SHARE = 16384  # elements of one tensor, of one program of the elementwise kernels
BLOCK = 1024  # elements of one round of its loop
CHUNK, LANES = 65536, 1024  # of grad_stats: part of the norm's order (reference/sum_squares.py), not to be tuned
PROLOGUE_BLOCK = 512  # tensors of one round, one to a lane


def warps(block: int, widest: int, lanes: int) -> int:
    """So many that every lane moves 16 bytes at a time of the tensors with the widest items (`widest` bytes).

    Args:
        lanes: of a warp: 32 on NVIDIA, 64 on most of AMD.
    """
    return max(1, block * widest // (16 * lanes))
