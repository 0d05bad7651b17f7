"""The reference's gradient norm, finite check, unscaling and clip coefficient."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest
import torch

from halfstep.reference import clip_coefficient, grad_stats, sum_squares, sums_of_squares, unscale_

SIZES = [0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 65535, 65536, 65537, 2 * 65536 + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def powers(size: int, low: int, high: int) -> torch.Tensor:
    """Float32 numbers of either sign, their logarithms evenly spread between those of 2**low and 2**high."""
    exponent = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * (high - low) + low
    return (torch.exp2(exponent) * normal(size, 2).sign()).float()


# Denormals; group sums on both sides of 2**-100; ordinary; on both sides of 2**120; next to the largest number.
# Each range is narrow: in a wide one the largest elements hide what happens to the others.
RANGES = [(-149, -125), (-54, -49), (-3, 3), (56, 61), (120, 128)]


def sum_squares_by_hand(u: np.ndarray) -> float:
    """The documented order, one scalar at a time."""
    total = 0.0
    for begin in range(0, len(u), 65536):
        chunk = u[begin : begin + 65536]
        lanes = [0.0] * 1024
        for group in range(0, len(chunk), 8 * 1024):
            for lane in range(min(1024, len(chunk) - group)):
                elements = chunk[group + lane : group + 8 * 1024 : 1024]
                narrow, wide = np.float32(0), 0.0
                for x in elements:
                    narrow = narrow + x * x
                    wide = wide + float(x) * float(x)
                lanes[lane] += float(narrow) if 2.0**-100 <= narrow <= 2.0**120 else wide
        for s in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            for i in range(s):
                lanes[i] += lanes[i + s]
        total += lanes[0]
    return total


def check_order(values: torch.Tensor) -> None:
    with np.errstate(all="ignore"):
        expected = sum_squares_by_hand(values.numpy())
    assert grad_stats([values], 1.0)[0].item() == expected


def relative_bound(size: int) -> float:
    """Largest relative error of the documented sum of `size` squares (Higham 2002, section 4.2)."""
    in_float32 = 8 * 2.0**-24  # one product and seven additions
    underflow = 8 * 2.0**-150 / 2.0**-100  # eight products below the denormals, in a sum of at least 2**-100
    in_float64 = (8 + 8 + 10 + size // 65536 + 1) * 2.0**-53  # rows, groups, tree, chunks
    return (in_float32 + underflow + in_float64) * (1 + 2.0**-10)  # and the products of these terms


@pytest.mark.parametrize("size", SIZES)
def test_order_is_the_documented_one(size):
    for low, high in RANGES:
        check_order(powers(size, low, high))


def test_sums_of_squares_are_each_tensors():
    """Every tensor by the documented order, a transposed one in that of its rows."""
    sizes = (0, 9001, 1025, 70000, 0, 8193, 3)
    tensors = [powers(size, *RANGES[i % 3]).to(DTYPES[i % 2]) for i, size in enumerate(sizes)] + [normal(1025).half()]
    tensors[3] = tensors[3].view(-1, 70).t()
    sums, total = sums_of_squares(tensors)
    by_hand = [sum_squares_by_hand(t.float().reshape(-1).numpy()) for t in tensors]
    assert sums.tolist() == by_hand
    assert total.item() == functools.reduce(operator.add, by_hand, 0.0)


def test_tensors_add_in_order():
    """Each of four squares is lost beside a 1 in float64; the four of them together are not."""
    tensors = [torch.ones(1), *[torch.full((1,), 2.0**-27)] * 4]
    assert sums_of_squares(tensors)[1].item() == grad_stats(tensors, 1.0)[0].item() == 1.0
    assert sums_of_squares(tensors[::-1])[1].item() == grad_stats(tensors[::-1], 1.0)[0].item() == 1 + 2.0**-52


@pytest.mark.parametrize("size", SIZES)
def test_error_is_within_the_bound_of_the_order(size):
    for low, high in RANGES:
        values = powers(size, low, high)
        truth = math.fsum(float(x) ** 2 for x in values.tolist())
        total, first_bad = grad_stats([values], 1.0)
        assert abs(total.item() - truth) <= relative_bound(size) * truth
        assert first_bad.item() == -1


@pytest.mark.parametrize("stride", [8 * 1024, 65536], ids=["groups", "chunks"])
def test_groups_of_a_lane_and_chunks_add_in_order(stride):
    """1 + 2**-54 is 1 in float64, seven times over; from the other end the small ones add up first."""
    values = torch.zeros(8 * stride)
    values[5::stride] = 2.0**-27
    values[5] = 1.0
    check_order(values)
    assert grad_stats([values], 1.0)[0].item() == 1.0
    assert grad_stats([values.view(8, stride).flip(0)], 1.0)[0].item() == 1.0 + 2.0**-51


@pytest.mark.parametrize(("lanes", "expected"), [((1, 3, 5), 1.0 + 2.0**-52), ((512, 640, 768), 1.0)])
def test_lanes_combine_as_the_documented_tree(lanes, expected):
    """1, 3 and 5 meet in lane 1 before lane 0, where each alone is lost; 512, 640 and 768 reach lane 0 one by one.

    A tree that joins neighbours first, or a sum from lane 0 up, gives the other answer in at least one of the cases.
    """
    values = torch.zeros(1024)
    values[0] = 1.0
    values[list(lanes)] = 2.0**-27
    assert grad_stats([values], 1.0)[0].item() == expected


def test_tensors_add_in_order_after_their_chunks():
    """One running total over all chunks would lose the second tensor, chunk by chunk."""
    big = torch.tensor([2.0**17])  # squared 2**34, with an ulp of 2**-18
    small = torch.zeros(32 * 65536)
    small[::65536] = 2.0**-11.5  # a chunk adds about 2**-23, all 32 of them 2**-18
    square = small[0].item() ** 2
    running = 2.0**34
    for _ in range(32):
        running += square
    assert running == 2.0**34
    assert grad_stats([big, small], 1.0)[0].item() == 2.0**34 + 2.0**-18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_is_logical(dtype):
    base = normal(70_000).reshape(200, 350).to(dtype)
    views = [base.t(), base[:, ::3], base[5:, 7:90], base[0].expand(300, 350)]
    expected = grad_stats([view.contiguous() for view in views], 0.5)
    assert [x.item() for x in grad_stats(views, 0.5)] == [x.item() for x in expected]
    assert expected[0].item() == sum(grad_stats([view], 0.5)[0].item() for view in views)


@pytest.mark.parametrize("value", [3e38, 1e-42, 1e-45, 2.0**-60, 2.0**70])
def test_huge_and_tiny_gradients_count(value):
    grads = [torch.full((3000,), value)]
    x = grads[0][0].item()
    total, first_bad = grad_stats(grads, 1.0)
    assert abs(total.item() - 3000 * x * x) <= relative_bound(3000) * 3000 * x * x
    assert total.item() > 0
    assert first_bad.item() == -1


def test_zeros_and_nothing():
    for grads in ([], [torch.empty(0)], [torch.zeros(5), torch.empty(0, 3), -torch.zeros(70_000)]):
        total, first_bad = grad_stats(grads, 1.0)
        assert (total.dtype, total.shape, first_bad.dtype, first_bad.shape) == (torch.float64, (), torch.int64, ())
        assert math.copysign(1.0, total.item()) == 1.0
        assert (total.item(), first_bad.item()) == (0.0, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 9000, 69_999])
def test_first_bad_names_the_first_tensor(dtype, value, place):
    grads = [torch.ones(3, dtype=dtype), torch.empty(0, dtype=dtype), torch.ones(70_000, dtype=dtype)]
    grads += [torch.full((2,), value, dtype=dtype)]
    assert grad_stats(grads, 1.0)[1].item() == 3
    grads[2][place] = value
    total, first_bad = grad_stats(grads, 1.0)
    assert first_bad.item() == 2
    assert not math.isfinite(total.item())


def test_the_check_looks_after_the_multiply():
    assert grad_stats([torch.tensor([1e38])], 100.0)[1].item() == 0
    assert grad_stats([torch.tensor([0.0])], INF)[1].item() == 0  # 1 / scale overflowed: 0 * Inf
    assert grad_stats([torch.tensor([60000.0]).half()], 100.0)[1].item() == -1
    assert grad_stats([torch.tensor([60000.0]).half()], 2.0**-16)[0].item() == (60000 * 2.0**-16) ** 2


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_unscaling_rounds_in_float32(low, high):
    values, inv_scale = powers(9000, low, high), float(np.float32(1 / 3))
    with np.errstate(all="ignore"):
        expected = sum_squares_by_hand(values.numpy() * np.float32(inv_scale))
    assert grad_stats([values], inv_scale)[0].item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unscale_multiplies_in_place(dtype):
    base = normal(2000).reshape(40, 50).to(dtype)
    inv_scale = float(np.float32(1 / 3))
    expected = (base.double() * inv_scale).float()  # 24 by 24 bits: exact in float64, one rounding to float32
    untouched = base.clone()
    assert unscale_([base.t()[10:], torch.empty(0, dtype=dtype)], inv_scale).item() == -1
    assert torch.equal(base[:, 10:], expected.to(dtype)[:, 10:])
    assert torch.equal(base[:, :10], untouched[:, :10])


def test_unscale_sees_what_it_stores():
    finite = torch.ones(3)
    overflow = torch.tensor([60000.0]).half()  # 120,000 is a float32, but no float16
    assert unscale_([finite, overflow, torch.tensor([NAN])], 2.0).item() == 1
    assert overflow.item() == INF
    assert unscale_([torch.tensor([6e-8]).half()], 2.0**-16).item() == -1
    assert unscale_([torch.tensor([INF])], 0.0).item() == 0
    assert unscale_([], 1.0).item() == -1


@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.999999, 1.0, 3.0, 7.3e12, 1e300, INF])
@pytest.mark.parametrize("max_norm", [1.0, 0.1, 1e-3, 5e9])
def test_clip_coefficient(norm, max_norm):
    coefficient = clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm)
    assert (coefficient.dtype, coefficient.shape) == (torch.float64, ())
    assert coefficient.item() == min(1.0, max_norm / (norm + 1e-6))
    assert clip_coefficient(norm, max_norm).item() == coefficient.item()


def test_clip_coefficient_is_torchs():
    assert math.isnan(clip_coefficient(NAN, 1.0).item())
    for scale in (0.01, 1.0, 17.0):
        param = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        param.grad = torch.full((1,), scale, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        # torch multiplies with a reciprocal: two roundings more, and one in the product with the gradient
        tolerance = 3 * torch.finfo(torch.float64).eps * scale
        assert abs(param.grad.item() - scale * clip_coefficient(scale, 1.0).item()) <= tolerance


@pytest.mark.parametrize(
    ("name", "value"),
    [("LANES", 512), ("GROUP_ROWS", 4), ("CHUNK", 32768), ("GROUP_SUM_MIN", 2.0**-90), ("GROUP_SUM_MAX", 2.0**110)],
)
def test_planted_faults_in_the_order_are_seen(monkeypatch, name, value):
    monkeypatch.setattr(sum_squares, name, value)
    with pytest.raises(AssertionError):
        test_order_is_the_documented_one(65537)
