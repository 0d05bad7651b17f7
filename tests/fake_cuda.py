"""torch.cuda as far as tests and benches use it, with the signatures of the real one, where there is no GPU.

It does nothing: events are 1 ms apart, everything else returns at once. Whoever misspells a name or an argument fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

GIB = 2**30
_RETURNS: dict[str, Any] = {
    "current_device": 0, "device_count": 2, "get_device_capability": (9, 0),
    "is_available": True, "mem_get_info": (100 * GIB, 140 * GIB),
    "memory_allocated": 1000, "max_memory_allocated": 3000, "get_sync_debug_mode": 0,
    "is_current_stream_capturing": False,
    "get_device_properties": SimpleNamespace(name="Fake", major=9, minor=0, total_memory=140 * GIB),
    "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "set_sync_debug_mode": None,
    "_sleep": None,
}  # fmt: skip


def fake_cuda(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fakes by name, as mocks that know how they were called."""
    fakes = {}
    for name, value in _RETURNS.items():
        fakes[name] = create_autospec(getattr(torch.cuda, name), return_value=value)
    for name in ("Event", "Stream", "CUDAGraph"):
        fakes[name] = create_autospec(getattr(torch.cuda, name))
    fakes["Event"].return_value.elapsed_time.return_value = 1.0
    fakes["current_stream"] = create_autospec(torch.cuda.current_stream)
    for name in ("graph", "stream"):  # context managers
        fakes[name] = create_autospec(getattr(torch.cuda, name))
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    return fakes


def fake_profile(names: list[str]) -> Any:
    """In place of torch.profiler.profile: these ran on the device, and one more on the host."""
    events = [SimpleNamespace(name=name, device_type=DeviceType.CUDA) for name in names]
    events.append(SimpleNamespace(name="halfstep::host", device_type=DeviceType.CPU))

    @contextmanager
    def profile(*, activities: list[ProfilerActivity]) -> Iterator[Any]:
        assert activities == [ProfilerActivity.CUDA]
        yield SimpleNamespace(events=lambda: events)

    return profile
