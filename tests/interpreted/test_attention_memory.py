"""What Triton's kernels of attention launch, read and write.

Guards: a load or store outside the tensors, also where its result would not be used; offsets of 32 bits; a launch for a
gradient that nobody asked for; copies that were not needed, or needed and not made.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from attention_budget import GRADIENTS, judge
from attention_case import Case, Drawn
from attention_runs import chunks_of, computed
from interpreter import launches, names, no_overflow, strays
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYTHING = [
    Case("dense", (17, 35), heads=(4, 2), dims=(24, 8), left=20, right=3, mask="B1QK", bias="1HQ1", alibi="BH",
         dropout_p=0.1, d_lse=True, layout="transposed", d_out="transposed"),
    Case("full bias", (33, 17), heads=(2, 1), dims=(16, 40), bias="BHQK", mask="B11K", layout="transposed"),
    Case("segments", q_lengths=(3, 0, 35), k_lengths=(17, 4, 2), uncovered=(2, 3), heads=(2, 1), dims=(8, 24),
         right=0, alibi="BH", dropout_p=0.1, layout="transposed", d_out="expanded rows"),
    Case("whole blocks", (32, 64), heads=(2, 1), dims=(24, 40)),
    Case("top left", (35, 17), heads=(2, 1), left=4, right=2, top_left=True, layout="expanded heads"),
]  # fmt: skip


@pytest.mark.parametrize("case", EVERYTHING, ids=lambda case: case.name)
def test_nothing_beside_the_tensors_is_touched(backend, case: Case) -> None:
    """In tensors with gaps the gaps count as beside them."""
    drawn = case.draw(torch.float32)
    with strays([]) as found, no_overflow(), chunks_of(2):
        results = computed(backend, drawn)
    assert found == []
    judge(drawn, results)


# ---- launches --------------------------------------------------------------------------------------------------------
def test_one_launch_forward_and_those_backward_that_are_needed(backend) -> None:
    call, d_out, d_lse = Case("launches", (3, 5), bias="1H1K").draw(torch.float32)
    with launches() as made:
        outputs = backend.attention_forward(call)
    assert names(made) == ["forward"]
    for needs, kernels in {
        (True, True, True, True): ["delta", "keys", "queries", "bias"],
        (True, False, False, False): ["delta", "queries"],
        (False, True, False, False): ["delta", "keys"],
        (False, False, True, False): ["delta", "keys"],
        (False, False, False, True): ["delta", "bias"],
        (True, True, True, False): ["delta", "keys", "queries"],
    }.items():
        with launches() as made:
            results = backend.attention_backward(call, *outputs, d_out, d_lse, needs)
        assert names(made) == kernels
        assert tuple(x is not None for x in results) == needs
        judged = {name: x for name, x in zip(GRADIENTS, results, strict=True) if x is not None}
        judge(Drawn(call, d_out, d_lse), judged)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_without_queries_or_keys_nothing_is_launched_backward(backend, lengths: tuple[int, int]) -> None:
    drawn = Case("nothing", lengths, bias="BHQK").draw(torch.float32)
    with launches() as made:
        results = computed(backend, drawn)
    assert names(made) == (["forward"] if lengths[0] else [])
    judge(drawn, results)


LAYOUTS = {
    "plain": [],
    "packed": [],
    "transposed": [],
    "expanded heads": [],
    "odd rows": ["q", "k", "v"],
    "offset": ["q", "k", "v"],
    "strided": ["q", "k", "v"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_copied_only_where_rows_are_not_aligned(backend, layout: str) -> None:
    call, _, _ = Case("copies", (4, 4), layout=layout).draw(torch.bfloat16)
    given: list[tuple[int, ...]] = []
    with launches(before=lambda arguments: given.append(tuple(x.data_ptr() for x in arguments[:3]))):
        backend.attention_forward(call)
    ours = call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr()
    copied = [name for name, a, b in zip("qkv", given[0], ours, strict=True) if a != b]
    assert copied == LAYOUTS[layout]


def test_rows_far_apart_are_written_side_by_side_and_copied(backend, monkeypatch) -> None:
    """What a tile's 32-bit offsets cannot reach: results of more than 2^31 elements, the rows slowest."""
    from halfstep.triton_kernels.attention import launch

    monkeypatch.setattr(launch, "_STRIDE", 20)  # elements; rows here are 32 apart, side by side 16
    written: list[Tensor] = []
    drawn = Case("far", (17, 35), layout="transposed", d_out="transposed", bias="1H1K").draw(torch.float32)

    def note(arguments: Any) -> None:
        written.extend(x for x in arguments if isinstance(x, Tensor) and x.ndim == 4)

    with launches(before=note):
        results = computed(backend, drawn)
    assert {x.stride(2) for x in written} == {16}
    judge(drawn, results)
    for name in ("out", "dq", "dk", "dv"):
        result = results[name]
        assert result is not None
        assert result.stride(2) == 32


# ---- beyond 2^31 elements --------------------------------------------------------------------------------------------
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it


@pytest.fixture
def far() -> Tensor:
    """float16 [2^34], of which only those pages exist that are used."""
    size = 2**35
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.float16)


def spread(x: Tensor, far: Tensor, strides: tuple[int, int, int], begin: int) -> Tensor:
    place = far.as_strided(x.shape, (*strides, 1), begin)
    return place.copy_(x)


FAR = {
    # Beyond what the interpreter takes for an unsigned int of 32 bits and then shifts as a signed one.
    "batches": (2**33 + 2**10, 2**12, 2**6),
    "batches of 2^31": (2**31 + 2**10, 2**12, 2**6),
    "heads": (2**12, 2**31 + 2**10, 2**6),
    "rows": (2**8, 2**6, 2**23 - 8),  # the largest stride of rows that is not copied
    "rows, copied": (2**8, 2**6, 2**27),
}


@pytest.mark.parametrize("which", FAR)
def test_offsets_of_more_than_32_bits(backend, far: Tensor, which: str) -> None:
    """Tensors whose batches, heads or rows lie more than 2^31 elements apart."""
    lengths = (290, 290) if which == "rows" else (5, 7)
    drawn = Case(which, lengths, heads=(2, 2), right=0, left=8).draw(torch.float16)
    call, d_out, _ = drawn
    q, k, v, d = (spread(x, far, FAR[which], 16 * at) for at, x in enumerate((call.q, call.k, call.v, d_out)))
    there = Drawn(call._replace(q=q, k=k, v=v), d, None)
    with no_overflow():
        judge(drawn, computed(backend, there))
