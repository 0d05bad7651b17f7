"""l2_norms and the sums of squares behind it: native against the reference bit for bit, and against grad_stats.

Guards: a sum that lands at another tensor's place, a chunk of one tensor added to its neighbour's, an order that
differs from the global norm's, a square root that is an ulp off, an Inf that spoils the sums of others. (The order
itself and its error bound: test_reference_grad_stats.py.)
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, awkward, ordinary
from bits import assert_all_same_bits, assert_same_bits
from conditions import ALL, EVERY_ISA
from torch import Tensor

import halfstep as hs
from halfstep.ops import native_cpu, reference_torch

# Around the rows of 1,024 lanes, the groups of 8 rows and the chunks of 65,536
SIZES = [0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 9217, 65535, 65536, 65537, 2 * 65536 + 3]
# What squares in float32 do: add up as they are, lose digits or all to underflow, overflow
SPREADS = {"ordinary": 1.0, "small": 2.0**-55, "smallest": 2.0**-130, "huge": 2.0**125}
CASES = [(spread, dtype) for spread in SPREADS for dtype in FLOATS if spread == "ordinary" or dtype != FLOAT16]


def numbers(size: int, dtype: torch.dtype, seed: int, spread: str) -> Tensor:
    largest = torch.finfo(dtype).max
    return ordinary(size, dtype, seed, SPREADS[spread]).clamp(-largest, largest)


@pytest.fixture(scope="module")
def some_lists() -> list[tuple[list[Tensor], tuple[Tensor, Tensor]]]:
    """Sums of one order of magnitude, also such small ones that they fill float64's digits: the order of the tensors
    shows in the last bits of the total. All spreads; any bits. With empty tensors first, last and between.
    """
    sizes = [*SIZES, *reversed(SIZES)]
    alike = [ordinary(n, FLOATS[i % 3], i, 2.0 ** (i % 5)) for i, n in enumerate(sizes)]
    tiny = [t * 2.0**-66 for t in alike if t.dtype != FLOAT16]
    cases = itertools.cycle(CASES)
    unlike = [numbers(n, dtype, i, spread) for (i, n), (spread, dtype) in zip(enumerate(sizes), cases, strict=False)]
    wild = [awkward(n, FLOATS[i % 3], i) for i, n in enumerate((0, 3, 70001, 0, 1025, 9))]
    return [(tensors, reference_torch.sums_of_squares(tensors)) for tensors in (alike, tiny, unlike, wild)]


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_lists_under_any_conditions(conditions, some_lists):
    for tensors, expected in some_lists:
        with conditions.hold():
            got = native_cpu.sums_of_squares(tensors)
        assert_all_same_bits(got, expected, f"{conditions}: sums, total")


@pytest.mark.parametrize(("spread", "dtype"), CASES, ids=str)
def test_every_size_alone_and_in_a_list(spread, dtype):
    """The sum of a tensor does not depend on what is beside it; the total is grad_stats'."""
    tensors = [numbers(n, dtype, n, spread) for n in SIZES]
    sums, total = reference_torch.sums_of_squares(tensors)
    for conditions in EVERY_ISA:
        with conditions.hold():
            assert_all_same_bits(native_cpu.sums_of_squares(tensors), (sums, total), str(conditions))
            assert_same_bits(total, native_cpu.grad_stats(tensors, None)[0], "total")
            for i, tensor in enumerate(tensors):
                alone, total_alone = native_cpu.sums_of_squares([tensor])
                assert_all_same_bits((alone[0], total_alone), (sums[i], sums[i]), f"{conditions}, size {SIZES[i]}")
    assert (sums[1:] > 0).all()
    assert sums.isfinite().all()


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_tensors_and_chunks_add_in_order(conditions):
    """Each of four squares is lost beside a 1 in float64; the four of them together are not."""
    values = torch.tensor([1.0] + [2.0**-27] * 4)
    chunks = torch.zeros(5, 2**16)
    chunks[:, 77] = values
    with conditions.hold():
        for one, many in ((values.split(1), chunks), (values.flip(0).split(1), chunks.flip(0))):
            total, of_chunks = native_cpu.sums_of_squares(list(one))[1], native_cpu.sums_of_squares([many])[0]
            assert total.item() == of_chunks.item() == (1.0 if one[0] == 1 else 1 + 2.0**-52)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("conditions", EVERY_ISA, ids=str)
