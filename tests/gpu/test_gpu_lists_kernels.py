"""The tests of test_cuda_lists.py with the kernels on the GPU, whose order of threads is the hardware's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import test_cuda_lists
from test_cuda_lists import *  # noqa: F403

NATIVE_ALONE = {"test_launches_of_1000_small_tensors"}  # what shares a launch


@pytest.fixture
def order() -> None:
    """In place of three of the emulator's."""


@pytest.fixture(autouse=True)
def kernels_of_the_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = gpu.mirror()
    monkeypatch.setattr(test_cuda_lists, "emulated", lambda: mirror)
    monkeypatch.setattr(test_cuda_lists, "ordered", nullcontext)
    monkeypatch.setattr(test_cuda_lists, "launches", gpu.launches)
