"""Attention's kernels on the device, by the float64 formula and its error budget: the cases of every backend, and
lengths at which the device's own tiles are full.

Guards: a tile of the table that is wrong where the interpreter's small ones are right; a product in fewer digits; an
offset that 32 bits do not hold.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_budget import judge
from attention_case import Case, Drawn
from attention_cases import CASES, CORE
from bits import assert_same_bits
from test_gpu_devices import needs
from torch import Tensor

from halfstep.ops import triton_gpu
from halfstep.ops.attention_call import AttentionCall

BACKENDS = ["triton"]  # there is nothing else for attention
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BFLOAT16, FLOAT16, FLOAT32]
NAMES = ("out", "lse", "log_sum", "dq", "dk", "dv", "dbias")
OTHERS = [case for case in CASES if not case.core]

LONG = [
    *(
        Case(f"head dim {dim}, causal", (1000, 1000), heads=(4, 2), dims=(dim, dim), right=0)
        for dim in (64, 80, 128, 192, 256)
    ),
    Case("all visible", (1000, 777), dims=(128, 128)),
    Case("wide keys, narrow values", (777, 1000), dims=(192, 128), right=0),
    Case("window", (1000, 1000), heads=(4, 1), dims=(64, 64), left=200, right=0),
    Case("decoding", (1, 1000), heads=(4, 2), dims=(128, 128), right=0),
    Case("dropout", (1000, 1000), dims=(64, 64), dropout_p=0.3, right=0),
    Case("bias of all batch elements, mask", (500, 700), dims=(64, 64), bias="1HQK", mask="B11K", d_lse=True),
    Case("bias of keys", (500, 700), dims=(128, 128), bias="111K", softcap=5.0),
    Case("varlen", q_lengths=(700, 1, 333), k_lengths=(500, 40, 333), heads=(4, 2), dims=(128, 128), right=0),
]
LONGEST = Case("length 4,096", (4096, 4096), heads=(2, 1), dims=(128, 128), right=0, layout="packed")


def moved(drawn: Drawn, device: torch.device) -> Drawn:
    """There, with the strides it has."""

    def there(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    call, d_out, d_lse = drawn
    return Drawn(AttentionCall(*map(there, call)), there(d_out), there(d_lse))


def computed(gpu: Any, drawn: Drawn) -> dict[str, Tensor | None]:
    """On its device, everything there is."""
    call, d_out, d_lse = drawn
    kernels = triton_gpu.of_device(call.q.device)
    outputs = kernels.attention_forward(call)
    gradients = kernels.attention_backward(call, *outputs, d_out, d_lse, (True, True, True, True))
    gpu.synchronize()
    return dict(zip(NAMES, (*outputs, *gradients), strict=True))


def check(gpu: Any, case: Case, dtype: torch.dtype) -> None:
    """The judge sits on the CPU."""
    found = computed(gpu, case.draw(dtype, gpu.device))
    judge(case.draw(dtype), {name: None if x is None else x.cpu() for name, x in found.items()})


def shortened(gpu: Any, case: Case) -> Case:
    """To what an interpreter does in a moment."""
    if gpu.compiles:
        return case
    cut = {name: tuple(min(n, 40) for n in getattr(case, name)) for name in ("lengths", "q_lengths", "k_lengths")
           if getattr(case, name) is not None}  # fmt: skip
    return Case(**{**vars(case), **cut})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORE, ids=lambda case: case.name)
def test_core(gpu: Any, case: Case, dtype: torch.dtype) -> None:
    check(gpu, case, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, DTYPES[i % 3], id=f"{case.name}, {DTYPES[i % 3]}") for i, case in enumerate(OTHERS)],
)
def test_the_others(gpu: Any, case: Case, dtype: torch.dtype) -> None:
    check(gpu, case, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}, {dtype}")
        for case in LONG
        for dtype in (DTYPES if case.name in ("head dim 128, causal", "varlen") else [BFLOAT16])
    ],
)
def test_full_tiles(gpu: Any, case: Case, dtype: torch.dtype) -> None:
    check(gpu, shortened(gpu, case), dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_thousands_of_rows(gpu: Any, dtype: torch.dtype) -> None:
    """The judge is on the device, too: its matrices are too many numbers for a CPU."""
    drawn = shortened(gpu, LONGEST).draw(dtype, gpu.device)
    judge(drawn, computed(gpu, drawn))


@pytest.mark.parametrize("case", [LONG[2], LONG[9], LONG[10], LONG[12]], ids=lambda case: case.name)
def test_results_repeat_bit_for_bit(gpu: Any, case: Case) -> None:
    drawn = shortened(gpu, case).draw(BFLOAT16, gpu.device)
    first = computed(gpu, drawn)
    for again in (computed(gpu, drawn), computed(gpu, drawn)):
        for name, x in first.items():
            other = again[name]
            assert (x is None) == (other is None)
            if x is not None and other is not None:
                assert_same_bits(other.cpu(), x.cpu(), name)


@pytest.mark.xdist_group("large")
def test_rows_past_31_bits(gpu: Any) -> None:
    """Eight tensors of so many elements. The last rows get what they get in short tensors; the gradient of the first
    ones is 0."""
    dim, rows, seen = 128, 128, 64
    needs(gpu, 8 * 2)
    length = max(256, -(-gpu.large // (4 * dim * 128)) * 128)
    short = Case("the last rows", (rows, rows + seen), dims=(dim, dim), left=seen, right=0)
    small, d_small, _ = short.draw(BFLOAT16, gpu.device)

    def last_of_many(x: Tensor) -> Tensor:
        large = torch.zeros((*x.shape[:2], length, dim), dtype=BFLOAT16, device=gpu.device)
        large[:, :, -x.shape[2] :] = x
        return large

    q, k, v, d_out = map(last_of_many, (small.q, small.k, small.v, d_small))
    found = computed(gpu, Drawn(small._replace(q=q, k=k, v=v), d_out, None))
    ends = {"out": rows, "lse": rows, "dq": rows, "dk": rows + seen, "dv": rows + seen}
    results = {name: x for name, x in found.items() if x is not None and name in ends}
    judge(short.draw(BFLOAT16), {name: x[:, :, -ends[name] :].cpu() for name, x in results.items()})
    for name in ("dq", "dk", "dv"):
        assert not results[name][:, :, : length - rows - seen].any(), name
