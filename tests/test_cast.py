"""cast_ of the native backend against the reference, bit for bit: every 16-bit value, every float32 at a boundary.

Guards: a tie rounded away, an overflow to the largest number instead of Inf, a NaN that becomes Inf, a flushed
denormal, random words that follow the thread or the block instead of the element.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from adversarial import FLOAT32, FLOATS, NARROW, awkward, boundary_patterns, every_pattern
from bits import assert_all_same_bits
from conditions import ALL, EVERY_ISA
from torch import Tensor

from halfstep.ops import native_cpu, reference_torch


def cast(backend, src: list[Tensor], dtype: torch.dtype, stochastic: bool, seed: int) -> list[Tensor]:
    dst = [torch.full_like(s, 7, dtype=dtype) for s in src]
    backend.cast_(dst, src, stochastic=stochastic, seed=seed)
    return dst


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("source", "target"), [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_every_value(source, target, stochastic):
    """All 65,536 values of a 16-bit source; of float32 each value and midpoint of both 16-bit dtypes, +- 1."""
    values = boundary_patterns() if source == FLOAT32 else every_pattern(source)
    expected = cast(reference_torch, [values], target, stochastic, seed=11)
    for conditions in EVERY_ISA:
        with conditions.hold():
            assert_all_same_bits(cast(native_cpu, [values], target, stochastic, 11), expected, str(conditions))


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_lists_under_any_conditions(conditions, lists):
    for (dtype, stochastic, seed), (src, expected) in lists.items():
        with conditions.hold():
            got = cast(native_cpu, src, dtype, stochastic, seed)
        assert_all_same_bits(got, expected, f"{dtype} {stochastic} {seed}")


@pytest.fixture(scope="module")
def lists():
    """Tensors that straddle the units of work; an element's random word depends on list place and index only."""
    src = [awkward(n, FLOATS[i % 3], i) for i, n in enumerate((0, 1, 2, 3, 511, 0, 65533, 513, 70001, 4, 0))]
    cases = [(dtype, stochastic, 5) for dtype in FLOATS for stochastic in (False, True)] + [
        (NARROW[0], True, 2**32 - 1)
    ]
    return {case: (src, cast(reference_torch, src, *case)) for case in cases}


def test_the_words_follow_the_element_and_the_seed():
    """The same element at the same place rounds alike whatever else is in the list; another seed or place differs."""
    x = awkward(5000, FLOAT32, 1)
    alone = cast(native_cpu, [x], NARROW[0], True, 3)[0]
    assert_all_same_bits([cast(native_cpu, [x, x], NARROW[0], True, 3)[0]], [alone], "a longer list")
    assert_all_same_bits([cast(native_cpu, [x[:777]], NARROW[0], True, 3)[0]], [alone[:777]], "a shorter tensor")
    others = [cast(native_cpu, [x], NARROW[0], True, 4)[0], cast(native_cpu, [x, x], NARROW[0], True, 3)[1]]
    assert all(not torch.equal(o.view(torch.int16), alone.view(torch.int16)) for o in others)
