"""offload_activations: the same gradients, bit for bit, whenever the copies happen.

Guards: a view rebuilt with another offset, stride or dtype; a copy that nobody waits for; a buffer used again early.
"""

from __future__ import annotations

import pytest
import torch
from example_runs import Run, tiny
from offload_cases import CASES, assert_same, gradients, offloaded

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = [
    {},
    {"prefetch_bytes": 0, "in_flight_bytes": 0},
    {"keep_last_bytes": 700, "prefetch_bytes": 2000, "in_flight_bytes": 1500},
]


@pytest.mark.parametrize("name", CASES)
def test_gradients_keep_their_bits(name: str) -> None:
    expected = gradients(name)
    for seed in range(9):
        context, device = offloaded(seed, **LIMITS[seed % len(LIMITS)])
        with device.watch():
            ours = gradients(name, lambda context=context: context)
        assert_same(ours, expected)
        assert 0 < context.fetched_bytes <= context.bytes
        assert context.in_flight_bytes == 0
        assert device.buffers.used_bytes == 0


def test_the_example_keeps_its_gradients() -> None:
    torch.manual_seed(0)
    model = Run(tiny(layers=2)).model
    ids = torch.arange(40).view(2, 20) % 60
    expected = torch.autograd.grad(model(ids[:, :-1], ids[:, 1:]), list(model.parameters()))
    for seed in range(3):
        context, device = offloaded(seed, **LIMITS[seed])
        with device.watch():
            with context:
                loss = model(ids[:, :-1], ids[:, 1:])
            ours = torch.autograd.grad(loss, list(model.parameters()))
            assert all(map(torch.equal, ours, expected))
        assert context.stayed["parameters"] > 0
        assert context.bytes > 0


@pytest.mark.parametrize("name", CASES)
def test_on_a_machine_without_a_device_nothing_moves(name: str) -> None:
    context = hs.offload_activations(min_bytes=1)
    assert_same(gradients(name, lambda: context), gradients(name))
    assert context.bytes == context.tensors == 0
    assert context.stayed["on the host"] > 0
