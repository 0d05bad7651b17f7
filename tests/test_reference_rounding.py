"""The reference's roundings against torch, numpy and exact arithmetic, over every boundary of the 16-bit formats."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from halfstep.reference import join_master, round_stochastic, round_to, split_master

NARROW = [torch.bfloat16, torch.float16]
# Low halves of a float32: ends, ties and their neighbours of both formats (bfloat16 drops 16 bits, float16 13)
LOWS = [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001]
LOWS += [0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBFFF, 0xFFFE, 0xFFFF]
INF = float("inf")


def from_bits(patterns: np.ndarray | list[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32))


def boundary_floats() -> torch.Tensor:
    """Every upper half with every low half of LOWS: 1.1 million floats, all exponents, NaN and Inf included."""
    uppers = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    return from_bits((uppers[:, None] | np.array(LOWS, dtype=np.uint32)).reshape(-1))


def random_floats(count: int) -> torch.Tensor:
    return from_bits(np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32))


def half_bits(x: torch.Tensor) -> torch.Tensor:
    """Patterns as integers, with every NaN the same."""
    return torch.where(x.isnan(), 0x7FFF, x.view(torch.int16).int())


def float_bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0x7FFFFFFF, x.view(torch.int32))


def nearest_by_comparison(x: np.ndarray) -> np.ndarray:
    """bfloat16 patterns by comparing distances in float64; past the largest number the next power of two is Inf."""
    magnitude = x.view(np.uint32) & 0x7FFFFFFF
    lower = magnitude >> 16
    upper = lower + 1

    def value(pattern):
        as_float = (pattern << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        return np.where(pattern == 0x7F80, 2.0**128, as_float)

    exact = np.abs(x.astype(np.float64))
    to_lower, to_upper = exact - value(lower), value(upper) - exact
    up = (to_upper < to_lower) | ((to_upper == to_lower) & (lower % 2 == 1))
    return np.where(up, upper, lower) | (x.view(np.uint32) >> 16 & 0x8000)


@pytest.mark.parametrize("dtype", NARROW)
def test_nearest_is_torchs(dtype):
    x = torch.cat((boundary_floats(), random_floats(200_000)))
    assert torch.equal(half_bits(round_to(x, dtype)), half_bits(x.to(dtype)))


def test_nearest_float16_is_numpys():
    x = boundary_floats()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = torch.from_numpy(x.numpy().astype(np.float16))
    assert torch.equal(half_bits(round_to(x, torch.float16)), half_bits(expected))


def test_nearest_bfloat16_is_the_nearest():
    x = boundary_floats()
    x = x[x.isfinite()]
    expected = nearest_by_comparison(x.numpy()).astype(np.uint16)
    assert np.array_equal(round_to(x, torch.bfloat16).view(torch.int16).numpy().view(np.uint16), expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_number_is_kept(dtype):
    grid = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    most = torch.full((2**16,), 0xFFFFFFFF)
    assert torch.equal(half_bits(round_to(grid.float(), dtype)), half_bits(grid))
    assert torch.equal(half_bits(round_stochastic(grid.float(), dtype, most)), half_bits(grid))


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_is_quiet_and_keeps_its_sign(dtype):
    nans = from_bits([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    quiet_bit = 0x40 if dtype == torch.bfloat16 else 0x200
    for rounded in (round_to(nans, dtype), round_stochastic(nans, dtype, torch.full((6,), 0xFFFFFFFF))):
        assert rounded.isnan().all()
        assert ((rounded.view(torch.int16) & quiet_bit) != 0).all()
        assert (rounded.view(torch.int16) < 0).tolist() == [False] * 4 + [True] * 2


def test_float32_is_kept_and_other_dtypes_are_refused():
    x = random_floats(100)
    assert round_to(x, torch.float32) is x
    assert round_stochastic(x, torch.float32, torch.zeros(100, dtype=torch.int64)) is x
    for call in (lambda: round_to(x, torch.float64), lambda: round_stochastic(x, torch.int8, torch.zeros(100).long())):
        with pytest.raises(
            TypeError, match=r"expected torch.float32, torch.bfloat16 or torch.float16 to round to, got"
        ):
            call()


def test_stochastic_bfloat16_rounds_up_exactly_as_often_as_it_should():
    """Over all 2**16 low halves of the word the number of roundings up is the low half of the float."""
    x = from_bits([0x00000001, 0x0000FFFF, 0x007F8000, 0x3F800001, 0x40490FDB, 0x7F7F1234, 0xBF803039, 0xC2F6E979])
    words = torch.arange(2**16) + (torch.arange(2**16) * 40503 % 2**16 << 16)  # any upper halves: they must not count
    for value in x:
        lower = (value.view(torch.int32) >> 16) & 0xFFFF
        rounded = round_stochastic(value.expand(2**16), torch.bfloat16, words).view(torch.int16).int() & 0xFFFF
        fraction = int(value.view(torch.int32)) & 0xFFFF
        goes_up = (words & 0xFFFF) >= 2**16 - fraction
        assert int(goes_up.sum()) == fraction
        assert torch.equal(rounded, lower + goes_up.int())


def half_grid_below(exact: Fraction) -> tuple[Fraction, Fraction]:
    """Largest multiple of the float16 grid spacing not above a positive number, and the spacing."""
    spacing = Fraction(1, 2**24)
    while exact >= spacing * 2**11:
        spacing *= 2
    return exact // spacing * spacing, spacing


def half_value(x: torch.Tensor) -> Fraction:
    return Fraction(2**16) if x.isinf() else Fraction(x.item())


def test_stochastic_float16_rounds_up_exactly_for_the_largest_words():
    """With F the first 32 dropped bits of x as a fraction, x rounds up for the F * 2**32 largest words and no other."""
    floats = torch.cat((random_floats(400), torch.rand(400, generator=torch.Generator().manual_seed(0)) * 2**-13))
    extremes = from_bits(
        [0x00000001, 0x2F000001, 0x32FFFFFF, 0x33000000, 0x387FFFFF, 0x38800001, 0x477FE001, 0x477FFFFF]
    )
    floats = torch.cat((floats, extremes))
    floats = floats[(floats.abs() < 2**16) & (floats != 0)]
    assert len(floats) > 600
    for x in floats:
        exact = abs(Fraction(x.item()))
        below, spacing = half_grid_below(exact)
        up_words = int((exact - below) / spacing * 2**32)
        words = torch.tensor([0, max(2**32 - up_words - 1, 0), min(2**32 - up_words, 2**32 - 1), 2**32 - 1])
        goes_up = words >= 2**32 - up_words
        rounded = round_stochastic(x.expand(4), torch.float16, words)
        got = [half_value(r.abs()) for r in rounded]
        assert got == [below + spacing if up else below for up in goes_up], x
        assert (torch.signbit(rounded) == torch.signbit(x)).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("word", [0, 0x80007FFF, 0xFFFFFFFF])
def test_stochastic_is_monotone_and_odd(dtype, word):
    """One word for all: a larger number never rounds to a smaller one, and -x rounds to minus what x rounds to."""
    x = torch.cat((boundary_floats()[::5], random_floats(100_000)))  # 5 steps through all 17 low halves
    x = x[~x.isnan()].sort().values
    words = torch.full((len(x),), word)
    rounded = round_stochastic(x, dtype, words)
    assert (rounded.float()[1:] >= rounded.float()[:-1]).all()
    assert torch.equal(half_bits(round_stochastic(-x, dtype, words)), half_bits(-rounded))


@pytest.mark.parametrize("dtype", NARROW)
def test_stochastic_far_past_the_range_is_inf(dtype):
    limits = torch.tensor([INF, -INF, 65536.0, -1e38])[: 2 if dtype == torch.bfloat16 else 4]
    rounded = round_stochastic(limits, dtype, torch.zeros(len(limits), dtype=torch.int64))
    assert rounded.isinf().all()
    assert torch.equal(rounded.float().sign(), limits.sign())


def test_split_is_lossless():
    x = torch.cat((boundary_floats(), random_floats(500_000)))
    weight, remainder = split_master(x)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(float_bits(join_master(weight, remainder)), float_bits(x))
    # the visible weight already says NaN, and only then; Inf is Inf or a finite number within half a step of it
    assert torch.equal(weight.isnan(), x.isnan())
    assert (remainder[x.isnan()] == 0).all()
    assert weight[x.isinf()].isinf().all()


def test_split_rounds_as_nearest_but_for_ties():
    x = torch.cat((boundary_floats(), random_floats(500_000)))
    weight, _ = split_master(x)
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    nearest = round_to(x, torch.bfloat16)
    assert torch.equal(half_bits(weight[~tie]), half_bits(nearest[~tie]))
    away = tie & ~x.isnan()
    assert (weight[away].float().abs() > x[away].abs()).all()


@pytest.mark.parametrize(
    ("master", "weight", "remainder"),
    [
        (0x7F800000, 0x7F80, 0),  # Inf
        (0xFF800000, 0xFF80, 0),
        (0x7F7FFFFF, 0x7F80, -1),  # the largest number shows as Inf and comes back
        (0x7F7F8000, 0x7F80, -0x8000),
        (0x00000000, 0x0000, 0),
        (0x80000000, 0x8000, 0),  # -0
        (0x00008000, 0x0001, -0x8000),
        (0x3F808000, 0x3F81, -0x8000),  # a tie goes away from zero, also next to an even number
        (0xBF818000, 0xBF82, -0x8000),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x7F800001, 0x7FC0, 0),  # a NaN whose upper half alone is Inf
        (0x7FFFFFFF, 0x7FC0, 0),  # a NaN that rounds up into -0
        (0xFFFFFFFF, 0xFFC0, 0),
    ],
)
def test_split_by_hand(master, weight, remainder):
    got_weight, got_remainder = split_master(from_bits([master]))
    assert int(got_weight.view(torch.int16)) & 0xFFFF == weight
    assert int(got_remainder) == remainder


@pytest.mark.parametrize("remainder", [-0x8000, -0x7FFF, -1, 0, 1, 0x7FFF])
def test_a_stale_remainder_moves_a_weight_by_half_a_step_at_most(remainder):
    """Any weight with any leftover remainder: never a NaN or an Inf of its own, never another sign."""
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    joined = join_master(weight, torch.full((2**16,), remainder, dtype=torch.int16))
    assert torch.equal(joined.isnan(), weight.isnan())
    number = ~weight.isnan()
    assert torch.equal(torch.signbit(joined[number]), torch.signbit(weight[number]))
    below_zero = (weight == 0) & (remainder < 0)
    assert torch.equal(joined[below_zero].abs(), torch.zeros(int(below_zero.sum())))
    finite = weight.isfinite()
    assert joined[finite].isfinite().all()
    step = (joined.view(torch.int32)[finite & ~below_zero] & 0x7FFFFFFF).long()
    step -= (weight.view(torch.int16)[finite & ~below_zero].long() & 0x7FFF) << 16
    assert (step == remainder).all()
    if remainder >= 0:
        assert joined[weight.isinf()].isinf().all()
    else:  # the pair of a number next to the largest one
        assert joined[weight.isinf()].isfinite().all()
