"""`hs.checkpoint` on a device: the same bits and random numbers, and the memory that is free after the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpointed import POLICIES, assert_same_run, inputs, run, stack
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfstep as hs


@pytest.mark.parametrize("policy", POLICIES)
def test_every_bit_is_as_without(gpu: Any, policy: str) -> None:
    model, x = stack().to(gpu.device), inputs().detach().to(gpu.device).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels' gradients may differ from run to run
        plain = run(model, x)
        hs.checkpoint(model, POLICIES[policy]())
        assert_same_run(run(model, x), plain)
        with gpu.side_stream():
            ours = run(model, x)
        gpu.synchronize()
        assert_same_run(ours, plain)


class Drawn(nn.Module):
    """Fused attention draws its dropout inside of the kernel; another dropout follows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return F.dropout(heads, 0.3) * self.scale


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_random_numbers_behind_an_attention_that_is_kept(gpu: Any, policy: str) -> None:
    model = nn.ModuleList([Drawn()]).to(gpu.device)
    x = torch.randn(2, 4, 32, 64, device=gpu.device, generator=torch.Generator(gpu.device).manual_seed(0))

    def gradient() -> Tensor:
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(model[0](x.half() if gpu.device.type == "cuda" else x).sum(), [model[0].scale])
        return grad

    plain = gradient()
    hs.checkpoint(model, policy)
    assert torch.equal(gradient(), plain)


@pytest.mark.real_gpu
@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_the_devices_memory_is_free_after_forward(gpu: Any, policy: str) -> None:
    """What measure_activations says is what the allocator has, whose blocks are multiples of 512 bytes."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)]
    model = nn.Sequential(*blocks).to(gpu.device)
    x = torch.randn(4096, 256, device=gpu.device)
    hs.checkpoint(model, policy)
    model(x).sum().backward()
    before = gpu.allocated()
    with hs.measure_activations() as measured:
        loss = model(x).square().sum()
    assert 0 <= gpu.allocated() - before - measured.bytes <= 512 * 16
    loss.backward()
    del loss
    assert gpu.allocated() == before
