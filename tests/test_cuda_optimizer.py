"""The CUDA optimizer phase under the emulator against the CPU's kernels, bit for bit: awkward data, every mode.

Guards: a mode that differs between the backends, a head or tail handled twice or not at all, a result that
depends on the order of threads or blocks, scratch memory read before it is written, launches that grow with groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from adam_rows import WEIGHT_IDS, WEIGHTS, Case, assert_same_step, make_case, run
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, ordinary
from bits import assert_all_same_bits, assert_same_bits
from canary import Guarded
from emulated_cuda import ASCENDING, DESCENDING, ORDER_IDS, ORDERS, SHUFFLED, emulated, launches, ordered
from optimizer_cases import FACTORS, GROUPS, TO_SKIP, awkward_cases, cases_to_skip, whole_phase_cases

from halfstep.ops import native_cpu
from halfstep.reference import AdamGroup
from halfstep.reference.step import StepInputs

USUAL_SIZES = [1, 3, 4, 5, 1023, 16384, 16387, 3 * 16384 + 1, 70001]
MISALIGNED_SIZES = [1, 2, 5, 1030, 16385]


@pytest.fixture(params=ORDERS, ids=ORDER_IDS)
def order(request):
    """Of threads and blocks; a module that runs these tests on another backend has a fixture of its own."""
    return request.param


@pytest.mark.parametrize("state", FLOATS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("inputs", FACTORS.values(), ids=FACTORS)
def test_update_on_awkward_data(weight, state, inputs):
    """As the CPU's test: 24 rows of every group, gradient dtype, step and counter of random words."""
    cases = awkward_cases(weight, state)
    modes = itertools.product((False, True), repeat=2)
    for (stochastic, heal), order in zip(modes, (ASCENDING, DESCENDING, SHUFFLED, SHUFFLED), strict=True):
        options = inputs._replace(seed=2**32 - 5, stochastic_weight=stochastic, heal=heal)
        expected = run(native_cpu, cases, GROUPS, options)
        with ordered(order):
            got = run(emulated(), cases, GROUPS, options)
        assert_same_step(got, expected, cases, (order, stochastic, heal))


@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
def test_the_usual_kinds(weight):
    """Each has an instance of its own: gradients of the weight's dtype, float32 states. Blocks, packs and rests."""
    cases = [make_case(weight, weight[0], FLOAT32, n, seed=n, group=i, step=i) for i, n in enumerate(USUAL_SIZES)]
    for heal in (False, True):
        inputs = StepInputs(scale=torch.tensor(8.0), heal=heal)
        expected = run(native_cpu, cases, GROUPS, inputs)
        assert_same_step(run(emulated(), cases, GROUPS, inputs), expected, cases, heal)


def test_whole_phase(order):
    """Scale, norm, clip and update of tensors that straddle chunks and blocks, with empty ones between them."""
    cases, inputs = whole_phase_cases()
    expected = run(native_cpu, cases, GROUPS, inputs)
    assert not expected.result.skipped
    assert expected.result.norm > 1
    with ordered(order):
        got = run(emulated(), cases, GROUPS, inputs)
    assert_same_step(got, expected, cases, order)


def launches_of_run(cases: list[Case], groups: list[AdamGroup], inputs: StepInputs, where: Any) -> int:
    """How many `run` takes, the whole step. It must leave the bits of the CPU's grad_stats and update."""
    expected = run(native_cpu, cases, groups, inputs)
    assert expected.stats is not None
    rows = [case.row._replace(**{k: t.clone() for k, t in tensors_of(case).items() if k != "grad"}) for case in cases]
    plan = emulated().AdamPlan(rows)
    plan.set_grads([case.grad for case in cases])
    with launches() as made:
        result, first_bad = plan.run(groups, inputs, with_stats=True)
    assert_same_bits(first_bad, expected.stats[1], "first_bad")
    assert_same_step(expected._replace(rows=rows, result=result), expected, cases, where)
    return len(made)


def test_three_launches(order):
    """One for each pass and one between them."""
    cases, inputs = whole_phase_cases()
    cases = [case for case in cases if case.row.param.dtype == FLOAT32]
    with ordered(order):
        assert launches_of_run(cases, GROUPS, inputs, order) == 3


@pytest.mark.parametrize("why", TO_SKIP)
def test_a_skipped_step_changes_no_bit(why):
    cases, inputs = cases_to_skip(why)
    got = run(emulated(), cases, GROUPS, inputs)
    assert bool(got.result.skipped)
    assert got.stats is not None
    assert got.stats[1] == TO_SKIP[why]
    assert_same_step(got, run(native_cpu, cases, GROUPS, inputs), cases, why)
    for case, row in zip(cases, got.rows, strict=True):
        assert_all_same_bits(row[:6], case.row[:6], case.name)


