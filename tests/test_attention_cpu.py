"""Attention in plain torch operations, as CPU tensors are computed, by the float64 formula and its error budget."""

from __future__ import annotations

import pytest
import torch
from attention_budget import judge
from attention_case import Case, Drawn
from attention_cases import CASES
from torch import Tensor

from halfstep.ops import attention_torch

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = (True, True, True, True)


def computed(drawn: Drawn, needs: tuple[bool, bool, bool, bool] = ALL) -> dict[str, Tensor | None]:
    call, d_out, d_lse = drawn
    outputs = attention_torch.attention_forward(call)
    gradients = attention_torch.attention_backward(call, *outputs, d_out, d_lse, needs)
    return dict(zip(("out", "lse", "log_sum", "dq", "dk", "dv", "dbias"), (*outputs, *gradients), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    drawn = case.draw(dtype)
    judge(drawn, computed(drawn))
