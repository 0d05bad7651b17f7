"""What a step did, on its way to the host."""

from __future__ import annotations

import pytest
import torch
from device_clock import DeviceClock

from halfstep.outcomes import HostCopy, StepOutcome, first_of_all


def test_results_on_the_cpu_are_there_at_once():
    copy = HostCopy(torch.tensor(3), torch.tensor([True, False]))
    assert copy.ready()
    assert copy.values() == [3, [True, False]]


def test_a_copy_waits_for_itself_alone(monkeypatch):
    clock = DeviceClock(monkeypatch)
    first, second = HostCopy(torch.tensor(1)), HostCopy(torch.tensor(2))
    assert not first.ready()
    assert first.values() == [1]
    assert (clock.waits, first.ready(), second.ready()) == (1, True, False)
    assert second.values() == second.values() == [2]
    assert clock.waits == 2


def test_an_outcome_answers_and_names():
    names = ["embed", "head"]
    outcome = StepOutcome(torch.tensor(True), torch.tensor(1), names.__getitem__, torch.tensor(5))
    assert (outcome.was_skipped(), outcome.culprit(), outcome.healed()) == (True, "head", 5)
    outcome = StepOutcome(torch.tensor(False))
    assert (outcome.was_skipped(), outcome.culprit(), outcome.healed()) == (False, None, 0)


@pytest.mark.parametrize(
    ("answers", "first"),
    [([-1, -1, -1], -1), ([0, -1, -1], 1), ([1, 0, -1], 0), ([-1, 1, 0], 2), ([-1, -1, 1], 6)],
)
def test_the_first_over_several_devices(answers, first):
    """A model whose layers alternate between devices: the index is that in the whole list."""
    places = [[1, 4], [0, 3, 5], [2, 6]]
    assert first_of_all([torch.tensor(a) for a in answers], places) == first
    assert first_of_all([torch.tensor(answers[0])], [[0, 1]]) == answers[0]


def test_the_event_is_on_the_stream_that_copies(monkeypatch):
    """Of each tensor's own device, which need not be the current one."""
    asked = []

    class Stream:
        def record_event(self) -> None:
            asked.append("recorded")

    class Away:
        def __init__(self, name: str) -> None:
            self.device, self.nbytes = torch.device(name), 1

        def untyped_storage(self) -> torch.UntypedStorage:
            return torch.UntypedStorage(1)

        def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
            assert (device, non_blocking) == ("cpu", True)
            asked.append("copied")
            return torch.tensor(1)

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: asked.append(str(device)) or Stream())
    HostCopy(Away("cuda:1"), torch.tensor(2), Away("cuda:1"))  # type: ignore[arg-type]
    assert asked == ["copied", "copied", "cuda:1", "recorded"]


def test_views_of_one_buffer_are_one_copy(monkeypatch):
    """As a backend may return its results: other dtypes at other places of one small allocation."""
    clock, copied = DeviceClock(monkeypatch), []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args, **options: copied.append(t) or to(t, *args, **options))
    buffer = torch.zeros(4, dtype=torch.int64)
    norm, skipped = buffer[:1].view(torch.float64), buffer.view(torch.bool)[8]
    pair, index = buffer[2:].view(torch.int32)[1:3], buffer[3]
    norm.fill_(0.1)
    skipped.fill_(True)
    pair.copy_(torch.tensor([-7, 5]))
    wide = torch.arange(1000)
    copy = HostCopy(norm, skipped, torch.tensor(3), pair, index, wide[4])
    assert [t.nbytes for t in copied] == [32, 8, 8]  # the buffer, a tensor of its own, one number out of a large tensor
    assert copy.values() == [[0.1], True, 3, [-7, 5], 5, 4]
    assert clock.waits == 1
