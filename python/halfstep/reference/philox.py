"""Philox-4x32-10, the counter-based random numbers behind every stochastic rounding.

One word belongs to one element of one tensor in one step: it depends on the seed, the step, the tensor and the
element's index in the whole (unsharded) tensor, and on nothing else, so it is the same under any tiling, thread
count, backend or sharding, and after a resume.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 5 and table 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
# Weyl increments of the key: the golden ratio and sqrt(3) - 1, as 32-bit fractions
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def _multiply(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of multiplier * x; in 16-bit halves, as the full product overflows a signed int64."""
    upper = (multiplier >> 16) * x
    lower = (multiplier & 0xFFFF) * x
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & MASK32
    return high, low


def philox_block(counter: Sequence[Tensor], key: tuple[int, int] | tuple[Tensor, Tensor]) -> Tensor:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors, each holding uint32 values, which broadcast to one shape [...].
        key: two uint32 values; as tensors, int64 with no dimension.

    Returns: int64 [..., 4], each a uint32 value.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIER_0, c0)
        high1, low1 = _multiply(MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def philox_words(
    seed: int, t: int, param_id: int, stream: int, first_index: int, numel: int, device: torch.device | str
) -> Tensor:
    """Random words of `numel` successive elements, the first of which is element `first_index`.

    Element e takes word e % 4 of the block with key (seed, t) and counter (e // 4 low, e // 4 high, param_id, stream).

    Args:
        seed, t: taken modulo 2**32.
        param_id: position of the tensor in the optimizer (or in the list), taken modulo 2**32.
        stream: 0 weight, 1 exp_avg, 2 exp_avg_sq, 3 max_exp_avg_sq.
        first_index: index in the whole tensor, 0 <= first_index < 2**63 - numel.
        numel: number of words, >= 0.
        device: where the words are made.

    Returns: int64 [numel], each a uint32 value.
    """
    first_block = first_index // 4
    last_block = (first_index + numel + 3) // 4
    block = torch.arange(first_block, last_block, dtype=torch.int64, device=device)
    counter = (
        block & MASK32,
        (block >> 32) & MASK32,
        torch.full_like(block, param_id & MASK32),
        torch.full_like(block, stream & MASK32),
    )
    words = philox_block(counter, (seed & MASK32, t & MASK32)).reshape(-1)
    skipped = first_index - 4 * first_block
    return words[skipped : skipped + numel]
