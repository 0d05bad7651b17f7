"""Data that breaks kernels: denormals, ties, Inf, NaN, huge, zero, -0, any bit pattern, next to ordinary numbers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from halfstep.reference import round_to

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = [FLOAT32, BFLOAT16, FLOAT16]
NARROW = [BFLOAT16, FLOAT16]

_INF = float("inf")
_SPECIALS = [0.0, 2.0**-149, 1e-40, 2.0**-126, 1e-30, 2.0**-24, 6e-5, 1.0, 65504.0, 65519.0, 1e19, 3.4e38]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ordinary(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    """Normal numbers of standard deviation `spread`."""
    shape = (shape,) if isinstance(shape, int) else shape
    return round_to(torch.randn(shape, generator=generator(seed)) * spread, dtype)


def awkward(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[size] of mixed kinds: half ordinary, the rest what kernels get wrong. Both signs, a few NaN and Inf."""
    pool = _pool(dtype)
    start = seed * 7919 % (len(pool) - size)
    return pool[start : start + size].clone()


@cache
def _pool(dtype: torch.dtype) -> Tensor:
    size, g = 2**19, generator(0)
    if dtype != FLOAT32:
        patterns = torch.randint(-(2**15), 2**15, (size,), generator=g, dtype=torch.int16).view(dtype)
        return torch.where(torch.randint(0, 4, (size,), generator=g) == 0, patterns, round_to(_pool(FLOAT32), dtype))
    values = torch.randn(size, generator=g)
    wide = values * torch.exp2(torch.randint(-140, 128, (size,), generator=g).float())
    patterns = torch.randint(-(2**31), 2**31, (size,), generator=g).int().view(FLOAT32)
    # a tie of bfloat16 or of float16, and its neighbours: what lies below the kept bits is a half, give or take one
    below = torch.tensor([0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001], dtype=torch.int32)
    low = below[torch.randint(0, len(below), (size,), generator=g)]
    ties = ((values.view(torch.int32) & ~0xFFFF) | low).view(FLOAT32)
    specials = torch.tensor(_SPECIALS)[torch.randint(0, len(_SPECIALS), (size,), generator=g)].copysign(values)
    nonfinite = torch.tensor([_INF, -_INF, float("nan")])[torch.randint(0, 3, (size,), generator=g)]
    kind = torch.randint(0, 32, (size,), generator=g)
    for limit, other in ((16, wide), (20, patterns), (24, ties), (28, specials), (31, nonfinite)):
        values = torch.where(kind >= limit, other, values)
    return values


def boundary_patterns() -> Tensor:
    """Every float32 at, just below and just above a value or a midpoint of bfloat16 and float16, of both signs."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    offsets = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    near_bfloat16 = (upper[:, None] | offsets).reshape(-1)
    on_grid = torch.arange(0x7C01, dtype=torch.int16).view(FLOAT16).float()
    on_grid[-1] = 65536.0  # where the next number would be, were it not Inf
    midpoints = (on_grid[:-1] + on_grid[1:]) / 2
    near_half = torch.cat((on_grid, midpoints)).view(torch.int32).long()[:, None] + torch.tensor([-1, 0, 1])
    near_half = near_half.clamp(min=0).reshape(-1)
    return torch.cat((near_bfloat16, near_half, near_half | 2**31)).int().view(FLOAT32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
