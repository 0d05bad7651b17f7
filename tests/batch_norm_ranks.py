"""What each of two ranks runs for test_batch_norm_ranks.py (see ranks_job.py); the test is where it is compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import sync_batch_norm_on_cpu
import torch
from accumulation import assert_to_rounding, gradients
from torch import Tensor, nn
from torch import distributed as dist

import halfstep as hs

SAMPLES = {0: [[3, 6], [5]], 1: [[20], [4, 2]]}  # of each rank's micro-batches, by window
CHECKS: dict[str, Callable[[int], Any]] = {}


def check(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CHECKS[function.__name__] = function
    return function


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def samples(rank: int, window: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + window)
    return [torch.randn(n, 4, generator=generator) * (rank + 1) + 2 * rank for n in SAMPLES[rank][window]]


@check
def merged_batch_norm(rank: int) -> Any:
    net = normed()
    norms = hs.EffectiveBatchNorm(net, process_group=dist.group.WORLD)
    for window in range(2):
        for x in samples(rank, window):
            net(x)
        norms.update()
    return net.state_dict()


@check
def exact_batch_norm(rank: int) -> Any:
    net, outputs = normed(), []
    norms = hs.EffectiveBatchNorm(net, process_group=dist.group.WORLD)
    for window in range(2):
        with norms.exact(samples(rank, window), net):
            outputs.append(torch.cat([net(x).detach() for x in samples(rank, window)]))
    return net.state_dict(), outputs


@check
def sync_batch_norm(rank: int, device: str = "cpu") -> Any:
    """As many micro-batches on every rank, of very different sizes."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(normed()).to(device)
    accumulator = hs.Accumulator(hs.AdamW(net.parameters()), 1, process_group=dist.group.WORLD)
    found = []
    with sync_batch_norm_on_cpu.on_cpu() if device == "cpu" else nullcontext():
        for window in range(2):
            x = torch.cat(samples(rank, window)).to(device)
            accumulator.backward(net(x).square().mean(), tokens=len(x))
            accumulator.finish()
            results = {**net.state_dict(), **{f"grad {name}": grad for name, grad in gradients(net).items()}}
            found.append({name: value.cpu().clone() for name, value in results.items()})
            accumulator.reset()
    return found


def everything(window: int) -> Tensor:
    return torch.cat([x for rank in range(2) for x in samples(rank, window)])


def assert_sync_batch_norm_is_whole(ranks: list[dict[str, Any]]) -> None:
    """Gradients and running statistics of every rank, window by window."""
    net = normed()
    for window in range(2):
        net.zero_grad()
        net(everything(window)).square().mean().backward()
        grads = {f"grad {name}": grad for name, grad in gradients(net).items()}
        for rank in ranks:
            assert not isinstance(rank["sync_batch_norm"], str), rank["sync_batch_norm"]
            for name, value in (net.state_dict() | grads).items():
                if value.is_floating_point():
                    among = [*grads.values()] if name in grads else ()  # what is normalised has no mean: terms cancel
                    assert_to_rounding(rank["sync_batch_norm"][window][name], value, len(everything(window)), among)
