"""The tests of test_cuda_optimizer.py with the kernels on the GPU, whose order of threads is the hardware's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import test_cuda_optimizer
from test_cuda_optimizer import *  # noqa: F403

# What shares a launch
NATIVE_ALONE = {
    "test_launches_of_1000_small_tensors", "test_1000_small_tensors_of_mixed_kinds",
    "test_few_tensors_of_mixed_kinds_share_a_launch", "test_three_launches",
}  # fmt: skip


@pytest.fixture
def order() -> None:
    """In place of three of the emulator's."""


@pytest.fixture(autouse=True)
def kernels_of_the_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = gpu.mirror()
    monkeypatch.setattr(test_cuda_optimizer, "emulated", lambda: mirror)
    monkeypatch.setattr(test_cuda_optimizer, "ordered", nullcontext)
    monkeypatch.setattr(test_cuda_optimizer, "launches", gpu.launches)