def test_what_is_not_finite_spoils_its_own_sum_and_the_total(conditions, value):
    for size in (1, 1025, 8192, 65537):
        tensors = [ordinary(size, dtype, i) for i, dtype in enumerate(FLOATS)]
        before, _ = native_cpu.sums_of_squares(tensors)
        for place in {0, size // 2, size - 1}:
            spoiled = [tensors[0], tensors[1].clone(), tensors[2]]
            spoiled[1][place] = value
            with conditions.hold():
                sums, total = native_cpu.sums_of_squares(spoiled)
            assert_same_bits(sums[::2], before[::2], f"{size}, {place}")
            for found in (sums[1], total):
                assert found.isnan() if math.isnan(value) else found == math.inf


def test_the_norms_are_correctly_rounded_roots():
    """torch.sqrt on a CPU is an ulp off in 1 of 130: of 2,000 it would show."""
    tensors = [ordinary(5, FLOATS[i % 3], i, 2.0 ** (i % 40 - 10 if i % 3 != 2 else 1)) for i in range(2000)]
    sums, total = reference_torch.sums_of_squares(tensors)
    norms, total_norm = hs.l2_norms(tensors)
    for square, norm in zip([*sums.tolist(), total.item()], [*norms.tolist(), total_norm.item()], strict=True):
        below = (Fraction(norm) + Fraction(math.nextafter(norm, 0))) / 2
        above = (Fraction(norm) + Fraction(math.nextafter(norm, math.inf))) / 2
        assert below**2 <= Fraction(square) <= above**2


def test_norms_of_known_numbers():
    """What float32 cannot hold has a norm; a tensor without elements has 0; scalars and any iterable are taken."""
    tensors = [
        torch.full((4,), 3e38), torch.zeros(2, 0), torch.tensor(-2.0, dtype=FLOAT16), torch.full((9,), 2.0**-133),
        torch.tensor([math.inf, 1.0], dtype=BFLOAT16), torch.tensor([math.inf, math.nan]),
    ]  # fmt: skip
    norms, total = hs.l2_norms(iter(tensors[:4]))
    exact = torch.tensor(3e38).double().item()
    assert norms.tolist() == [2 * exact, 0.0, 2.0, 3 * 2.0**-133]
    assert total.item() == 2 * exact
    norms, total = hs.l2_norms(tensors)
    assert norms[4] == math.inf
    assert norms[5].isnan()
    assert total.isnan()
    assert (norms.dtype, norms.shape, total.dtype, total.shape) == (torch.float64, (6,), torch.float64, ())


def test_no_tensors():
    for tensors in ([], iter(())):
        norms, total = hs.l2_norms(tensors)
        assert (norms.shape, norms.dtype, total.item()) == ((0,), torch.float64, 0.0)
    for module in (native_cpu, reference_torch):
        sums, total = module.sums_of_squares([])
        assert (sums.shape, sums.dtype, total.item(), total.dtype) == ((0,), torch.float64, 0.0, torch.float64)


def test_it_is_what_clipping_and_grad_stats_see():
    params = [torch.nn.Parameter(ordinary((70, 65), FLOAT32, i)) for i in range(3)]
    for p in params:
        p.grad = ordinary((70, 65), FLOAT32, 9).t().contiguous().view(70, 65)
    grads = [p.grad for p in params if p.grad is not None]
    total = hs.l2_norms(grads)[1]
    assert_all_same_bits([hs.grad_stats(grads)[0], hs.clip_grad_norm_(params, 1.0)], [total] * 2, "norm")
    assert not hs.l2_norms(params)[0].requires_grad
