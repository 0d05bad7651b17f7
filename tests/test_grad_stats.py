"""grad_stats, unscale_ and clip_grad_norm_ of the native backend against the reference, bit for bit.

Guards: a chunk, lane or row added in another order; a square that overflows or vanishes in float32; an Inf or NaN that
the overflow check misses; a tensor that starts at an odd place of a thread's unit of work.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from adversarial import FLOAT32, FLOATS, awkward, ordinary
from bits import assert_all_same_bits, assert_same_bits
from conditions import ALL, EVERY_ISA
from torch import Tensor

import halfstep as hs
from halfstep.ops import backend, native_cpu, reference_torch
from halfstep.reference import round_to

# Around the rows of 1,024 lanes, the groups of 8 rows and the chunks of 65,536
SIZES = [0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 9217, 65535, 65536, 65537, 2 * 65536 + 3]
# Also scales and factors whose float32 reciprocal or value is a denormal
SCALES = [torch.tensor(scale) for scale in (2.0**16, 3.0, 2.0**-60, 2.0**127)]
FACTORS = [1.0, 2.0**-16, torch.tensor(1 / 3).item(), 2.0**60, 2.0**-140]


# What the 8 rows of a lane add up to in float32: ordinary; a sum that has lost a little, or all, to underflow; overflow
SPREADS = {"ordinary": 1.0, "small": 2.0**-55, "tiny": 2.0**-66, "smallest": 2.0**-140, "huge": 2.0**125}


def mixed(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Groups of 8 rows that are, in turn: of one spread, all zero, and of any spread or zero from lane to lane."""
    scales = torch.tensor([0.0, *SPREADS.values()])
    kind, lane = torch.arange(size) // (8 * 1024) % 7, torch.arange(size) % 6
    x = ordinary(size, FLOAT32, seed) * scales[torch.where(kind == 6, lane, kind)]
    return round_to(x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [*SPREADS, "mixed"])
def test_every_size_alone(kind, dtype):
    for i, size in enumerate(SIZES):
        values = mixed(size, dtype, size) if kind == "mixed" else ordinary(size, dtype, size, SPREADS[kind])
        for scale in (None, SCALES[i % 4]):
            expected = reference_torch.grad_stats([values], scale)
            for conditions in EVERY_ISA:
                with conditions.hold():
                    got = native_cpu.grad_stats([values], scale)
                assert_all_same_bits(got, expected, f"{size} / {scale} {conditions}")


@pytest.fixture(scope="module")
def a_list():
    """Norms of one order of magnitude: each tensor shows in the last bits of the sum."""
    sizes = [*SIZES, 3, *reversed(SIZES)]
    grads = [ordinary(n, FLOATS[i % 3], i, 2.0 ** (i % 5)) for i, n in enumerate(sizes)]
    tiny = [g * 2.0**-100 for g in grads if g.dtype != torch.float16]
    return [(g, s, reference_torch.grad_stats(g, s)) for g in (grads, tiny) for s in (None, SCALES[1], SCALES[3])]


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_a_list_under_any_conditions(conditions, a_list):
    for grads, scale, expected in a_list:
        with conditions.hold():
            got = native_cpu.grad_stats(grads, scale)
        assert_all_same_bits(got, expected, f"{scale} {conditions}")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_any_non_finite_element_is_found(conditions, value):
    """At the ends of tensors, rows, groups and chunks; the first bad tensor is named, whichever thread meets it."""
    for dtype, size in itertools.product(FLOATS, SIZES[1:]):
        grads = [torch.ones(n, dtype=dtype) for n in (size, 0, size, 9)]
        for place in {0, size - 1, size // 2, size - size % 8192 - 1, size - size % 1024 - 1}:
            grads[2][place] = value
            with conditions.hold():
                total, first_bad = native_cpu.grad_stats(grads, None)
            assert first_bad == 2, (dtype, size, place)
            assert not total.isfinite()
            grads[2][place] = 0
        grads[3][8] = value
        with conditions.hold():
            assert native_cpu.grad_stats(grads, None)[1] == 3


@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_overflow_of_the_unscaled_value_counts_and_that_of_the_sum_does_not(conditions):
    for size in (1, 1025, 8192, 65537):
        huge = torch.full((size,), 3e38)
        with conditions.hold():
            total, first_bad = native_cpu.grad_stats([torch.ones(2), huge], None)
            assert first_bad == -1
            assert total.isfinite()
            assert total > size * 8e76
            assert native_cpu.grad_stats([torch.ones(2), huge], torch.tensor(0.5))[1] == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_unscale(factor, dtype):
    grads = [awkward(n, dtype, n) for n in (70001, 0, 511, 512, 513, 1, 31)]
    expected = [g.clone() for g in grads]
    factor = torch.tensor(factor)
    first_bad = reference_torch.unscale_(expected, factor)
    for conditions in ALL if factor in (FACTORS[2], FACTORS[4]) else EVERY_ISA:
        got = [g.clone() for g in grads]
        with conditions.hold():
            assert_same_bits(native_cpu.unscale_(got, factor), first_bad, f"first bad, {conditions}")
        assert_all_same_bits(got, expected, str(conditions))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_unscale_reports_what_is_stored(conditions, dtype):
    """The largest number times 1 + 2^-6 is finite in float32 for a float16, and overflows when it is rounded back."""
    largest = torch.finfo(dtype).max
    for place in (0, 511, 512, 699):
        grads = [ordinary(700, dtype, 0), ordinary(700, dtype, 1)]
        grads[1][place] = largest
        expected = [g.clone() for g in grads]
        with conditions.hold():
            first_bad = native_cpu.unscale_(grads, torch.tensor(1 + 2.0**-6))
        assert first_bad == 1
        assert reference_torch.unscale_(expected, torch.tensor(1 + 2.0**-6)) == 1
        assert_all_same_bits(grads, expected, str(place))


@pytest.mark.parametrize("call", [hs.unscale_, torch.ops.halfstep.unscale_], ids=["function", "operator"])
@pytest.mark.parametrize("before", [0.0, 1.0, 2.0])
def test_found_inf_is_raised_and_never_lowered(before, call):
    """Several calls, or several devices, share one flag; found already, by whatever number, it stays."""
    for value, after in ((1.0, before), (math.inf, max(before, 1.0))):
        found_inf = torch.tensor([before], dtype=torch.float64)
        call([torch.ones(3), torch.tensor([value])], torch.tensor(0.5), found_inf)
        assert found_inf.item() == after


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_clip(conditions, max_norm):
    for spoiled in (None, math.inf, math.nan):
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 0, 70001, 1)]
        for i, p in enumerate(params[:3]):
            p.grad = ordinary(p.numel(), FLOAT32, i)
        if spoiled is not None:
            params[2].grad[70000] = spoiled
        before = [p.grad.clone() for p in params[:3]]
        with conditions.hold():
            norm = hs.clip_grad_norm_(params, max_norm)
        got = [p.grad for p in params[:3]]
        for p, g in zip(params, before, strict=False):
            p.grad = g
        with backend.override(reference_torch):
            assert_same_bits(norm, hs.clip_grad_norm_(params, max_norm), "norm")
        assert_all_same_bits(got, before, f"{max_norm} {spoiled}")
        assert params[3].grad is None
