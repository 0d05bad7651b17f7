"""The optimizer phase: grad_stats, unscale_, clip_grad_norm_ on lists, and the fused Adam step.

Functions here take validated tensors, settle layouts, choose the backend and call it. `schemas.py` wraps the same
functions for torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..reference.optimizer import AdamGroup, clip_coefficient
from ..reference.step import AdamRow, StepInputs, StepResult, inverse
from . import backend
from .layout import DTYPES, NARROW, as_layout, dense_or_copy, is_dense, same_layout

__all__ = ["AdamGroup", "AdamRow", "AdamStep", "StepInputs", "StepResult", "clip_grad_norm_", "grad_stats", "unscale_"]


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None, forced: str | None = None) -> tuple[Tensor, Tensor]:
    """(sum of squares of the unscaled gradients, index of the first non-finite one or -1): 0-d float64, 0-d int64."""
    if not grads:
        return torch.zeros((), dtype=torch.float64), torch.tensor(-1)
    chosen = backend.choose(grads[0].device, forced)
    return chosen.grad_stats([g.contiguous() for g in grads], inverse(scale))


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor) -> Tensor:
    """grad = round(f32(grad) * inv_scale) in place; 0-d int64 index of the first tensor with a non-finite result."""
    if not grads:
        return torch.tensor(-1)
    chosen = backend.choose(grads[0].device)
    work = [dense_or_copy(g) for g in grads]
    first_bad = chosen.unscale_(work, float(inv_scale))
    _copy_back(grads, work)
    return first_bad


def clip_grad_norm_(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scales the gradients in place so that their global norm is at most max_norm; returns the norm before (float64)."""
    norm = grad_stats(grads, None)[0].sqrt()
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:  # 1 would rewrite every gradient with itself
        unscale_(grads, coefficient.float())
    return norm


def _copy_back(targets: Sequence[Tensor], work: Sequence[Tensor]) -> None:
    for target, buffer in zip(targets, work, strict=True):
        if buffer is not target:
            target.copy_(buffer)
    increment_version(list(targets))


class AdamStep:
    """The fused step of one optimizer's parameters on one device: rows checked and laid out once, then run many times.

    The layout of a row is that of its exp_avg; a parameter with gaps or in another order is staged in a buffer of its
    own size. Built again by the caller when `stale()`.
    """

    def __init__(self, rows: Sequence[AdamRow], forced: str | None, *, stochastic_weight: bool) -> None:
        self.rows = list(rows)
        self._staged: list[tuple[Tensor, Tensor]] = []  # (parameter, dense buffer)
        work = [self._laid_out(row, stochastic_weight) for row in self.rows]
        self._layouts = [row.exp_avg for row in work]
        self._facts = self._current()
        self._written = [t for row in self.rows for t in row[:6] if isinstance(t, Tensor)]
        self._plan = backend.choose(rows[0].param.device, forced).AdamPlan(work)

    def stale(self) -> bool:
        """True if a parameter or state moved or changed its shape, dtype or layout (p.data = ..., set_, resize_)."""
        return self._facts != self._current()

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        """This step's gradients, in the order of the rows; brought into the rows' layout where they differ."""
        for row, grad in zip(self.rows, grads, strict=True):
            if grad.shape != row.param.shape or grad.device != row.param.device:
                raise RuntimeError(
                    f"parameter {row.param_id} has shape {tuple(row.param.shape)} on {row.param.device}, its gradient "
                    f"{tuple(grad.shape)} on {grad.device}; call backward() again after changing parameters"
                )
        laid_out = [as_layout(g, like) for g, like in zip(grads, self._layouts, strict=True)]
        self._plan.set_grads(laid_out)
        self._grads = laid_out  # alive until the step has run
        self._logical = None if all(like.is_contiguous() for like in self._layouts) else list(grads)

    def grad_stats(self, scale: Tensor | None, forced: str | None) -> tuple[Tensor, Tensor]:
        """As `grad_stats`, of this step's gradients (the norm's order is that of the logical elements)."""
        if self._logical is not None:
            return grad_stats(self._logical, scale, forced)
        return self._plan.grad_stats(scale)

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        """Decides and updates everything in place; a skipped step leaves every bit as it was."""
        for param, buffer in self._staged:
            buffer.copy_(param)
        result = self._plan.update(groups, inputs)
        for param, buffer in self._staged:
            param.copy_(buffer)
        increment_version(self._written)
        self._grads, self._logical = [], None
        return result

    def _current(self) -> list[tuple]:
        return [
            (t.data_ptr(), t.dtype, t.shape, t.stride())
            for row in self.rows
            for t in row[:6]
            if isinstance(t, Tensor)
        ]

    def _laid_out(self, row: AdamRow, stochastic_weight: bool) -> AdamRow:
        states = [t for t in (row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq, row.master) if t is not None]
        _check_dtypes(row)
        for state in states:
            if state.shape != row.param.shape:
                raise RuntimeError(
                    f"parameter {row.param_id} has shape {tuple(row.param.shape)} but a state of shape "
                    f"{tuple(state.shape)}: it changed after the first step; build a new optimizer"
                )
            if not is_dense(state) or not same_layout(state, row.exp_avg):
                raise RuntimeError(
                    f"parameter {row.param_id}: its optimizer states have different memory layouts (strides "
                    f"{[tuple(s.stride()) for s in states]}); make them alike, for example state.contiguous()"
                )
        if _uses_random_words(row, stochastic_weight) and not row.exp_avg.is_contiguous():
            raise RuntimeError(
                f"parameter {row.param_id}: stochastic rounding needs contiguous states, got strides "
                f"{tuple(row.exp_avg.stride())}; replace them with state.contiguous()"
            )
        if is_dense(row.param) and same_layout(row.param, row.exp_avg):
            return row
        buffer = torch.empty_strided(
            row.param.shape, row.exp_avg.stride(), dtype=row.param.dtype, device=row.param.device
        )
        self._staged.append((row.param, buffer))
        return row._replace(param=buffer)


def _check_dtypes(row: AdamRow) -> None:
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
            f"parameter {row.param_id} ({row.param.dtype}) has moments of {moments}, a master of {master} and a step of "
            f"{row.step.dtype}; expected equal floating moments, a float32 master or (for bfloat16) an int16 remainder, "
            "and an int64 step. Load states through load_state_dict(), which converts them"
        )


def _uses_random_words(row: AdamRow, stochastic_weight: bool) -> bool:
    """True if the row rounds stochastically: then the order in memory must be the logical one."""
    narrow_weight = row.param.dtype in NARROW and row.master is None
    return row.exp_avg.dtype in NARROW or (stochastic_weight and narrow_weight)