@pytest.mark.parametrize(
    "shifts", [(1, 1, 1, 1, 1), (3, 3, 3, 3, 3), (1, 0, 0, 0, 0), (0, 0, 0, 2, 0), (0, 1, 2, 3, 1)]
)
@pytest.mark.parametrize(
    ("weight", "grad", "state"),
    [
        ((FLOAT32, None), FLOAT32, FLOAT32),
        ((BFLOAT16, "master"), BFLOAT16, FLOAT32),
        ((BFLOAT16, "remainder"), BFLOAT16, FLOAT32),
        ((FLOAT16, "master"), FLOAT32, BFLOAT16),
    ],
    ids=str,
)
def test_views_that_are_not_aligned(weight, grad, state, shifts):
    """All moved alike: packs from the first aligned element on. Moved differently: single elements."""
    for size in MISALIGNED_SIZES:
        case = make_case(weight, grad, state, size, seed=size, amsgrad=True)
        expected = run(native_cpu, [case], GROUPS, StepInputs())
        guarded = {
            name: Guarded(tensor, shift=shift)
            for (name, tensor), shift in zip(tensors_of(case).items(), (*shifts, 0, 0), strict=False)
        }
        row = case.row._replace(**{name: g.tensor for name, g in guarded.items() if name != "grad"})
        plan = emulated().AdamPlan([row])
        plan.set_grads([guarded["grad"].tensor])
        result = plan.update(GROUPS, StepInputs())
        got = expected._replace(rows=[row], result=result)
        assert_same_step(got, expected, [case], (size, shifts))
        for name, g in guarded.items():
            g.assert_intact(f"{name} of {case.name}")


@pytest.mark.parametrize("dtype", [FLOAT32, torch.float64], ids=str)
@pytest.mark.parametrize("where", [0, 1])
def test_a_learning_rate_on_the_device(dtype, where):
    """Read by the prologue; nothing of it passes through the host."""
    cases = [make_case(WEIGHTS[2], BFLOAT16, FLOAT32, 300, seed=i, group=i, step=4) for i in range(2)]
    groups = [
        g._replace(lr=torch.tensor(0.3, dtype=dtype).item()) if i == where else g for i, g in enumerate(GROUPS[:2])
    ]
    on_device = [g._replace(lr=torch.tensor(0.3, dtype=dtype)) if i == where else g for i, g in enumerate(GROUPS[:2])]
    expected = run(native_cpu, cases, groups, StepInputs())
    assert_same_step(run(emulated(), cases, on_device, StepInputs()), expected, cases, dtype)


@cache
def small_cases(weight: tuple[torch.dtype, str | None]) -> list[Case]:
    """1,000 of them, a group each, with nothing to skip for."""
    cases = [make_case(weight, weight[0], FLOAT32, 3 + i % 5, seed=i, group=i) for i in range(1000)]
    return [case._replace(grad=ordinary(case.grad.numel(), case.grad.dtype, 1)) for case in cases]


def hyper(groups: int) -> list[AdamGroup]:
    return [GROUPS[i % len(GROUPS)]._replace(lr=1e-3 * (i + 1)) for i in range(groups)]


CLIPPED = StepInputs(max_norm=1.0, skip_nonfinite=True, stochastic_weight=True)


@pytest.mark.parametrize("groups", [1, 465, 1000])
@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
def test_launches_of_1000_small_tensors(weight, groups):
    cases = [case._replace(row=case.row._replace(group=i % groups)) for i, case in enumerate(small_cases(weight))]
    usual = weight[1] is not None or weight[0] == FLOAT32
    # one for the statistics; one between the passes for every 620 groups; one update for every 406 to 580 rows
    expected = 1 + (2 if groups == 1000 else 1) + (2 if usual else 3)
    assert launches_of_run(cases, hyper(groups), CLIPPED, groups) == expected


def launches_of_mix(kinds: Sequence[int], even: bool) -> int:
    """Of a step over 1,000 tensors of these WEIGHTS: as many of each, or one of each and the rest of the last."""
    drawn = [kinds[i % len(kinds)] if even else kinds[min(i, len(kinds) - 1)] for i in range(1000)]
    cases = [small_cases(WEIGHTS[kind])[i] for i, kind in enumerate(drawn)]
    return launches_of_run(cases, hyper(1000), CLIPPED._replace(heal=even), (kinds, even))


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("kinds", [(1, 4, 3), (5, 3, 2, 0), range(6)], ids=["3 kinds", "4 kinds", "6 kinds"])
def test_1000_small_tensors_of_mixed_kinds(kinds, even):
    """Every combination of kinds is in test_cuda_launches.py. Even: with stale masters, uneven: masters are trusted."""
    assert launches_of_mix(kinds, even) <= 6


def test_few_tensors_of_mixed_kinds_share_a_launch():
    """Packs and rests, stale masters, split pairs that nobody made. A large tensor has the launch of its kind."""
    sizes = [5, 1030, 16384]
    cases = [make_case(WEIGHTS[i % 6], WEIGHTS[i % 6][0], FLOAT32, sizes[i // 6], seed=i, group=i) for i in range(18)]
    cases.append(make_case(WEIGHTS[2], BFLOAT16, FLOAT32, 16385, seed=20))
    cases = [case._replace(grad=ordinary(case.grad.numel(), case.grad.dtype, 1)) for case in cases]
    assert launches_of_run(cases[:-1], GROUPS, CLIPPED, "small") == 3
    assert launches_of_run(cases, GROUPS, CLIPPED, "one is large") == 4


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    fields = {**case.row._asdict(), "grad": case.grad}
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq", "step")
    return {name: fields[name] for name in names if fields[name] is not None}
