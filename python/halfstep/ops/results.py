"""Where a step or a list leaves its results on the device; nobody waits for them here."""

from __future__ import annotations

import torch
from torch import Tensor


def result(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


def step_results(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """int64 [4], which one copy brings to the host (outcomes.py), and in it: norm, skipped, healed, first bad index."""
    whole = torch.empty(4, dtype=torch.int64, device=device)
    norm, skipped, healed, first_bad = whole.unbind()
    return whole, norm.view(torch.float64), skipped.unsqueeze(0).view(torch.bool)[0], healed, first_bad
