"""What the rows of a fused step must be, beyond their layout; whatever is not is refused by name."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.step import AdamRow
from .layout import DTYPES, NARROW, check_tensor


def check_grad(grad: Tensor, param: Tensor, name: str) -> None:
    check_tensor(grad, f"the gradient of {name}")
    try:
        grad.is_contiguous()
    except TypeError as error:
        raise TypeError(
            f"the gradient of {name} is a {type(grad).__name__} that does not say how it lies in memory; assign a "
            "plain tensor"
        ) from error
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"{name} has shape {tuple(param.shape)} on {param.device}, its gradient {tuple(grad.shape)} on "
            f"{grad.device}; call backward() again after changing parameters"
        )


def check_dtypes(row: AdamRow, name: str) -> None:
    """What a kernel would otherwise read with the wrong item size."""
    moments = [t.dtype for t in (row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq) if t is not None]
    master = None if row.master is None else row.master.dtype
    master_fits = (
        master is None
        or (master is torch.float32 and row.param.dtype in NARROW)
        or (master is torch.int16 and row.param.dtype is torch.bfloat16)
    )
    counter_fits = row.step.dtype is torch.int64 and row.step.numel() == 1
    if len(set(moments)) != 1 or moments[0] not in DTYPES or not master_fits or not counter_fits:
        raise RuntimeError(
            f"{name} has moments of {moments}, a master of {master} and a step "
            f"of {row.step.dtype}; expected equal floating moments, a float32 master or (for bfloat16) an int16 "
            "remainder, and an int64 step. Load states through load_state_dict(), which converts them"
        )


def uses_random_words(row: AdamRow, stochastic_weight: bool) -> bool:
    """True if the row rounds stochastically: then the order in memory must be the logical one."""
    narrow_weight = row.param.dtype in NARROW and row.master is None
    return row.exp_avg.dtype in NARROW or (stochastic_weight and narrow_weight)
