"""What the tests of every backend's optimizer phase step: awkward rows, a whole phase, steps that must be skipped."""

from __future__ import annotations

import itertools
import math

import torch
from adam_rows import WEIGHTS, Case, make_case
from adversarial import BFLOAT16, FLOAT32, FLOATS, ordinary

from halfstep.reference import AdamGroup
from halfstep.reference.step import StepInputs

GROUPS = [
    AdamGroup(1e-2, *betas, eps, 0.1, decoupled, maximize)
    for decoupled in (True, False)
    for maximize in (False, True)
    for betas in ((0.9, 0.999), (0.3, 0.5), (0.0, 0.0))
    for eps in (1e-8, 0.0)
]
STEPS = [0, 6, 99_999, 2**33]
# Stochastic words of far elements, parameters and seeds: all 32 bits of every counter and key are used
FIRST_INDICES = [0, 1, 2**34 + 3, 2**62 - 2]
PARAM_IDS = [0, 7, 2**31 + 1, 2**32 - 1]
FACTORS = {
    "plain": StepInputs(),
    "factor": StepInputs(
        scale=torch.tensor(1.5), sum_squares=torch.tensor(50.0).double(), first_bad=torch.tensor(-1), max_norm=2.0
    ),
}


def awkward_cases(weight: tuple[torch.dtype, str | None], state: torch.dtype) -> list[Case]:
    """24 rows: every group, amsgrad and every gradient dtype among them; sizes with and without blocks and tails."""
    return [
        make_case(
            weight, FLOATS[(i + i // 3) % 3], state, 512 * (i % 3) + i, seed=100 * i, amsgrad=i // 2 % 2 == 1, group=i,
            step=STEPS[i // 3 % 4], param_id=PARAM_IDS[i % 4], first_index=FIRST_INDICES[i // 2 % 4],
        )
        for i in range(24)
    ]  # fmt: skip


def whole_phase_cases() -> tuple[list[Case], StepInputs]:
    """Scale, norm, clip and update of tensors that straddle the units of work, with empty ones between them."""
    sizes = [0, 1, 1023, 70001, 0, 5, 40000, 511, 0, 30000, 4, 0]  # three units of 65,536, all crossed by tensors
    cases = []
    for i, size in enumerate(sizes):
        case = make_case(
            WEIGHTS[(i + 5) % 6], FLOATS[i // 2 % 3], FLOATS[i // 3 % 3], size, seed=1000 * i, amsgrad=i % 2 == 1,
            group=i // 2, step=STEPS[i % 4], param_id=i,
        )  # fmt: skip
        cases.append(case._replace(grad=case.grad.nan_to_num(1.0, 1.0, 1.0).clamp(-1e4, 1e4)))  # nothing to skip for
    inputs = StepInputs(
        scale=torch.tensor(2.0**16 / 3), max_norm=1.0, skip_nonfinite=True, seed=3, stochastic_weight=True
    )
    return cases, inputs


TO_SKIP = {"gradient": 3, "overflow in the unscaling": 17, "found_inf": -1}  # why, and the first bad gradient


def cases_to_skip(why: str) -> tuple[list[Case], StepInputs]:
    cases = [
        make_case(weight, FLOAT32, state, 700, seed=i, amsgrad=True, step=i)
        for i, (weight, state) in enumerate(itertools.product(WEIGHTS, FLOATS))
    ]
    cases = [case._replace(grad=ordinary(700, BFLOAT16, 5)) for case in cases]
    inputs = StepInputs(scale=torch.tensor(4.0), max_norm=1.0, skip_nonfinite=True)
    if why == "gradient":
        cases[3].grad[699] = math.nan
    elif why == "found_inf":
        inputs = inputs._replace(found_inf=torch.tensor(2.0))  # two devices may have added up
    else:
        cases[17].grad[0] = 3e38
        inputs = inputs._replace(scale=torch.tensor(0.25))
    return cases, inputs
