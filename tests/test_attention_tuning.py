"""hs.tune_attention where there is nothing to tune."""

from __future__ import annotations

import re

import pytest
import torch

import halfstep as hs


def test_there_is_nothing_to_tune_on_a_cpu() -> None:
    q = torch.ones(2, 2, 3, 8)
    text = (
        "tune_attention times Triton's kernels on a GPU, got tensors on cpu: Triton's kernels run on GPUs. There is "
        "nothing to tune here: call attention() as it is"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        hs.tune_attention(q, q, q, causal=True)
