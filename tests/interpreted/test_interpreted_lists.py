"""Triton operators on lists in the interpreter against the CPU's kernels, bit for bit.

Guards: the norm's order of additions, values that float32 cannot hold, a tile handled twice or not at all, memory
touched beside the elements, a table that belongs to other tensors.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import test_cuda_lists
import torch
from adversarial import BFLOAT16, FLOAT32, FLOATS, awkward, boundary_patterns, ordinary
from bits import assert_all_same_bits
from interpreter import launches, names, strays

# The same tests with other kernels and sizes, in the one order that the interpreter has (conftest.py)
from test_cuda_lists import (  # noqa: F401
    cast,
    test_accumulate,
    test_cast_of_every_value,
    test_cast_of_lists,
    test_grad_stats,
    test_norms_of_each_tensor,
    test_scale,
    test_scale_of_finite_lists_overflows_where_it_is_stored,
    test_tensors_without_elements,
    test_views_that_are_not_aligned,
)

from halfstep.ops import native_cpu, triton_gpu


@pytest.fixture(autouse=True)
def kernels(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cuda_lists, "emulated", lambda: backend)
    monkeypatch.setattr(test_cuda_lists, "ordered", nullcontext)
    monkeypatch.setattr(test_cuda_lists, "boundary_patterns", fewer_patterns)
    # rests and whole tiles, more than one program, a whole chunk and one more
    monkeypatch.setattr(test_cuda_lists, "SIZES", [0, 1, 1023, 1024, 2051, 8193, 0, 16385, 65537])
    monkeypatch.setattr(test_cuda_lists, "MISALIGNED_SIZES", [1, 3, 1030])


def fewer_patterns() -> torch.Tensor:
    """Every seventh, and all that end as Inf or NaN, or nearly: few of them decide about a special case."""
    every = boundary_patterns()
    size = every.abs()
    special = ~(size < 3.3e38) | ((size > 65000) & (size < 66000))
    special[::7] = True
    return every[special]


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-45, 3e38, 1e30])
def test_values_that_float32_cannot_square(backend, value):
    """Tiny, huge, zero and mixed groups, and a lane with one odd element."""
    for size in (5, 8192, 9001):
        x = torch.full((size,), value)
        odd = x.clone()
        odd[size // 2] = 1.0
        for grads in ([x, odd], [x.bfloat16()]):
            expected = native_cpu.grad_stats(grads, None)
            assert_all_same_bits(backend.grad_stats(grads, None), expected, f"{size} {value}")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_tensor_that_is_not_finite(backend, bad):
    """Wherever it lies: in a whole tile, in a rest, in another program, in a later chunk; another tensor has more."""
    for dtype, (size, at) in itertools.product(FLOATS, [(1030, 0), (1030, 1029), (16390, 16389), (65540, 65539)]):
        grads = [ordinary(3, dtype, i) for i in range(6)]
        grads[1 + at % 3] = ordinary(size, dtype, 9)
        grads[1 + at % 3][at] = bad
        grads[5][:] = bad
        assert int(backend.grad_stats(grads, None)[1]) == 1 + at % 3
        assert int(backend.unscale_([g.clone() for g in grads], torch.tensor(1.0))) == 1 + at % 3


def test_more_tensors_than_one_round_adds_up(backend):
    x = [torch.full((3 * (i % 90 == 0),), float(1 + i % 7)) for i in range(1100)]
    x[990][0] = math.inf
    for scale in (None, torch.tensor(3.0)):
        assert_all_same_bits(backend.grad_stats(x, scale), native_cpu.grad_stats(x, scale), "stats")
    (each, _), expected = backend.sums_of_squares(x), native_cpu.sums_of_squares(x)[0]
    assert_all_same_bits([each], [expected], "each")


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_access_beside_the_tensors(backend, dtype, shift):
    """Loads too, of which guard values tell nothing."""
    src = [awkward(n + shift, dtype, n)[shift:] for n in (0, 5, 2048, 1030)]
    dst = [torch.zeros(s.numel() + shift)[shift:] for s in src]
    factor = torch.tensor(2.0)
    calls = {
        "grad_stats": lambda: backend.grad_stats(src, factor),
        "l2 sums": lambda: backend.sums_of_squares(src),
        "unscale_": lambda: backend.unscale_(src, factor),
        "nearest": lambda: backend.cast_(dst, src, stochastic=False, seed=0),
        "stochastic": lambda: backend.cast_(src, dst, stochastic=True, seed=1),
        "accumulate_": lambda: backend.accumulate_(dst, src),
    }
    for name, call in calls.items():
        with strays([*src, *dst]) as found:
            call()
        assert not found, (name, found[:3])


def test_strays_are_seen(backend):
    """What the two tests of it would say if a tensor were shorter than the kernels believe."""
    x = [torch.ones(1030)]
    for tensors, kinds in (([x[0][:1029]], {"load", "store"}), ([], {"load", "store"}), (x, set())):
        with strays(tensors) as found:
            backend.unscale_(x, torch.tensor(1.0))
        assert {access.kind for access in found} == kinds


# ---- launches and tables ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda b, x: b.grad_stats(x, None), ["grad_stats", "finish_stats"]),
        (lambda b, x: b.sums_of_squares(x), ["grad_stats", "finish_stats"]),
        (lambda b, x: b.unscale_(x, torch.tensor(2.0)), ["scale"]),
        (lambda b, x: cast(b, x, BFLOAT16, False, 0), ["cast"]),
        (lambda b, x: b.accumulate_(x, x), ["accumulate"]),
    ],
    ids=["grad_stats", "l2 sums", "unscale_", "cast_", "accumulate_"],
)
def test_launches_of_1000_small_tensors(backend, call, expected):
    x = [torch.ones(1 + i % 3) for i in range(1000)]
    with launches(run=False) as made:
        call(backend, x)
    assert names(made) == expected
    mixed = [t.to(FLOATS[i % 3]) for i, t in enumerate(x)]
    if expected != ["accumulate"]:
        with launches(run=False) as made:
            call(backend, mixed)
        assert names(made) == [expected[0]] * 3 + expected[1:], "one more for each further dtype"


@pytest.fixture
def made_tables(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    table = triton_gpu.ListTable
    monkeypatch.setattr(triton_gpu, "ListTable", lambda *given: made.append(given) or table(*given))
    return made


def test_a_list_has_its_table_made_once(backend, made_tables):
    x = [awkward(n, FLOAT32, n) for n in (5, 1030)]
    for call in (0, 1, 2):
        assert_all_same_bits(backend.grad_stats(x, None), native_cpu.grad_stats(x, None), f"call {call}")
    assert len(made_tables) == 1
    backend.sums_of_squares(x)
    assert len(made_tables) == 1, "the same pass"
    backend.unscale_(x, torch.tensor(0.5))
    backend.unscale_(x, torch.tensor(0.25))
    assert len(made_tables) == 2, "the work of its programs is another"


def test_a_tensor_that_moved_or_changed_has_a_new_table(backend, made_tables):
    storage = awkward(64, FLOAT32, 3)
    elsewhere = storage.clone()
    lists = [
        [storage[:20], storage[32:52]], [storage[:20], elsewhere[32:52]], [storage[:20], storage[32:51]],
        [storage.view(BFLOAT16)[:20], storage[32:52]], [storage[32:52], storage[:20]],
    ]  # fmt: skip
    for number, x in enumerate(lists, start=1):
        for _ in range(2):
            assert_all_same_bits(backend.sums_of_squares(x), native_cpu.sums_of_squares(x), f"list {number}")
        assert len(made_tables) == number
    dst, src = [torch.zeros(20)], [storage[:20]]
    for pair in ((dst, src), (src, dst), (dst, [elsewhere[:20]])):
        backend.accumulate_(*pair)
    assert len(made_tables) == len(lists) + 3


def test_the_16_tables_used_last_are_kept(backend, made_tables):
    lists = [[torch.ones(3)] for _ in range(17)]
    with launches(run=False):
        for x in [*lists[:16], lists[0], lists[16]]:
            backend.unscale_(x, torch.tensor(1.0))
        assert (len(made_tables), len(backend._tables)) == (17, 16)
        for x in (lists[0], lists[2], lists[16]):
            backend.unscale_(x, torch.tensor(1.0))
        assert len(made_tables) == 17
        backend.unscale_(lists[1], torch.tensor(1.0))
    assert (len(made_tables), len(backend._tables)) == (18, 16), "the one that was not used again went"
