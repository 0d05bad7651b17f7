"""hs.Accumulator and hs.EffectiveBatchNorm on a GPU.

Guards: a weight or a factor that makes the host wait or comes from the wrong device, sums whose bits differ from the
CPU's, a momentum of 1 that the GPU's batch normalisation takes otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accumulation import assert_to_rounding
from adversarial import ordinary
from bits import assert_same_bits
from optimizer_runs import copies, parameters
from torch import Tensor, nn
from torch.nn import Parameter
from twins import BFLOAT16, FLOAT32, moved

import halfstep as hs

SHAPES, TOKENS = [(5,), (300,)], [3, 40, 0]


def loss_of(params: list[Parameter], t: int) -> Tensor:
    """Its gradients are products alone, which every device rounds alike."""
    factors = [moved(ordinary(tuple(p.shape), FLOAT32, 7 * t + i), p.device) for i, p in enumerate(params)]
    return torch.stack([(p.float() * f).sum() for p, f in zip(params, factors, strict=True)]).sum()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_windows(gpu: Any, dtype: torch.dtype) -> None:
    """Sums, weights after the step and the scale, bit for bit; from the second window on nothing waits."""
    host = parameters(dtype, SHAPES)
    there = [Parameter(moved(p.detach(), gpu.device)) for p in copies(host)]
    loops = [
        hs.Accumulator(hs.AdamW(params, max_grad_norm=1.0), len(TOKENS), scaler=hs.LossScaler(init_scale=8.0))
        for params in (host, there)
    ]

    def window(params: list[Parameter], loop: hs.Accumulator, losses: list[Tensor]) -> None:
        for loss, tokens in zip(losses, TOKENS, strict=True):
            loop.backward(loss, tokens)
        loop.finish()

    for t in range(2):
        ours = [[loss_of(params, 10 * t + i) for i in range(len(TOKENS))] for params in (host, there)]
        window(host, loops[0], ours[0])
        with gpu.used():
            if t:
                with gpu.no_waits():
                    window(there, loops[1], ours[1])
            else:
                window(there, loops[1], ours[1])
            for p, twin in zip(there, host, strict=True):
                assert_same_bits(p.grad.cpu(), twin.grad, "gradient")
            loops[1].step()
        loops[0].step()
        for p, twin in zip(there, host, strict=True):
            assert_same_bits(p.detach().cpu(), twin.detach(), "weight")
        assert loops[1].tokens.item() == sum(TOKENS)
        assert loops[0].scaler.get_scale() == loops[1].scaler.get_scale()


@pytest.mark.real_gpu
def test_token_counts_stay_on_the_device(gpu: Any) -> None:
    """Here the host would wait to read them; a micro-batch of none is told there."""
    weight = Parameter(torch.ones(300, device=gpu.device, dtype=BFLOAT16))
    loop = hs.Accumulator(hs.AdamW([weight]), 3, scaler=hs.LossScaler())
    keeps = [torch.arange(300, device=gpu.device) < n for n in (0, 2, 100)]
    for t in range(2):
        with gpu.used(), gpu.no_waits() if t else gpu.used():
            for keep in keeps:
                loss = (weight.float() * keep).sum() / keep.sum()
                loop.backward(loss, keep.sum())
            loop.finish()
            expected = (keeps[1].float() + keeps[2].float()) / 102
        torch.testing.assert_close(weight.grad / loop.scaler.get_scale(), expected, rtol=2**-8, atol=0)
        with gpu.used():
            loop.step()


@pytest.mark.real_gpu
def test_a_model_over_two_devices(gpu: Any) -> None:
    if not gpu.others:
        pytest.skip("there is one GPU")
    weights = [Parameter(torch.ones(300, device=device, dtype=BFLOAT16)) for device in (gpu.device, gpu.others[0])]
    loop = hs.Accumulator(hs.AdamW(weights), 2)
    for tokens, factor in ((1, 4.0), (3, 8.0)):
        with gpu.used():
            losses = [weight.float().mean().to(gpu.device) for weight in weights]
            loop.backward((losses[0] + losses[1]) * factor, tokens)
    with gpu.used():
        loop.finish()
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight.grad, 7 / 300), rtol=2**-7, atol=0)
        assert not loop.step()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_batch_norm_of_a_window(gpu: Any, kind: type[nn.BatchNorm2d], exact: bool) -> None:
    norm, whole = kind(6).to(gpu.device), kind(6).to(gpu.device)
    size = (6, 5, 5) if kind is nn.BatchNorm2d else (6,)
    parts = [moved(ordinary((n, *size), FLOAT32, n) + n, gpu.device) for n in (2, 20, 7)]
    expected = whole(torch.cat(parts))
    norms = hs.EffectiveBatchNorm(norm)
    if exact:
        with norms.exact(parts, norm):
            got = torch.cat([norm(x) for x in parts])
        assert_to_rounding(got, expected, 29 * 25)
    else:
        for x in parts:
            norm(x)
        norms.update()
    for name in ("running_mean", "running_var"):
        assert_to_rounding(getattr(norm, name), getattr(whole, name), 29 * 25)  # samples, positions
    assert norm.num_batches_tracked.item() == 1


@pytest.mark.real_gpu
def test_sync_batch_norm_gives_the_whole_batchs_gradient(gpu: Any, tmp_path: Path) -> None:
    """Two processes on one GPU, their collectives through the host (gloo); torch's own kernels."""
    import ranks_job
    from batch_norm_ranks import assert_sync_batch_norm_is_whole

    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch is built without gloo")
    assert_sync_batch_norm_is_whole(ranks_job.started(tmp_path, f"cuda:{gpu.device.index}"))
