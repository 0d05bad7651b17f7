"""Settings that hold for every test."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_builds
import pytest
import torch
import triton_session
from hypothesis import settings

# No deadline: the first example of a property test loads kernels. The same examples in every run; to look for new ones:
# pytest --hypothesis-profile=search
settings.register_profile("halfstep", settings(), deadline=None, derandomize=True)
settings.register_profile("search", settings(), deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("halfstep")

# pytest-xdist runs several processes: each gets its share of the cores, or torch's thread pools spin against each
# other at every barrier. Tests about threads set their own number.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated", choices=emulated_builds.VARIANTS, default="plain", help="how the emulated CUDA module is built"
    )
    parser.addoption("--triton", metavar="VERSION", help="fail unless this is the Triton that is imported")


def pytest_configure(config: pytest.Config) -> None:
    emulated_builds.selected = config.getoption("--emulated")
    wanted = config.getoption("--triton")
    if wanted is not None:
        triton_session.require(wanted)


def pytest_report_header() -> str | None:
    return "TRITON_INTERPRET=1: tests/interpreted, and what is named" if triton_session.interpreting() else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return triton_session.left_out(collection_path, config.args) or None


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def ranks_found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes of ranks_job.py found, started once for the tests of several files."""
    import ranks_job

    return ranks_job.started(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small computations, which threads would spend waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails."""

    def refuse(_: socket.socket, address: Any) -> None:
        raise AssertionError(f"a test connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(params=["C++", "Python"])
def either_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's tensors are read from C++, or from Python as where a torch cannot be read."""
    from halfstep.ops import native_cpu

    if request.param == "Python":
        monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)
    else:
        assert native_cpu.tensor_reader() is not None


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its precision, accumulation and device for the whole process: each test starts and ends bare."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile without graphs, counts and guards of other tests, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
