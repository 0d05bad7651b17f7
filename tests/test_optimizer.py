"""The native optimizer phase against the reference, bit for bit: awkward data, every mode, every instruction set.

Guards: a contracted multiply-add, a flushed denormal, a tie rounded away, a mode that one instruction set or one tail
loop handles differently, a result that depends on the partition into threads.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from adam_rows import WEIGHT_IDS, WEIGHTS, assert_same_step, make_case, run
from adversarial import FLOAT32, FLOATS
from bits import assert_all_same_bits
from conditions import ALL, EVERY_ISA, Conditions
from optimizer_cases import FACTORS, GROUPS, TO_SKIP, awkward_cases, cases_to_skip, whole_phase_cases

from halfstep import _cpu
from halfstep.ops import native_cpu, reference_torch
from halfstep.reference import AdamGroup, adam_scalars
from halfstep.reference.step import StepInputs, decide


@pytest.mark.parametrize("state", FLOATS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("inputs", FACTORS.values(), ids=FACTORS)
def test_update_on_awkward_data(weight, state, inputs):
    """24 rows: every group, amsgrad and every gradient dtype among them; sizes with and without blocks and tails."""
    cases = awkward_cases(weight, state)
    for stochastic, heal in itertools.product((False, True), repeat=2):
        options = inputs._replace(seed=2**32 - 5, stochastic_weight=stochastic, heal=heal)
        with Conditions("", 1).hold():  # threads only cost time here
            expected = run(reference_torch, cases, GROUPS, options)
        finite = torch.cat([row.param.isfinite() for row in expected.rows])
        assert finite.float().mean() > 0.5  # or NaN would hide what is compared
        assert int(expected.result.healed) > 0 or weight[1] != "master" or not heal
        for conditions in EVERY_ISA:
            with conditions.hold():
                got = run(native_cpu, cases, GROUPS, options)
            assert_same_step(got, expected, cases, (conditions, stochastic, heal))


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_whole_phase_under_any_conditions(conditions, whole_phase):
    """Scale, norm, clip and update of tensors that straddle the units of work, with empty ones between them; two of a
    group are at different steps."""
    cases, inputs, expected = whole_phase
    with conditions.hold():
        got = run(native_cpu, cases, GROUPS, inputs)
    assert_same_step(got, expected, cases, conditions)


@pytest.fixture(scope="module")
def whole_phase():
    cases, inputs = whole_phase_cases()
    with Conditions("", 1).hold():
        expected = run(reference_torch, cases, GROUPS, inputs)
    assert not expected.result.skipped
    assert expected.result.norm > 1
    return cases, inputs, expected


@pytest.mark.parametrize("why", TO_SKIP)
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_a_skipped_step_changes_no_bit(conditions, why):
    cases, inputs = cases_to_skip(why)
    with conditions.hold():
        got = run(native_cpu, cases, GROUPS, inputs)
    assert bool(got.result.skipped)
    assert got.stats[1] == TO_SKIP[why]
    for case, row in zip(cases, got.rows, strict=True):
        assert_all_same_bits(row[:6], case.row[:6], case.name)
    assert_same_step(got, run(reference_torch, cases, GROUPS, inputs), cases, why)


@pytest.mark.parametrize("flush", [False, True])
def test_the_callers_float_mode_is_left_as_it_was(flush):
    with Conditions("", 2, flush).hold():
        case = make_case(WEIGHTS[0], FLOAT32, FLOAT32, 70000, seed=0)
        run(native_cpu, [case], GROUPS, StepInputs(skip_nonfinite=True, max_norm=1.0))
        run(native_cpu, [case], GROUPS, StepInputs())
        native_cpu.unscale_([case.grad], torch.tensor(1.0))
        native_cpu.cast_([torch.empty(70000)], [case.grad], stochastic=False, seed=0)
        kept = torch.tensor([1e-40]) * 1
    assert kept.view(torch.int32).item() == 0 if flush else kept.item() > 0


@pytest.mark.parametrize("flush", [False, True])
def test_scalars_of_a_step(flush):
    """What is computed in float64 and rounded once: for any hyper-parameters and any step, the reference's bits."""
    draw = random.Random(0)
    cases = []
    for _ in range(2000):
        lr, eps, decay = (draw.choice([0.0, 10 ** draw.uniform(-44, 1)]) for _ in range(3))
        beta1, beta2 = (draw.choice([0.0, draw.random(), 1 - 10 ** draw.uniform(-9, 0)]) for _ in range(2))
        group = AdamGroup(lr, beta1, beta2, eps, decay, draw.random() < 0.5, False)
        t = draw.choice([1, 2, draw.randrange(1, 2**20), draw.randrange(1, 2**40)])
        expected = adam_scalars(group, t)
        expected = expected._replace(
            weight_decay=0.0 if group.decoupled else expected.weight_decay,
            decay=expected.decay if group.decoupled and expected.weight_decay else 1.0,
        )
        cases.append((group, t, tuple(expected)))
    with Conditions("", 1, flush).hold():
        got = [_cpu.adam_scalars(group, t) for group, t, _ in cases]
    assert got == [expected for _, _, expected in cases]


@pytest.mark.parametrize("flush", [False, True])
def test_decision_of_a_step(flush):
    """Norm, factor and skip: also with Inf and NaN norms, a zero or tiny max_norm, scales of 0 and Inf."""
    draw = random.Random(1)
    cases = []
    for _ in range(2000):
        total = draw.choice([0.0, 10 ** draw.uniform(-90, 80), math.inf, math.nan])
        scale = torch.tensor(draw.choice([0.0, 1.0, 2.0 ** draw.randrange(-20, 127), draw.random(), math.inf]))
        max_norm = draw.choice([None, 0.0, 1e-42, 1.0, draw.random(), math.inf])
        bad, skip, found = draw.choice([-1, 0, 9]), draw.random() < 0.5, draw.choice([None, 0.0, 0.5, 2.0])
        inputs = StepInputs(
            scale, torch.tensor(total).double(), torch.tensor(bad), max_norm, skip,
            None if found is None else torch.tensor(found),
        )  # fmt: skip
        numbers = (
            inputs.sum_squares.item(), scale.item(), -1.0 if max_norm is None else max_norm, bad >= 0, skip,
            found is not None and found > 0,
        )  # fmt: skip
        cases.append((numbers, tuple(decide(inputs))))
    with Conditions("", 1, flush).hold():
        got = [_cpu.decide(*numbers) for numbers, _ in cases]
    for mine, (numbers, expected) in zip(got, cases, strict=True):
        assert repr(mine) == repr(expected), numbers  # NaN equals NaN, -0.0 is not 0.0
