"""Makes the CPU look like a device that lags behind: what a step did is on the host only when it is waited for.

For code that must not wait: `waits` counts what did.
"""

from __future__ import annotations

import pytest
import torch

from halfstep.ops import devices


class DeviceClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.done = 0  # events that are over
        self.recorded = 0
        monkeypatch.setattr(devices, "is_host", lambda device: False)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self)

    def record_event(self) -> _Event:
        """As of the device's stream."""
        self.recorded += 1
        return _Event(self, self.recorded)

    def finish(self) -> None:
        """The device has done all it was given."""
        self.done = self.recorded


class _Event:
    """torch.Event, as far as halfstep uses it."""

    def __init__(self, clock: DeviceClock, number: int) -> None:
        self._clock, self._number = clock, number

    def query(self) -> bool:
        return self._number <= self._clock.done

    def synchronize(self) -> None:
        if not self.query():
            self._clock.waits += 1
            self._clock.done = self._number
