"""The judge of attention's errors lets the naive computation pass and sees faults of a few roundings."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attention_budget import judge, judged
from attention_case import Case, Drawn
from attention_cases import CORE
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def naive(drawn: Drawn) -> dict[str, Tensor | None]:
    return judged(drawn).naive


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_naive_computation_passes(dtype: torch.dtype) -> None:
    for case in CORE:
        drawn = case.draw(dtype)
        judge(drawn, naive(drawn))


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a factor": ("out", lambda x: x * (1 + 1e-4), "out: error"),
    "a factor of a gradient": ("dk", lambda x: x * (1 + 1e-4), "dk: error"),
    "one element": ("dq", lambda x: x.index_add(2, torch.tensor([3]), torch.full_like(x[:, :, :1], 1e-5)), "dq: error"),
    "base 2": ("lse", lambda x: x / math.log(2), "lse: error"),
    "NaN": ("dv", lambda x: x.masked_fill(x == x.max(), math.nan), "dv: not finite"),
    "infinite": ("lse", lambda x: x.masked_fill(x == x.max(), -math.inf), "lse: not finite"),
    "drift": ("dbias", lambda x: x + 2e-7 * x.abs().max(), "dbias: (mean )?error"),
    "shape": ("dv", lambda x: x[:1], "dv: torch.Size"),
    "dtype": ("dq", lambda x: x.double(), "dq: .*float64"),
}


@pytest.mark.parametrize(("name", "fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_seen(name: str, fault: Callable[[Tensor], Tensor], message: str) -> None:
    drawn = Case("faults", (33, 65), bias="1HQK").draw(torch.float32)
    result = naive(drawn)
    right = result[name]
    assert right is not None
    with pytest.raises(AssertionError, match=message):
        judge(drawn, {**result, name: fault(right)})


def test_what_is_missing_or_too_much_is_seen() -> None:
    drawn = Case("missing", (17, 33), mask="BHQK").draw(torch.float32)
    result = naive(drawn)
    with pytest.raises(AssertionError, match="dq is missing"):
        judge(drawn, {**result, "dq": None})
    with pytest.raises(AssertionError, match="log_sum of a call that has none"):
        judge(drawn, {**result, "log_sum": result["lse"]})


def test_a_finite_number_in_place_of_an_infinite_one_is_seen() -> None:
    drawn = Case("finite", (33, 17), right=0).draw(torch.float32)
    result = naive(drawn)
    assert result["lse"] is not None
    with pytest.raises(AssertionError, match="lse: infinite elsewhere"):
        judge(drawn, {**result, "lse": result["lse"].clamp(min=-1e30)})


def test_a_dropped_mask_is_seen() -> None:
    drawn = Case("dropped", (33, 33), right=0).draw(torch.bfloat16)
    with pytest.raises(AssertionError, match="out: error"):
        judge(drawn, naive(Drawn(drawn.call._replace(right=1), drawn.d_out, None)))


def test_a_nan_in_the_reference_fails() -> None:
    drawn = Case("NaN", (5, 5)).draw(torch.float32)
    drawn.call.v[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="out: the reference is NaN"):
        judge(drawn, naive(drawn))
