"""How many launches a CUDA step over tensors of many kinds (dtypes, masters) takes, and how many blocks each has.

Under the emulator, where in most of these tests only a block at each end of a grid runs.

Guards: a launch for each kind that has a few small tensors, tensors that are launched twice or never, or as another
kind, a large tensor that has lost the kernel of its kind, launches that grow with groups.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import pytest
import torch
from adam_rows import WEIGHTS, Case, make_case
from adversarial import FLOAT32
from emulated_cuda import ends_only, launches
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import GROUPS
from test_cuda_optimizer import launches_of_mix

from halfstep.reference.step import StepInputs

Kind = tuple[torch.dtype, str | None]
Counts = dict[Kind, int]  # tensors of each kind

PLAIN, BF16, BF16_MASTER, SPLIT, F16, F16_MASTER = WEIGHTS
BLOCK = 16384  # elements: a tensor that is not larger is small
OWN_TABLE, SHARED_TABLE = 580, 406  # tensors of one launch


class Step(NamedTuple):
    updates: list[int]  # blocks of each
    launches: int  # of all passes


@cache
def one(kind: Kind, size: int) -> Case:
    return make_case(kind, kind[0], FLOAT32, size, seed=size)


def step(small: Counts, large: Counts | None = None, *, groups: int = 1, heal: bool = True, size: int = 5) -> Step:
    """Large tensors are of two blocks. The tensors of a kind are the same one, since nobody looks at the results."""
    cases = [one(kind, size) for kind, count in small.items() for _ in range(count)]
    cases += [one(kind, BLOCK + 1) for kind, count in (large or {}).items() for _ in range(count)]
    hyper = [GROUPS[0]._replace(lr=1e-3 * (i + 1)) for i in range(groups)]
    with ends_only(1) as backend:
        plan = backend.AdamPlan([case.row._replace(group=i % groups) for i, case in enumerate(cases)])
        plan.set_grads([case.grad for case in cases])
        with launches() as made:
            plan.run(hyper, StepInputs(max_norm=1.0, heal=heal), with_stats=True)
    return Step([launch["grid"][0] for launch in made if launch["block"][0] == 256], len(made))


def usual(heal: bool) -> list[Kind]:
    """The kinds with a kernel of their own; a trusted float16 master has none."""
    return [PLAIN, BF16_MASTER, SPLIT, *([F16_MASTER] if heal else [])]


def fewest_updates(small: Counts, large: Counts, heal: bool) -> int:
    """Of all ways to give small tensors that some kinds have beyond full tables to the launches that take any kind."""
    own = [small.get(kind, 0) + large.get(kind, 0) for kind in usual(heal)]
    unusual = sum(small.values()) + sum(large.values()) - sum(own)
    rest = [count % OWN_TABLE for count in own]
    choices = [
        (False, True) if left <= small.get(kind, 0) else (False,) for kind, left in zip(usual(heal), rest, strict=True)
    ]

    def updates_if(given_away: tuple[bool, ...]) -> int:
        shared = unusual + sum(itertools.compress(rest, given_away))
        alone = sum(count > 0 and not away for count, away in zip(rest, given_away, strict=True))
        return sum(count // OWN_TABLE for count in own) + alone + -(-shared // SHARED_TABLE)

    return min(map(updates_if, itertools.product(*choices)))


def parts(weights: tuple[Kind, ...], shares: str) -> Counts:
    """1,000 tensors: in even parts, or all but one of each other kind."""
    others = 1 if shares == "uneven" else 1000 // len(weights)
    return dict.fromkeys(weights, others) | {weights[0]: 1000 - others * (len(weights) - 1)}


@pytest.mark.parametrize("shares", ["even", "uneven"])
@pytest.mark.parametrize("count", range(1, 7))
def test_1000_small_tensors_take_6_launches_whatever_their_kinds(count, shares):
    for weights in itertools.combinations(WEIGHTS, count):
        small = parts(weights, shares)
        for groups, most in ((1, 5), (1000, 6)):
            made = step(small, groups=groups)
            assert made.launches <= most, (weights, made)
            assert sum(made.updates) == 1000, (weights, made)
            assert len(made.updates) == fewest_updates(small, {}, heal=True), (weights, made)


MIXES = [mix for count in range(2, 7) for mix in itertools.combinations(range(6), count)]


@pytest.mark.parametrize("number", range(len(MIXES)), ids=["".join(map(str, mix)) for mix in MIXES])
def test_shared_launches_change_no_bit(number):
    """All blocks of 1,000 tensors of every combination of kinds, which take turns in being even parts."""
    mix = MIXES[number]
    turned = mix[number % len(mix) :] + mix[: number % len(mix)]  # whose last kind most tensors are of
    assert 5 <= launches_of_mix(turned, even=number % 2 == 0) <= 6


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5), st.permutations(WEIGHTS), st.booleans())
def test_1000_small_tensors_in_any_parts(cuts, weights, heal):
    ends = [0, *sorted(cuts), 1000]
    small = {kind: end - begin for kind, begin, end in zip(weights, ends[:-1], ends[1:], strict=True)}
    made = step(small, groups=1000, heal=heal)
    assert made.launches <= 6
    assert sum(made.updates) == 1000
    assert len(made.updates) == fewest_updates(small, {}, heal)


@pytest.mark.parametrize(
    ("small", "updates"),
    [
        ({PLAIN: 1}, [1]),
        ({PLAIN: 1, BF16: 1}, [2]),
        ({PLAIN: 200, F16_MASTER: 206}, [406]),
        ({PLAIN: 200, F16_MASTER: 207}, [200, 207]),  # one table more, one launch less: nothing is won
        ({PLAIN: 994, BF16_MASTER: 2, SPLIT: 2, F16: 2}, [580, 414, 6]),
        ({PLAIN: 250, BF16_MASTER: 250, SPLIT: 250, F16_MASTER: 250}, [250, 406, 344]),
        ({PLAIN: 581, BF16_MASTER: 209, SPLIT: 210}, [580, 210, 210]),
        ({PLAIN: 580, BF16_MASTER: 1, SPLIT: 1}, [580, 2]),
    ],
    ids=lambda numbers: "-".join(map(str, numbers.values() if isinstance(numbers, dict) else numbers)),
)
def test_who_shares(small, updates):
    assert sorted(step(small).updates) == sorted(updates)


@pytest.mark.parametrize("kind", usual(heal=True), ids=str)
def test_a_large_tensor_keeps_the_kernel_of_its_kind(kind):
    other = F16_MASTER if kind == PLAIN else PLAIN
    assert step({kind: 1, other: 1}, size=BLOCK).updates == [2]
    assert sorted(step({other: 1, BF16: 1}, {kind: 1}).updates) == [2, 2]
    # small tensors of its kind go with it: a launch that they would not save
    assert sorted(step({kind: 3, other: 1, BF16: 1}, {kind: 1}).updates) == [2, 5]
    # where they are beyond its table, they need not
    assert sorted(step({kind: 581, BF16: 1}, {kind: 1}).updates) == [3, 581]


@pytest.mark.parametrize("shares", ["even", "uneven"])
@pytest.mark.parametrize("count", range(1, 5))
def test_large_tensors_among_1000_cost_one_launch_for_each_of_their_kinds(count, shares):
    for kinds in itertools.combinations(usual(heal=True), count):
        large = dict.fromkeys(kinds, 3)
        for first in range(6):
            small = parts((*WEIGHTS[first:], *WEIGHTS[:first]), shares)
            small[WEIGHTS[first]] -= 3 * count  # 1,000 in all
            made = step(small, large, groups=1000)
            assert made.launches <= 6 + count, (kinds, small, made)
            assert sum(made.updates) == 1000 + 3 * count, (kinds, small, made)
            assert len(made.updates) == fewest_updates(small, large, heal=True), (kinds, small, made)
