"""The whole optimizer phase in plain PyTorch: statistics, decision, update of a list of parameters.

The last-resort backend (any device, nothing compiled), and the meaning of the native backends' plan objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .optimizer import AdamGroup, clip_coefficient, grad_stats, update_
from .sum_squares import norm_from


class AdamRow(NamedTuple):
    """One parameter of a step. All tensors have the parameter's shape, except `step`."""

    param: Tensor  # float32, bfloat16 or float16
    exp_avg: Tensor  # float32, or a 16-bit dtype, as the next two
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # None: no amsgrad
    master: Tensor | None  # float32 copy, or int16 remainder of a split bfloat16 weight
    step: Tensor  # 0-d int64: updates done so far
    group: int  # index into the step's groups
    param_id: int  # position in the optimizer (random words)
    first_index: int  # index of the first element in the whole, unsharded parameter (random words)


class StepInputs(NamedTuple):
    """What a step needs beside the rows, their gradients and the groups."""

    # tensors are on the rows' device
    scale: Tensor | None = None  # 0-d float32 loss scale the gradients still carry
    sum_squares: Tensor | None = None  # 0-d float64, from grad_stats; None if the first pass was not needed
    first_bad: Tensor | None = None  # 0-d int64, likewise
    max_norm: float | None = None
    skip_nonfinite: bool = False
    found_inf: Tensor | None = None  # 0-d float32; anything > 0: somebody else asks for a skip
    seed: int = 0
    stochastic_weight: bool = False
    heal: bool = True


class StepResult(NamedTuple):
    """On the rows' device."""

    norm: Tensor  # 0-d float64 global norm of the unscaled gradients; NaN if the first pass did not run
    skipped: Tensor  # 0-d bool
    healed: Tensor  # 0-d int64: elements whose master gave way to the weight


class Decision(NamedTuple):
    norm: float
    grad_factor: float | None
    skip: bool


def inverse(scale: Tensor | None) -> Tensor | float:
    """f32(1 / scale), the factor of the first pass; 1.0 without a scale. A 0 scale gives inf, and so a skip."""
    if scale is None:
        return 1.0
    return (1.0 / scale.double()).float()


def decide(inputs: StepInputs) -> Decision:
    """Norm, factor and skip of a step: clip coefficient / loss scale, in float64, rounded once to float32."""
    norm = float("nan") if inputs.sum_squares is None else float(norm_from(inputs.sum_squares))
    skip = inputs.found_inf is not None and float(inputs.found_inf) > 0
    skip |= inputs.skip_nonfinite and inputs.first_bad is not None and int(inputs.first_bad) >= 0
    if inputs.scale is None and inputs.max_norm is None:
        return Decision(norm, None, skip)
    coefficient = torch.ones((), dtype=torch.float64, device="cpu")
    if inputs.max_norm is not None:
        coefficient = clip_coefficient(norm, inputs.max_norm)
    scale = 1.0 if inputs.scale is None else inputs.scale.double().cpu()
    return Decision(norm, float((coefficient / scale).float()), skip)


class AdamPlan:
    """The rows of one device; `set_grads`, then `grad_stats` if needed, then `update`, then `drop_grads`."""

    def __init__(self, rows: Sequence[AdamRow]) -> None:
        self.rows = list(rows)
        self.grads: list[Tensor] = []

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        self.grads = list(grads)

    def drop_grads(self) -> None:
        self.grads = []

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return grad_stats(self.grads, inverse(scale))

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        norm, grad_factor, skip = decide(inputs)
        device = self.rows[0].param.device
        healed = torch.zeros((), dtype=torch.int64, device=device)
        for row, grad in zip(self.rows, self.grads, strict=True):
            if skip:
                break
            t = int(row.step) + 1
            healed = healed + update_(
                row.param, grad, row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq, row.master,
                group=groups[row.group], t=t, grad_factor=grad_factor, seed=inputs.seed, param_id=row.param_id,
                first_index=row.first_index, stochastic=inputs.stochastic_weight, heal=inputs.heal,
            )  # fmt: skip
            row.step.fill_(t)
        skipped = torch.full((), skip, dtype=torch.bool, device=device)
        return StepResult(torch.full((), norm, dtype=torch.float64, device=device), skipped, healed)
