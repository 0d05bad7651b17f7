"""Sums of squares in the one order that every backend keeps: norms, and what is clipped by them, are the same bits.

A tensor is cut into chunks of 65,536 elements in logical row-major order; chunks, then tensors, add in order in
float64. Finite numbers never overflow or vanish, whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Order within a tensor: chunks of rows of lanes, rows summed in groups
CHUNK = 65536
LANES = 1024
GROUP_ROWS = 8
# A float32 group sum inside these bounds has lost nothing to overflow, and nothing that matters to underflow
GROUP_SUM_MIN, GROUP_SUM_MAX = 2.0**-100, 2.0**120


@torch.no_grad()
def sums_of_squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of squares of every tensor, and of all of them together.

    Args:
        tensors: n float32, bfloat16 or float16 tensors, any shapes and strides, on one device.

    Returns: (float64 [n], 0-d float64): Inf or NaN for a tensor that has one; 0 for an empty tensor.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    sums = [sum_squares(tensor.float()) for tensor in tensors]
    for one in sums:
        total = total + one
    return torch.stack(sums) if sums else total.new_zeros(0), total


def sum_squares(x: Tensor) -> Tensor:
    """Of one float32 tensor of any shape and strides: 0-d float64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.reshape(-1).split(CHUNK) if x.numel() else ():
        total = total + _chunk_sum_squares(chunk)
    return total


def norm_from(sums: Tensor) -> Tensor:
    """Square roots of a float64 tensor, correctly rounded: torch.sqrt on a CPU is an ulp off in 1 of 130."""
    if sums.dim() == 0:
        return torch.full((), math.sqrt(sums.item()), dtype=torch.float64, device=sums.device)
    roots = [math.sqrt(s) for s in sums.reshape(-1).tolist()]
    return torch.tensor(roots, dtype=torch.float64, device=sums.device).reshape(sums.shape)


def _chunk_sum_squares(u: Tensor) -> Tensor:
    """Sum of squares of one chunk, 0-d float64.

    Element e belongs to lane e % 1024. A lane adds the squares of 8 successive rows in float32, each product and each
    sum rounded; a sum outside [2**-100, 2**120], or NaN, is formed again in float64, in the same order. A lane adds its
    group sums in order in float64; lanes combine as a tree, lane[i] += lane[i + s] for s = 512, 256, .. 1.

    Args:
        u: float32 [n], 0 < n <= 65,536.
    """
    # missing elements count as 0, which adds nothing anywhere
    u = torch.nn.functional.pad(u, (0, -u.numel() % (GROUP_ROWS * LANES)))
    rows = u.view(-1, GROUP_ROWS, LANES).unbind(1)
    narrow = rows[0] * rows[0]
    wide = rows[0].double() * rows[0].double()
    for row in rows[1:]:
        narrow = narrow + row * row
        wide = wide + row.double() * row.double()
    trusted = (narrow >= GROUP_SUM_MIN) & (narrow <= GROUP_SUM_MAX)
    groups = torch.where(trusted, narrow.double(), wide)
    lanes = groups[0]
    for group in groups[1:]:
        lanes = lanes + group
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]
