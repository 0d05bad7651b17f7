"""Settings that hold for every test."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# No deadline: the first example of a property test loads kernels. Everything else as hypothesis chooses, which under CI
# includes examples that are the same in every run.
settings.register_profile("halfstep", settings(), deadline=None)
settings.load_profile("halfstep")

# pytest-xdist runs several processes: each gets its share of the cores, or torch's thread pools spin against each
# other at every barrier. Tests about threads set their own number.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection fails."""

    def refuse(_: socket.socket, address: Any) -> None:
        raise AssertionError(f"a test connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its precision, accumulation and device for the whole process: each test starts and ends bare."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
