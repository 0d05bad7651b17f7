"""ByteBudget on a device: the same bits, nothing waits, and memory that is really free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


class Block(nn.Module):
    """All that it makes is a multiple of 512 bytes, in which torch's allocator counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).square())


def model_on(gpu: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(gpu.device)
    return model, torch.linspace(-1, 1, 32 * 64).view(32, 64).to(gpu.device).requires_grad_()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def budgets(gpu: Any) -> list[int]:
    model, x = model_on(gpu)
    handle = hs.checkpoint(model, hs.ByteBudget("1GB"))
    gradients(model, x)
    return [handle.plan.least + (handle.plan.most - handle.plan.least) * i // 3 for i in range(4)]


def test_gradients_have_the_same_bits(gpu: Any) -> None:
    model, x = model_on(gpu)
    expected = gradients(model, x)
    for n in budgets(gpu):
        handle = hs.checkpoint(model, hs.ByteBudget(n))
        for _ in range(3):
            assert all(map(torch.equal, gradients(model, x), expected))
        assert handle.plan.bytes <= n


@pytest.mark.real_gpu
def test_the_devices_memory_is_what_the_plan_says(gpu: Any) -> None:
    model, x = model_on(gpu)
    gradients(model, x)  # workspaces of products
    held = []
    for n in budgets(gpu):
        handle = hs.checkpoint(model, hs.ByteBudget(n))
        gradients(model, x)
        before = gpu.allocated()
        y = model(x)
        held.append(gpu.allocated() - before - handle.plan.bytes)
        del y
    assert set(held) == {32 * 64 * 4}, "the result"


@pytest.mark.real_gpu
def test_nothing_waits_for_the_device(gpu: Any) -> None:
    n = budgets(gpu)[1]
    model, x = model_on(gpu)
    gradients(model, x)
    hs.checkpoint(model, hs.ByteBudget(n))
    with gpu.no_waits():
        gradients(model, x)
        gradients(model, x)
