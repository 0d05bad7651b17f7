"""accumulate_ against float64 and, native against the reference, bit for bit.

Guards: a sum rounded twice or kept in 16 bits, a source converted wrongly (denormals of either kind, Inf, NaN), a last
vector added twice or left out, a tensor added to itself that reads what it has just written.
"""

from __future__ import annotations

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, awkward, boundary_patterns, every_pattern, ordinary
from bits import assert_all_same_bits, assert_same_bits
from conditions import ALL, EVERY_ISA
from torch import Tensor

import halfstep as hs
from halfstep.ops import native_cpu, reference_torch


def exact(dst: Tensor, src: Tensor) -> Tensor:
    """Float64 has more than twice the digits of float32, so that rounding its sum again is the sum rounded once."""
    return (dst.double() + src.double()).float()


def accumulated(backend, dst: list[Tensor], src: list[Tensor]) -> list[Tensor]:
    sums = [d.clone() for d in dst]
    backend.accumulate_(sums, src)
    return sums


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_value(dtype):
    """All 65,536 values of a 16-bit source; float32 next to every value of both; added to numbers of any kind."""
    src = boundary_patterns() if dtype == FLOAT32 else every_pattern(dtype)
    pool = awkward(2**18, FLOAT32, 1)
    dsts = [pool.repeat(src.numel() // pool.numel() + 1)[: src.numel()], torch.zeros(src.numel()), -src.float()]
    for dst in dsts:
        expected = exact(dst, src)
        assert_all_same_bits(accumulated(reference_torch, [dst], [src]), [expected], "reference")
        for conditions in EVERY_ISA:
            with conditions.hold():
                got = accumulated(native_cpu, [dst], [src])
            assert_all_same_bits(got, [expected], str(conditions))


@pytest.fixture(scope="module")
def pairs() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tensors that straddle the units of work; every size of a rest."""
    sizes = [0, *range(1, 34), 511, 0, 65533, 513, 70001, 4, 2 * 65536, 0]
    dst = [awkward(n, FLOAT32, i) for i, n in enumerate(sizes)]
    src = [awkward(n, FLOATS[i % 3], i + 3) for i, n in enumerate(sizes)]
    return dst, src, [exact(d, s) for d, s in zip(dst, src, strict=True)]


@pytest.mark.parametrize("conditions", ALL, ids=str)
def test_lists_under_any_conditions(conditions, pairs):
    dst, src, expected = pairs
    before = [s.clone() for s in src]
    with conditions.hold():
        assert_all_same_bits(accumulated(native_cpu, dst, src), expected, str(conditions))
    assert_all_same_bits(src, before, "sources")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_pointers_aligned_to_one_element(shift, dtype):
    """Of both, and of only one of them."""
    for dst_shift, src_shift in ((shift, 0), (0, shift), (shift, shift)):
        dst, src = awkward(1000, FLOAT32, 1)[dst_shift:900], awkward(1000, dtype, 2)[src_shift:900]
        n = min(dst.numel(), src.numel())
        expected = exact(dst[:n], src[:n])
        for conditions in EVERY_ISA:
            target = torch.zeros(1000)[dst_shift:][:n].copy_(dst[:n])
            with conditions.hold():
                native_cpu.accumulate_([target], [src[:n]])
            assert_same_bits(target, expected, str(conditions))


@pytest.mark.parametrize("shape", [(70001,), (33,), (6, 35)])
def test_a_tensor_that_is_its_own_source_is_doubled(shape):
    views = {"plain": lambda t: t, "transposed": torch.Tensor.t, "columns": lambda t: t[..., 1:]}
    for name, view in views.items():
        whole = ordinary(shape, FLOAT32, 0)
        target, expected = view(whole), 2 * view(whole).clone()
        for conditions in EVERY_ISA:
            target.copy_(expected / 2)
            with conditions.hold():
                hs.accumulate_([target], [target])
            assert_same_bits(target, expected, f"{name}, {conditions}")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_16_bit_sum_stalls_and_this_one_does_not(dtype):
    """Of equal gradients: half the spacing of the sum is more than a gradient after 256 (bfloat16) or 2,048 of them."""
    stalls = round(2 / torch.finfo(dtype).eps)
    narrow, wide, one = torch.zeros(1, dtype=dtype), torch.zeros(1), torch.ones(1, dtype=dtype)
    for _ in range(stalls + 9):
        narrow += one
        hs.accumulate_([wide], [one])
    assert (narrow.item(), wide.item()) == (stalls, stalls + 9)


def test_gradients_of_micro_batches():
    """Bit for bit the float32 sum by hand, over all parameters, in the order of the batches."""
    params = [torch.nn.Parameter(ordinary(shape, BFLOAT16, 0)) for shape in ((4, 5), (7,), (0,))]
    sums = [torch.zeros_like(p, dtype=FLOAT32) for p in params]
    by_hand = [torch.zeros(p.shape) for p in params]
    for t in range(5):
        for i, p in enumerate(params):
            p.grad = ordinary(tuple(p.shape), BFLOAT16, 10 * t + i)
            by_hand[i] = by_hand[i] + p.grad.float()
        hs.accumulate_(sums, [p.grad for p in params if p.grad is not None])
    assert_all_same_bits(sums, by_hand, "sum")


def test_no_tensors():
    hs.accumulate_([], [])
    for module in (native_cpu, reference_torch):
        module.accumulate_([], [])
