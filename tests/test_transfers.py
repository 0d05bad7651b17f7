"""Host buffers, and the device on the host that shows what does not wait.

Guards: buffers rounded up or never given back, and a stand-in that would see no mistake.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch

from halfstep.transfers import host
from halfstep.transfers.host import HostTransfers
from halfstep.transfers.host_buffers import PAGE


def bytes_of(device: HostTransfers, *values: int) -> torch.Tensor:
    """On the device, made on its current stream."""
    return device.empty(len(values)).copy_(torch.tensor(values, dtype=torch.uint8))


# ---- buffers -------------------------------------------------------------------------------------------------------
def test_buffers_have_their_exact_size_and_go_round() -> None:
    device = HostTransfers()
    pool = device.buffers
    first, second = (pool.take(n, device.outgoing) for n in (1000, 1000))
    assert first.memory.nbytes == 1000
    assert first.memory.data_ptr() % PAGE == 0
    assert abs(first.memory.data_ptr() - second.memory.data_ptr()) >= PAGE, "no page in common"
    pool.give(first, None)
    assert (pool.used_bytes, pool.free_bytes) == (1000, 1000)
    assert pool.take(1000, device.outgoing) is first
    assert pool.free_bytes == 0


@pytest.mark.parametrize(("wanted", "fits"), [(900, True), (889, True), (888, False), (1001, False)])
def test_a_buffer_serves_what_is_an_eighth_smaller(wanted: int, fits: bool) -> None:
    device = HostTransfers()
    pool = device.buffers
    buffer, larger = pool.take(1000, device.outgoing), pool.take(5000, device.outgoing)
    pool.give(buffer, None)
    assert (pool.take(wanted, device.outgoing) is buffer) is fits
    assert larger.memory.nbytes == 5000


def test_what_fits_nothing_makes_room() -> None:
    device = HostTransfers()
    pool = device.buffers
    for length in range(1000, 5000, 400):
        taken = [pool.take(length, device.outgoing) for _ in range(3)]
        assert pool.used_bytes + pool.free_bytes == 3 * length
        for buffer in taken:
            pool.give(buffer, None)
    assert pool.free_bytes == 3 * 4600
    (small,) = [pool.take(10, device.outgoing)]
    assert small.memory.nbytes == 10
    assert pool.used_bytes + pool.free_bytes <= 3 * 4600


def test_a_host_without_memory_is_named() -> None:
    device = HostTransfers()
    device.buffers.take(1000, device.outgoing)
    with pytest.raises(
        RuntimeError, match=r"no 1,152,\d+,\d+,\d+,\d+,\d+ bytes.* cpu .*beside 1,000 in use; move less"
    ):
        device.buffers.take(2**60, device.outgoing)


# ---- the device on the host ----------------------------------------------------------------------------------------
def test_a_copy_happens_later_and_nan_is_there_until_then() -> None:
    seen = set()
    for seed in range(20):
        device = HostTransfers(seed)
        source, copy = bytes_of(device, 1, 2), torch.zeros(2, dtype=torch.uint8)
        device.wait(device.outgoing, device.record(device.current()))
        device.copy_(device.outgoing, copy, source)
        event = device.record(device.outgoing)
        seen.add((tuple(copy.tolist()), device.done(event)))
        device.synchronize(event)
        assert copy.tolist() == [1, 2]
        assert device.done(event)
    assert ((255, 255), False) in seen
    assert ((1, 2), True) in seen


def test_streams_keep_their_order_and_wait_for_each_other() -> None:
    for seed in range(20):
        device = HostTransfers(seed)
        source, middle, last = bytes_of(device, 7), torch.zeros(1, dtype=torch.uint8), device.empty(1)
        device.wait(device.outgoing, device.record(device.current()))
        device.copy_(device.outgoing, middle, source)
        device.wait(device.incoming, device.record(device.outgoing))
        device.copy_(device.incoming, last, middle)
        device.wait(device.current(), device.record(device.incoming))
        assert last.tolist() == [7]


def no_wait_before(device: HostTransfers) -> None:
    device.copy_(device.outgoing, torch.zeros(1, dtype=torch.uint8), bytes_of(device, 1))


def an_old_event(device: HostTransfers) -> None:
    event = device.record(device.current())
    source = bytes_of(device, 1)
    device.wait(device.outgoing, event)
    device.copy_(device.outgoing, torch.zeros(1, dtype=torch.uint8), source)


def ready(device: HostTransfers) -> tuple[torch.Tensor, torch.Tensor]:
    source, copy = bytes_of(device, 1), torch.zeros(1, dtype=torch.uint8)
    device.wait(device.outgoing, device.record(device.current()))
    device.copy_(device.outgoing, copy, source)
    return source, copy


def written_while_read(device: HostTransfers) -> None:
    source, _ = ready(device)
    source.add_(1)


def read_too_early(device: HostTransfers) -> None:
    _, copy = ready(device)
    copy + 1


def out_while_read(device: HostTransfers) -> None:
    source, _ = ready(device)
    torch.add(torch.ones(1, dtype=torch.uint8), 1, out=source)


def two_copies_into_one(device: HostTransfers) -> None:
    source, copy = ready(device)
    device.wait(device.incoming, device.record(device.current()))
    device.copy_(device.incoming, copy, source)


def freed_source(device: HostTransfers) -> None:
    source, _copy = ready(device)
    del source
    device.finish()


def freed_destination(device: HostTransfers) -> None:
    _source, copy = ready(device)
    del copy
    device.finish()


def another_streams_memory(device: HostTransfers) -> None:
    memory, other = bytes_of(device, 1), device.other()
    device.wait(other, device.record(device.current()))
    with device.on(other):
        memory + 1


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (no_wait_before, "outgoing stream reads memory that the operators' stream writes, and does not wait"),
        (an_old_event, "outgoing stream reads memory that the operators' stream writes"),
        (written_while_read, "operators' stream writes memory that the outgoing stream reads"),
        (read_too_early, "operators' stream reads memory that the outgoing stream writes"),
        (out_while_read, "operators' stream writes memory that the outgoing stream reads"),
        (two_copies_into_one, "incoming stream writes memory that the outgoing stream writes"),
        (freed_source, "still to read memory that has been freed; hold it"),
        (freed_destination, "still to write memory that has been freed; hold it"),
        (another_streams_memory, r"may be given away while it does: keep\(tensor, stream\)"),
    ],
)
def test_mistakes_are_seen_whatever_the_times(mistake: Callable[[HostTransfers], None], message: str) -> None:
    for seed in range(10):
        device = HostTransfers(seed)
        with device.watch(), pytest.raises(RuntimeError, match=message):
            mistake(device)


def test_kept_memory_outlives_its_last_reference() -> None:
    for seed in range(10):
        device = HostTransfers(seed)
        source, copy = ready(device)
        device.keep(source, device.outgoing)
        del source
        device.finish()
        assert copy.tolist() == [1]


def test_what_the_host_has_seen_done_needs_no_wait() -> None:
    device = HostTransfers()
    source, copy = ready(device)
    device.synchronize(device.record(device.outgoing))
    with device.watch():
        assert torch.equal(source, copy)


def test_its_example_runs() -> None:
    results = doctest.testmod(host)
    assert (results.attempted, results.failed) == (8, 0)


def test_copies_are_of_bytes() -> None:
    device = HostTransfers()
    with pytest.raises(TypeError, match=r"flat uint8 tensors of one length, got torch.float32 \(2,\).*view"):
        device.copy_(device.outgoing, torch.zeros(2), torch.zeros(2))
