"""The tables that Triton kernels read: whose work is whose, which stream sees which copy, what a capture keeps."""

from __future__ import annotations

import pytest
import torch

from halfstep.ops import devices, triton_tables
from halfstep.ops.triton_tables import HostMemory, Words, first_parts, tasks

HERE = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The CPU in the place of a GPU whose stream and capture the test sets."""
    state: dict[str, object] = {"stream": 1, "capturing": False, "pinned": 0}

    def pinned(count: int, where: torch.device) -> torch.Tensor:
        assert not state["capturing"], "pinned memory is made in a capture"
        state["pinned"] = count
        return torch.empty(count, dtype=torch.int64)

    monkeypatch.setattr(devices, "is_host", lambda where: False)
    monkeypatch.setattr(devices, "is_capturing", lambda where: state["capturing"])
    monkeypatch.setattr(devices, "stream", lambda where: state["stream"])
    monkeypatch.setattr(triton_tables, "_pinned", pinned)
    # a copy that is one, as from the host to a device
    monkeypatch.setattr(Words, "_upload", lambda self: list(self._host.clone().split(self._sizes)))
    return state


def test_every_part_of_every_row_has_one_program():
    numels, patterns = [5, 0, 10, 11, 1], [(1,), (1,), (2,), (1,), (2,)]
    work = tasks(numels, patterns, 5)
    decoded = {pattern: [(word >> 32, word & 0xFFFFFFFF) for word in words] for pattern, words in work.items()}
    assert decoded == {(1,): [(0, 0), (3, 0), (3, 1), (3, 2)], (2,): [(2, 0), (2, 1), (4, 0)]}
    assert first_parts(numels, 5) == [0, 1, 1, 3, 6, 7]


def test_rows_of_more_than_2_to_the_31_parts_of_elements():
    work = tasks([2**31 + 1], [(0,)], 2**30)
    assert work == {(0,): [0, 1, 2]}


def test_words_come_back_as_lists():
    pieces = Words([[1, 2], [], [2**62, -1]], HostMemory(HERE), HERE).pieces()
    assert [piece.tolist() for piece in pieces] == [[1, 2], [], [2**62, -1]]
    assert {piece.dtype for piece in pieces} == {torch.int64}


def test_one_copy_for_a_stream_and_another_for_the_next(device):
    """Work on another stream could come to the words before their copy."""
    words = Words([[7]], HostMemory(HERE), HERE)
    first = words.pieces()
    assert words.pieces() is first
    device["stream"] = 2
    second = words.pieces()
    assert second is not first
    device["stream"] = 1
    assert words.pieces() is not first, "that copy may have been given up"
    assert second[0].tolist() == [7]
    assert not words.captured


def test_a_capture_has_copies_of_its_own(device):
    """Also of a second capture on one stream, and of the eager step after it."""
    words = Words([[7]], HostMemory(HERE), HERE)
    eager = words.pieces()
    device["capturing"] = True
    captured = [words.pieces(), words.pieces()]
    device["capturing"] = False
    after = words.pieces()
    addresses = {piece[0].data_ptr() for piece in (eager, *captured, after)}
    assert len(addresses) == 4
    assert words.captured
    assert words.pieces() is after
    assert all(held in words._held for held in captured)


def test_what_a_capture_brings_from_the_host_is_never_used_again(device):
    memory = HostMemory(HERE)
    memory.filled([0] * 100)
    device["capturing"] = True
    first, second = memory.filled([1, 2, 3]), memory.filled([4, 5])
    device["capturing"] = False
    for _ in range(3):
        memory.filled([9] * 100)
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])


def test_memory_for_captures_grows_with_what_is_copied(device):
    memory = HostMemory(HERE)
    memory.filled([0] * 100_000)
    device["capturing"] = True
    assert all(memory.filled([k] * 100_000)[-1] == k for k in range(4))


def test_a_capture_that_needs_more_is_refused(device):
    memory = HostMemory(HERE)
    device["capturing"] = True
    with pytest.raises(RuntimeError, match="more pinned memory than is set aside; run the same calls once"):
        memory.filled([1])
