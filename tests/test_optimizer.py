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
from adversarial import BFLOAT16, FLOAT32, FLOATS, ordinary
from bits import assert_all_same_bits
from conditions import ALL, EVERY_ISA, Conditions

from halfstep import _cpu
from halfstep.ops import native_cpu, reference_torch
from halfstep.reference import AdamGroup, adam_scalars
from halfstep.reference.step import StepInputs, decide

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


@pytest.mark.parametrize("state", FLOATS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("inputs", FACTORS.values(), ids=FACTORS)
def test_update_on_awkward_data(weight, state, inputs):
    """24 rows: every group, amsgrad and every gradient dtype among them; sizes with and without blocks and tails."""
    cases = [
        make_case(
            weight, FLOATS[(i + i // 3) % 3], state, 512 * (i % 3) + i, seed=100 * i, amsgrad=i // 2 % 2 == 1, group=i,
            step=STEPS[i // 3 % 4], param_id=PARAM_IDS[i % 4], first_index=FIRST_INDICES[i // 2 % 4],
        )
        for i in range(24)
    ]  # fmt: skip
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
    with Conditions("", 1).hold():
        expected = run(reference_torch, cases, GROUPS, inputs)
    assert not expected.result.skipped
    assert expected.result.norm > 1
    return cases, inputs, expected


@pytest.mark.parametrize("why", ["gradient", "overflow in the unscaling", "found_inf"])
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_a_skipped_step_changes_no_bit(conditions, why):
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
    with conditions.hold():
        got = run(native_cpu, cases, GROUPS, inputs)
    assert bool(got.result.skipped)
    assert got.stats[1] == {"gradient": 3, "overflow in the unscaling": 17, "found_inf": -1}[why]
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
