"""CUDA operators on lists under the emulator against the CPU's kernels, bit for bit.

Guards: the norm's order of additions, values that float32 cannot hold, what a misaligned view does to
packs, results that depend on the order of threads or blocks, memory read or written beside the elements.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, awkward, boundary_patterns, every_pattern, ordinary
from bits import assert_all_same_bits, assert_same_bits
from canary import Guarded
from emulated_cuda import ORDER_IDS, ORDERS, emulated, launches, ordered
from torch import Tensor

from halfstep.ops import native_cpu

SIZES = [0, 1, 7, 1023, 1024, 8191, 8192, 8193, 16385, 65536, 0, 65537, 140001]
MISALIGNED_SIZES = [1, 3, 9, 1030, 16390]


@pytest.fixture(params=ORDERS, ids=ORDER_IDS)
def order(request):
    """Of threads and blocks; a module that runs these tests on another backend has a fixture of its own."""
    return request.param


def lists(finite: bool) -> list[Tensor]:
    drawn = [awkward(n, FLOATS[i % 3], i) for i, n in enumerate(SIZES)]
    if not finite:
        return drawn
    wide = [t.float().nan_to_num(1.0, 1.0, 1.0) for t in drawn]
    return [w.clamp(-6e4, 6e4).to(t.dtype) if t.dtype == FLOAT16 else w.to(t.dtype).nan_to_num(1.0, 1.0, 1.0)
            for w, t in zip(wide, drawn, strict=True)]  # fmt: skip


@pytest.mark.parametrize("scale", [None, 3.0, 2.0**-30, 2.0**16])
@pytest.mark.parametrize("finite", [True, False])
def test_grad_stats(finite, scale, order):
    grads = lists(finite)
    factor = None if scale is None else torch.tensor(scale)
    with ordered(order):
        got = emulated().grad_stats(grads, factor)
    expected = native_cpu.grad_stats(grads, factor)
    assert_all_same_bits(got, expected, str(scale))
    assert (expected[1] == -1) == (finite and scale != 2.0**-30)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tensors_without_elements(dtype):
    """No block runs; the results are written all the same."""
    empty = [torch.empty(0, dtype=dtype), torch.empty(3, 0, dtype=dtype)]
    for _ in range(3):  # what lies in fresh memory differs
        assert_all_same_bits(emulated().grad_stats(empty, None), native_cpu.grad_stats(empty, None), "grad_stats")
        assert int(emulated().unscale_(empty, torch.tensor(0.5))) == -1
        each, total = emulated().sums_of_squares(empty)
        assert (each.tolist(), total.item()) == ([0.0, 0.0], 0.0)
    cast(emulated(), empty, FLOAT32, False, 0)
    emulated().accumulate_([e.float() for e in empty], empty)


def test_values_that_float32_cannot_square():
    """Tiny, huge, zero and mixed groups, and a lane with one odd element."""
    for size, value in itertools.product((5, 8192, 70001), (0.0, 1e-30, 1e-45, 3e38, 1e30)):
        x = torch.full((size,), value)
        odd = x.clone()
        odd[size // 2] = 1.0
        for grads in ([x], [odd], [x.bfloat16()], [odd, x, odd]):
            assert_all_same_bits(
                emulated().grad_stats(grads, None), native_cpu.grad_stats(grads, None), f"{size} {value}"
            )


def test_norms_of_each_tensor(order):
    tensors = lists(finite=True)
    with ordered(order):
        each, total = emulated().sums_of_squares(tensors)
    expected = torch.stack([native_cpu.grad_stats([t], None)[0] for t in tensors])
    assert_same_bits(each, expected, "each")
    assert_same_bits(total, native_cpu.grad_stats(tensors, None)[0], "total")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_tensor_that_is_not_finite(bad):
    """Wherever it lies in its tensor: in a pack, alone at an end, in a later chunk."""
    for dtype, tensor, at in itertools.product(FLOATS, (1, 4, 5), (0, 1, 1000, 65535, 65536, 70000)):
        grads = [ordinary(70001, dtype, i) for i in range(6)]
        grads[tensor][at] = bad
        grads[5][3] = bad
        assert int(emulated().grad_stats(grads, None)[1]) == tensor
        assert int(emulated().unscale_([g.clone() for g in grads], torch.tensor(1.0))) == tensor


@pytest.mark.parametrize("factor", [0.37, 1.0, 1e-30, 65504.0, math.inf])
def test_scale(factor, order):
    mine, theirs = lists(finite=False), lists(finite=False)
    with ordered(order):
        got = emulated().unscale_(mine, torch.tensor(factor))
    assert_same_bits(got, native_cpu_scale(theirs, factor), "first")
    assert_all_same_bits(mine, theirs, str(factor))


def test_scale_of_finite_lists_overflows_where_it_is_stored():
    x = [torch.full((9,), 60000.0, dtype=FLOAT16), torch.ones(3, dtype=FLOAT16)]
    assert int(emulated().unscale_([t.clone() for t in x[::-1]], torch.tensor(2.0))) == 1
    assert int(emulated().unscale_(x, torch.tensor(0.5))) == -1


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("source", "target"), [*itertools.product(FLOATS, FLOATS)], ids=str)
def test_cast_of_every_value(source, target, stochastic):
    values = boundary_patterns() if source == FLOAT32 else every_pattern(source)
    assert_all_same_bits(
        cast(emulated(), [values], target, stochastic, 11), cast(native_cpu, [values], target, stochastic, 11), "cast"
    )


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_cast_of_lists(stochastic, order):
    src = lists(finite=False)
    for dtype in FLOATS:
        with ordered(order):
            got = cast(emulated(), src, dtype, stochastic, 2**32 - 1)
        assert_all_same_bits(got, cast(native_cpu, src, dtype, stochastic, 2**32 - 1), str(dtype))


def test_accumulate(order):
    src = lists(finite=False)
    dst = [awkward(n, FLOAT32, 100 + i) for i, n in enumerate(SIZES)]
    expected = [d + s.float() for d, s in zip(dst, src, strict=True)]
    with ordered(order):
        emulated().accumulate_(dst, src)
    assert_all_same_bits(dst, expected, "sums")


@pytest.mark.parametrize("shifts", [(1, 1), (3, 3), (0, 1), (2, 0), (7, 3)])
def test_views_that_are_not_aligned(shifts):
    for dtype, size in itertools.product(FLOATS, MISALIGNED_SIZES):
        x = awkward(size, dtype, size)
        guarded = Guarded(x, shift=shifts[0])
        assert_all_same_bits(emulated().grad_stats([guarded.tensor], None), native_cpu.grad_stats([x], None), "stats")
        emulated().unscale_([guarded.tensor], torch.tensor(0.3))
        native_cpu_scale([x], 0.3)
        assert_same_bits(guarded.tensor, x, "scaled")
        for target in FLOATS:
            dst, expected = Guarded(torch.zeros(size, dtype=target), shift=shifts[1]), torch.zeros(size, dtype=target)
            emulated().cast_([dst.tensor], [guarded.tensor], stochastic=True, seed=3)
            native_cpu.cast_([expected], [x], stochastic=True, seed=3)
            assert_same_bits(dst.tensor, expected, f"cast to {target}")
            dst.assert_intact("cast")
        sums = Guarded(torch.ones(size), shift=shifts[1])
        emulated().accumulate_([sums.tensor], [guarded.tensor])
        assert_same_bits(sums.tensor, 1.0 + x.float(), "sums")
        sums.assert_intact("sums")
        guarded.assert_intact("scaled")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: emulated().grad_stats(x, None), 2),  # 1,016 tensors a launch, and one that adds up
        (lambda x: emulated().unscale_(x, torch.tensor(2.0)), 2),
        (lambda x: cast(emulated(), x, BFLOAT16, False, 0), 2),  # 812 pairs a launch
        (lambda x: emulated().accumulate_(x, x), 2),
    ],
    ids=["grad_stats", "unscale_", "cast_", "accumulate_"],
)
def test_launches_of_1000_small_tensors(call, expected):
    x = [torch.ones(1 + i % 3) for i in range(1000)]
    with launches() as made:
        call(x)
    assert len(made) == expected


def test_more_tensors_than_one_launch_holds():
    x = [torch.full((2,), float(i % 7)) for i in range(5000)]
    x[4321][1] = math.inf
    assert_all_same_bits(emulated().grad_stats(x, None), native_cpu.grad_stats(x, None), "stats")
    assert_all_same_bits(cast(emulated(), x, BFLOAT16, True, 1), cast(native_cpu, x, BFLOAT16, True, 1), "cast")


def cast(backend, src: list[Tensor], dtype: torch.dtype, stochastic: bool, seed: int) -> list[Tensor]:
    dst = [torch.full_like(s, 7, dtype=dtype) for s in src]
    backend.cast_(dst, src, stochastic=stochastic, seed=seed)
    return dst


def native_cpu_scale(tensors: list[Tensor], factor: float) -> Tensor:
    return native_cpu.unscale_(tensors, torch.tensor(factor))
