"""The Triton optimizer phase in the interpreter against the CPU's kernels, bit for bit: awkward data, every mode.

Guards: a mode that differs between the backends, a tile handled twice or not at all, scratch memory read before it is
written, memory touched beside a tensor, launches that grow with tensors or groups.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import test_cuda_optimizer
import torch
from adam_rows import WEIGHT_IDS, WEIGHTS, Case, assert_same_step, make_case, run
from adversarial import BFLOAT16, FLOAT32, FLOATS
from interpreter import launches, names, strays
from optimizer_cases import FACTORS, GROUPS, awkward_cases, whole_phase_cases

# The same tests with other kernels and sizes, in the one order that the interpreter has (conftest.py)
from test_cuda_optimizer import (  # noqa: F401
    launches_of_run,
    test_a_learning_rate_on_the_device,
    test_a_skipped_step_changes_no_bit,
    test_the_usual_kinds,
    test_views_that_are_not_aligned,
    test_whole_phase,
)
from torch import Tensor

from halfstep.ops import native_cpu
from halfstep.reference.step import AdamRow, StepInputs

# Every weight and every state are also there on the oldest Triton
KINDS = [
    pytest.param(weight, state, id=f"{name} {state}", marks=[] if w % 3 == s else pytest.mark.newest)
    for w, (weight, name) in enumerate(zip(WEIGHTS, WEIGHT_IDS, strict=True))
    for s, state in enumerate(FLOATS)
]


@pytest.fixture(autouse=True)
def kernels(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_optimizer, "emulated", lambda: backend)
    monkeypatch.setattr(test_cuda_optimizer, "ordered", nullcontext)
    monkeypatch.setattr(test_cuda_optimizer, "launches", launches)
    monkeypatch.setattr(test_cuda_optimizer, "USUAL_SIZES", [1, 3, 5, 1023, 16387])
    monkeypatch.setattr(test_cuda_optimizer, "MISALIGNED_SIZES", [1, 5, 1030])


@pytest.mark.parametrize(("weight", "state"), KINDS)
def test_update_on_awkward_data(backend, weight, state):
    """24 rows of every group, gradient dtype, step and counter of random words."""
    cases = awkward_cases(weight, state)
    for factor, stochastic, heal in (("plain", False, True), ("factor", True, False)):
        inputs = FACTORS[factor]._replace(seed=2**32 - 5, stochastic_weight=stochastic, heal=heal)
        expected = run(native_cpu, cases, GROUPS, inputs)
        assert_same_step(run(backend, cases, GROUPS, inputs), expected, cases, (factor, stochastic, heal))


def test_a_whole_step_in_one_call():
    """`run` is grad_stats and update with the same bits; a launch for each dtype of gradients and each kind of rows."""
    cases, inputs = whole_phase_cases()
    full = [case for case in cases if case.grad.numel()]
    grads, kinds = {case.grad.dtype for case in full}, {kind_of(case) for case in full}
    assert launches_of_run(cases, GROUPS, inputs, "run") == len(grads) + 1 + len(kinds)


@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
def test_1000_tensors_of_one_kind_cost_three_launches(backend, weight):
    """Whatever their groups and sizes."""
    row = make_case(weight, weight[0], FLOAT32, 40, seed=1)
    cases = [sliced(row, 1 + i % 40)._replace(name=str(i)) for i in range(1000)]
    cases = [case._replace(row=case.row._replace(group=i % len(GROUPS))) for i, case in enumerate(cases)]
    assert names(planned(backend, cases)) == ["grad_stats", "prologue", "update"]


def test_mixed_kinds_cost_one_launch_each(backend):
    cases = [make_case(weight, weight[0], FLOAT32, 5, seed=i) for i, weight in enumerate(WEIGHTS * 3)]
    assert names(planned(backend, cases)) == ["grad_stats"] * 3 + ["prologue"] + ["update"] * 6
    amsgrad = [make_case(WEIGHTS[0], FLOAT32, state, 5, seed=1, amsgrad=a) for state in FLOATS for a in (True, False)]
    assert names(planned(backend, amsgrad)) == ["grad_stats", "prologue"] + ["update"] * 6


def test_more_rows_than_one_round_of_the_prologue(backend):
    """Most are empty, which makes their steps advance and costs no program."""
    cases = [
        make_case(WEIGHTS[2], BFLOAT16, FLOAT32, 3 * (i % 90 == 0), seed=i, group=i % len(GROUPS), step=i)
        for i in range(1100)
    ]
    cases = [case._replace(grad=case.grad.nan_to_num(1.0, 1.0, 1.0)) for case in cases]
    cases[990].grad[1] = float("inf")
    for skip in (False, True):
        inputs = StepInputs(max_norm=1.0, skip_nonfinite=skip)
        expected = run(native_cpu, cases, GROUPS, inputs)
        assert expected.stats is not None
        assert (bool(expected.result.skipped), int(expected.stats[1])) == (skip, 990)
        assert_same_step(run(backend, cases, GROUPS, inputs), expected, cases, skip)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("weight", "state"), [kind for kind in KINDS if not kind.marks])
def test_no_access_beside_the_tensors(backend, weight, state, shift):
    """Loads too, of which guard values tell nothing; whole tiles, rests, rows of other groups, a rate on the device."""
    made = [
        make_case(weight, grad, state, size + shift, seed=size, amsgrad=amsgrad, group=i)
        for i, (size, grad, amsgrad) in enumerate([(1030, BFLOAT16, True), (5, FLOAT32, False), (2048, FLOAT32, True)])
    ]
    cases = [shifted(case, shift) for case in made]
    rate = torch.tensor(0.1)
    groups = [GROUPS[0], GROUPS[1]._replace(lr=rate), GROUPS[2]]
    inputs = StepInputs(torch.tensor(4.0), max_norm=1.0, stochastic_weight=True, found_inf=torch.zeros(()))
    plan = backend.AdamPlan([case.row for case in cases])
    plan.set_grads([case.grad for case in cases])
    tensors = [t for case in cases for t in (*case.row, case.grad) if isinstance(t, Tensor)]
    with strays([*tensors, rate]) as found:
        plan.run(groups, inputs, with_stats=True)
    assert not found, found[:3]


# ---- rows and plans --------------------------------------------------------------------------------------------------
def planned(backend, cases):
    """The launches of a step that is not run."""
    plan = backend.AdamPlan([case.row for case in cases])
    plan.set_grads([case.grad for case in cases])
    with launches(run=False) as made:
        plan.run(GROUPS, StepInputs(max_norm=1.0), with_stats=True)
    return made


def kind_of(case: Case):
    row = case.row
    held = None if row.master is None else row.master.dtype
    return row.param.dtype, case.grad.dtype, row.exp_avg.dtype, held, row.max_exp_avg_sq is None


def shifted(case: Case, by: int) -> Case:
    """All tensors begin `by` elements later."""
    return Case(AdamRow(*(cut(field, by, None) for field in case.row)), case.grad[by:], case.name)


def sliced(case: Case, size: int) -> Case:
    return Case(AdamRow(*(cut(field, 0, size) for field in case.row)), case.grad[:size], case.name)


def cut(field, first: int, end: int | None):
    return field[first:end] if isinstance(field, Tensor) and field.ndim else field
