"""offload_activations on a device: the same bits while its streams run freely, memory that is really free, no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import assert_same, gradients
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfstep as hs
from halfstep.transfers import transfers_of
from halfstep.transfers.host import HostTransfers

MIB = 2**20
LIMITS = [
    {},
    {"prefetch_bytes": 0, "in_flight_bytes": 0},
    {"keep_last_bytes": 700, "prefetch_bytes": 2000, "in_flight_bytes": 1500},
]


def offload(gpu: Any, **options: Any) -> Any:
    instead = None if gpu.device.type == "cuda" else HostTransfers()
    return hs.offload_activations(**{"min_bytes": 1, "keep_last_bytes": 0, **options}, transfers=instead)


def saving(gpu: Any, count: int, nbytes: int) -> Tensor:
    """A graph that saves so many results of so many bytes, the last of which it gives."""
    y = torch.ones(nbytes // 4, device=gpu.device, requires_grad=True)
    for _ in range(count):
        y = y.neg().exp()  # neg saves nothing
    return y


@pytest.mark.parametrize("limits", LIMITS, ids=["defaults", "none", "small"])
@pytest.mark.parametrize("name", ["dropout", "views"])
def test_gradients_have_the_same_bits(gpu: Any, name: str, limits: dict[str, Any]) -> None:
    """Also behind work that takes a while, where copies that wait for nothing would overtake it."""
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels' gradients may differ from run to run
        expected = gradients(name, device=gpu.device)
        context = offload(gpu, **limits)
        for _ in range(3):
            assert_same(gradients(name, lambda: context, gpu.device), expected)
        with gpu.side_stream():
            ours = gradients(name, lambda: context, gpu.device)
        assert_same(ours, expected)
    assert context.bytes > 0


@pytest.mark.real_gpu
def test_the_devices_memory_is_free_after_forward(gpu: Any) -> None:
    before = gpu.allocated()
    y = saving(gpu, count=8, nbytes=4 * MIB)
    held = gpu.allocated() - before
    del y
    context = offload(gpu)
    with context:
        y = saving(gpu, count=8, nbytes=4 * MIB)
    gpu.synchronize()
    assert context.in_flight_bytes == 0
    assert context.bytes == 8 * 4 * MIB
    assert gpu.allocated() - before == held - context.bytes + 4 * MIB, "all but y itself"
    y.sum().backward()
    del y
    assert gpu.allocated() == before


@pytest.mark.real_gpu
def test_host_memory_is_pinned_in_its_exact_size(gpu: Any) -> None:
    pool = transfers_of(gpu.device).buffers  # type: ignore[union-attr]
    stream = torch.cuda.current_stream(gpu.device)
    buffer = pool.take(3 * MIB + 4, stream)
    assert buffer.memory.nbytes == 3 * MIB + 4
    assert buffer.memory.is_pinned()
    pool.give(buffer, None)


@pytest.mark.real_gpu
def test_nothing_waits_for_the_device(gpu: Any) -> None:
    context = offload(gpu, in_flight_bytes=8 * MIB)

    def step() -> None:
        with context:
            y = saving(gpu, count=20, nbytes=MIB).sum()
        y.backward()

    step()  # pins memory
    with gpu.no_waits():
        step()


@pytest.mark.real_gpu
def test_what_is_captured_is_refused(gpu: Any) -> None:
    def work() -> None:
        with offload(gpu), pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            saving(gpu, count=1, nbytes=MIB)

    gpu.capture(work)
