"""Tests that need a GPU: `make gpu`, or `pytest tests/gpu --override-ini=addopts=-ra`.

Those that take `gpu` run once with each backend that has kernels for it: "native" (halfstep._cuda) and "triton". A
module that is about one of them says so: BACKENDS = ["triton"], or names those of its tests that are: NATIVE_ALONE.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from cuda_device import CudaDevice
from stand_in import Emulated, Interpreted

from halfstep.ops import backend, triton_gpu

BACKENDS = ["native", "triton"]
# Triton's functions are interpreted or compiled, for all of a process
STANDS_IN = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "native"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stand-in", action="store_true",
        help="run on the CPU, emulated, or with TRITON_INTERPRET=1 interpreted: see stand_in.py",
    )  # fmt: skip
    parser.addoption("--backend", choices=BACKENDS, help="the tests of one backend")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_gpu: means nothing on what stands in for a GPU")
    if STANDS_IN == "triton":  # numpy, which the interpreter computes with, warns of what the kernels are there for
        config.addinivalue_line(
            "filterwarnings", "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
        )
        # of Triton 3.6's interpreter itself
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def backends_of(module: Any, function: str, config: pytest.Config) -> list[str]:
    wanted = STANDS_IN if config.getoption("--stand-in") else config.getoption("--backend")
    names = ["native"] if function in getattr(module, "NATIVE_ALONE", ()) else getattr(module, "BACKENDS", BACKENDS)
    return [name for name in names if wanted in (None, name)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu" in metafunc.fixturenames:
        names = backends_of(metafunc.module, metafunc.function.__name__, metafunc.config) or ["no backend"]
        metafunc.parametrize("gpu", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What the options leave out is deselected, not skipped: a skip has its reason in the machine."""

    def left_out(item: Any) -> bool:
        return not backends_of(item.module, item.function.__name__, config) or (
            config.getoption("--stand-in") and item.get_closest_marker("real_gpu") is not None
        )

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]


@cache
def why_not(name: str) -> str | None:
    """Why this backend's tests cannot run here."""
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    device = torch.device("cuda", torch.cuda.current_device())
    return backend._native_for(device)[1] if name == "native" else triton_gpu.why_not(device)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.getoption("--stand-in") and not torch.cuda.is_available():
        pytest.skip("tests/gpu: torch finds no GPU here")


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Any:
    """The current GPU with one backend's kernels, or what stands in for both."""
    if request.config.getoption("--stand-in"):
        return {"native": Emulated, "triton": Interpreted}[request.param]()
    if why_not(request.param):
        pytest.skip(f"tests/gpu, {request.param}: {why_not(request.param)}")
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()), request.param)
