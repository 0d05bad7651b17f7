"""CudaTransfers against what stands in for torch.cuda: which calls, on which stream, in which order.

Guards: a misspelt call, a copy on the wrong stream or one that waits, memory that stays registered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from fake_cuda import fake_cuda
from offload_cases import assert_same, gradients
from torch import Tensor

import halfstep as hs
from halfstep import transfers
from halfstep.transfers.cuda import CudaTransfers
from halfstep.transfers.host_buffers import PAGE

HOST = torch.device("cpu")  # in the place of a GPU's memory


class Fakes:
    """torch.cuda with three streams; `calls` is what was asked of it, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error, self.where = 0, "current"
        self.registered: dict[int, int] = {}
        self._specs = {name: getattr(torch.cuda, name) for name in ("Stream", "Event")}
        fakes = fake_cuda(patch)
        names = iter(["outgoing", "incoming"])
        self.streams = {name: self._stream(name) for name in ("current", "outgoing", "incoming")}
        fakes["Stream"].side_effect = lambda device: self.streams[next(names)]
        fakes["Event"].side_effect = self._event
        fakes["current_stream"].side_effect = lambda device: self.streams["current"]
        fakes["stream"].side_effect = self._on
        patch.setattr(torch.cuda, "device", create_autospec(torch.cuda.device))
        runtime = SimpleNamespace(
            cudaHostRegister=self._register, cudaHostUnregister=self._unregister, cudaError=SimpleNamespace(success=0)
        )
        patch.setattr(torch.cuda, "cudart", create_autospec(torch.cuda.cudart, return_value=runtime))
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.calls.append(("keep", stream.name)))
        copy_ = Tensor.copy_

        def copied(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
            self.calls.append(("copy", self.where, non_blocking))
            return copy_(dst, src)

        patch.setattr(Tensor, "copy_", copied)

    def _stream(self, name: str) -> Any:
        stream = create_autospec(self._specs["Stream"], instance=True)
        stream.name = name
        stream.wait_event.side_effect = lambda event: self.calls.append(("wait", name, event.of))
        return stream

    def _event(self) -> Any:
        event = create_autospec(self._specs["Event"], instance=True)

        def record(stream: Any) -> None:
            event.of = stream.name
            self.calls.append(("record", stream.name))

        event.record.side_effect = record
        event.query.side_effect = lambda: bool(self.calls.append(("query", event.of)))
        event.synchronize.side_effect = lambda: self.calls.append(("synchronize", event.of))
        return event

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.where = self.where, stream.name
        yield
        self.where = before

    def _register(self, pointer: int, size: int, flags: int) -> int:
        assert (pointer % PAGE, flags) == (0, 1)
        if not self.error:
            self.registered[pointer] = size
        return self.error

    def _unregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    yield Fakes(monkeypatch)
    gc.collect()  # pools unregister their memory with the runtime that is here now


def test_a_tensor_goes_and_comes_back(fakes: Fakes) -> None:
    """Two storages, so that one of them is fetched ahead."""
    device = CudaTransfers(HOST)
    x = torch.randn(300, requires_grad=True)
    with hs.offload_activations(1, keep_last_bytes=0, in_flight_bytes=1200, transfers=device) as moved:
        loss = x.exp().exp().sum()
    leaves = [
        ("record", "current"), ("wait", "outgoing", "current"), ("copy", "outgoing", True), ("record", "outgoing"),
    ]  # fmt: skip
    assert fakes.calls == [*leaves, ("query", "outgoing"), ("wait", "current", "outgoing"), *leaves]
    assert moved.peak_in_flight_bytes == 1200
    assert sorted(fakes.registered.values()) == [1200, 1200], "not a byte more"
    fakes.calls.clear()
    loss.backward()
    # What is on its way to the host is still there; the other one is fetched meanwhile
    fetched = [
        ("record", "current"), ("wait", "incoming", "current"), ("wait", "incoming", "outgoing"),
        ("copy", "incoming", True), ("record", "incoming"),
    ]  # fmt: skip
    first, second = [("query", "outgoing"), *fetched], [("wait", "current", "incoming"), ("keep", "current")]
    assert [c for c in fakes.calls if c != ("copy", "current", False)] == [
        *first, ("wait", "current", "outgoing"), *second
    ]  # fmt: skip
    assert x.grad is not None
    assert torch.equal(x.grad, x.exp().exp() * x.exp())
    assert device.buffers.used_bytes == 0


def test_a_model_keeps_its_gradients(fakes: Fakes) -> None:
    expected = gradients("dropout")
    limits = dict(keep_last_bytes=2000, prefetch_bytes=3000, in_flight_bytes=1500)
    context = hs.offload_activations(1, **limits, transfers=CudaTransfers(HOST))
    for _ in range(2):
        assert_same(gradients("dropout", lambda: context), expected)
    assert context.fetched_bytes > 0
    kinds = [call[0] for call in fakes.calls if call != ("copy", "current", False)]
    assert 2 * kinds.count("copy") == kinds.count("record") > 0, "two records to a copy"
    assert "synchronize" not in kinds, "the host waits for nothing"


def test_the_rest_of_the_interface(fakes: Fakes) -> None:
    device = CudaTransfers(HOST)
    assert device.outgoing is device.outgoing is not device.incoming
    event = device.record(device.current())
    device.synchronize(event)
    assert device.done(event) is False
    assert fakes.calls == [("record", "current"), ("synchronize", "current"), ("query", "current")]
    assert (device.empty(5).dtype, device.empty(5).shape) == (torch.uint8, (5,))


def test_without_locked_memory_it_goes_on_unpinned(fakes: Fakes) -> None:
    fakes.error = 2
    device = CudaTransfers(HOST)
    with pytest.warns(UserWarning, match=r"unpinned: the driver refused to pin 1,000 bytes \(CUDA error 2\).*ulimit"):
        first = device.buffers.take(1000, device.outgoing)
    fakes.error = 0
    second = device.buffers.take(1000, device.outgoing)  # no second warning, no second try
    assert first.memory.nbytes == second.memory.nbytes == 1000
    assert fakes.registered == {}


def test_the_refusals_error_is_taken_from_the_runtime(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would raise it at the next launch."""
    launches: list[Any] = []

    def raises(*args: Any, **options: Any) -> Tensor:
        launches.append(options["device"])
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", raises)
    fakes.error = 2
    device = CudaTransfers(HOST)
    with pytest.warns(UserWarning, match="stays unpinned"):
        device.buffers.take(PAGE, device.outgoing)
    assert launches == [HOST]


def test_memory_is_unregistered_with_its_pool(fakes: Fakes) -> None:
    device = CudaTransfers(HOST)
    taken = [device.buffers.take(n, device.outgoing) for n in (10, 5000)]
    assert sorted(fakes.registered.values()) == [10, 5000]
    for buffer in taken:
        device.buffers.give(buffer, None)
    assert device.buffers.free_bytes == 5010
    del device, taken, buffer
    gc.collect()
    assert fakes.registered == {}


def test_each_device_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[[torch.device], Any] = transfers.transfers_of
    monkeypatch.setattr(transfers, "_made", {})
    assert made(torch.device("cpu")) is None
    assert made(torch.device("meta")) is None
    first = made(torch.device("cuda", 0))
    assert isinstance(first, CudaTransfers)
    assert made(torch.device("cuda", 0)) is first is not made(torch.device("cuda", 1))
