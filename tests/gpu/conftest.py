"""Tests that need an NVIDIA GPU and halfstep._cuda: `make gpu`, or `pytest tests/gpu --override-ini=addopts=-ra`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from cuda_device import CudaDevice
from stand_in import StandIn

from halfstep.ops import backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stand-in", action="store_true", help="run on the CPU, emulated: see stand_in.py")


@cache
def why_not() -> str | None:
    """Why nothing in this folder can run here."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "torch finds no NVIDIA GPU here"
    native, reason = backend._native_for(torch.device("cuda", torch.cuda.current_device()))
    return None if native else reason


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.getoption("--stand-in") and why_not():
        pytest.skip(f"tests/gpu: {why_not()}")


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Any:
    """The current GPU, or what stands in for it."""
    if request.config.getoption("--stand-in"):
        return StandIn()
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))
