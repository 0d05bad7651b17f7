"""Triton kernels past 2**31 elements: the tests of the CUDA kernels, with the programs at both ends of each tensor.

Guards: a 32-bit index of an element or byte, a quad of random words cut to 32 bits, work that is not numbered.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted

# The same tests with other kernels; `backend` is this module's
from test_cuda_large_tensors import (  # noqa: F401
    test_accumulate,
    test_cast,
    test_grad_stats_and_unscale,
    test_update,
)

from halfstep.ops import triton_gpu, triton_plan, triton_tables

pytestmark = pytest.mark.newest  # offsets are numpy's in every version


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, scratch: None):
    """What a program that does not run would leave of zeros: a sum of 0."""

    def ends(*given):
        return {pattern: work[:2] + work[-2:] for pattern, work in triton_tables.tasks(*given).items()}

    for module in (triton_gpu, triton_plan):
        monkeypatch.setattr(module, "tasks", ends)
        monkeypatch.setattr(module.torch, "empty", torch.zeros)
    return interpreted()
