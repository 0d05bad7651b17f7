"""Rows of the fused update over awkward data, and one step of them on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, awkward, generator
from bits import assert_same_bits
from torch import Tensor

from halfstep.reference import AdamGroup, round_to, split_master
from halfstep.reference.step import AdamRow, StepInputs, StepResult

# A parameter's dtype and what it keeps beside itself
WEIGHTS = [
    (FLOAT32, None),
    (BFLOAT16, None),
    (BFLOAT16, "master"),
    (BFLOAT16, "remainder"),
    (FLOAT16, None),
    (FLOAT16, "master"),
]
WEIGHT_IDS = [f"{str(dtype).removeprefix('torch.')}-{kept}" for dtype, kept in WEIGHTS]


class Case(NamedTuple):
    """A row, its gradient, and what to call it when it is wrong."""

    row: AdamRow
    grad: Tensor
    name: str


def make_case(
    weight: tuple[torch.dtype, str | None], grad: torch.dtype, state: torch.dtype, size: int, seed: int, *,
    amsgrad: bool = False, group: int = 0, step: int = 0, param_id: int = 0, first_index: int = 0,
) -> Case:  # fmt: skip
    """A row of `size` awkward elements. Every eighth master is stale, every eighth split pair not a split."""
    dtype, kept = weight
    wide = awkward(size, FLOAT32, seed)
    param, master = round_to(wide, dtype), None
    foreign = torch.randint(0, 8, (size,), generator=generator(seed + 10)) == 0
    if kept == "master":
        master = wide
    elif kept == "remainder":
        param, master = split_master(wide)
        other = torch.randint(-(2**15), 2**15, (size,), generator=generator(seed + 20), dtype=torch.int16)
        master = torch.where(foreign, other, master)
    param = torch.where(foreign, awkward(size, dtype, seed + 30), param)
    second = [awkward(size, state, seed + k) for k in (50, 60)]
    # a second moment is not negative, except in a checkpoint somebody has broken
    second = [torch.where(awkward(size, FLOAT32, seed + 70) > 100, v, v.abs()) for v in second]
    row = AdamRow(
        param, awkward(size, state, seed + 40), second[0], second[1] if amsgrad else None, master,
        torch.tensor(step), group, param_id, first_index,
    )  # fmt: skip
    name = f"{dtype} {kept} grad {grad} state {state} size {size} amsgrad {amsgrad} group {group} step {step}"
    return Case(row, awkward(size, grad, seed + 80), name)


class Stepped(NamedTuple):
    rows: list[AdamRow]
    result: StepResult
    stats: tuple[Tensor, Tensor] | None


def run(backend: ModuleType, cases: Sequence[Case], groups: Sequence[AdamGroup], inputs: StepInputs) -> Stepped:
    """One step of copies of the rows. The first pass runs if the inputs ask for what it finds and do not bring it."""
    rows = [AdamRow(*(_copy(field) for field in case.row)) for case in cases]
    grads = [case.grad.clone() for case in cases]
    plan = backend.AdamPlan(rows)
    plan.set_grads(grads)
    stats = None
    if inputs.sum_squares is None and (inputs.max_norm is not None or inputs.skip_nonfinite):
        stats = plan.grad_stats(inputs.scale)
        inputs = inputs._replace(sum_squares=stats[0], first_bad=stats[1])
    result = plan.update(groups, inputs)
    for grad, case in zip(grads, cases, strict=True):
        assert_same_bits(grad, case.grad, f"gradient of {case.name}")
    return Stepped(rows, result, stats)


def assert_same_step(got: Stepped, expected: Stepped, cases: Sequence[Case], where: Any) -> None:
    assert (got.stats is None) == (expected.stats is None)
    for g, e in zip(got.stats or (), expected.stats or (), strict=True):
        assert_same_bits(g, e, f"{where}: grad_stats")
    for field in StepResult._fields:
        assert_same_bits(getattr(got.result, field), getattr(expected.result, field), f"{where}: {field}")
    for case, mine, theirs in zip(cases, got.rows, expected.rows, strict=True):
        for field in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "step", "param"):
            assert_same_bits(getattr(mine, field), getattr(theirs, field), f"{where}: {field} of {case.name}")


def _copy(field: Any) -> Any:
    return field.clone() if isinstance(field, Tensor) else field
