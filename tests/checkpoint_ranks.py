"""What each of two ranks runs for test_checkpoint_ranks.py (see ranks_job.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checkpointed import Block, inputs, stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

Wrap = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module, inner: bool = False, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for part in [*(b.attention for b in blocks if inner), *blocks, model]:
        fully_shard(part, mesh=mesh, **options)
    return model


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WRAPS: dict[str, Wrap] = {
    "ddp": DistributedDataParallel,
    "ddp static": partial(DistributedDataParallel, static_graph=True),
    "fsdp": sharded,
    "fsdp unsharded between": partial(sharded, reshard_after_forward=False),
    "fsdp bfloat16": partial(sharded, mp_policy=BFLOAT16),
    "fsdp inside of blocks": partial(sharded, inner=True),
    "fsdp inside of blocks, unsharded between": partial(sharded, inner=True, reshard_after_forward=False),
}


def gradients(wrap: Wrap, policy: str | None, before: bool, rank: int) -> list[torch.Tensor]:
    model = stack()
    if before:
        hs.checkpoint(model, policy)
    wrapped = wrap(model)
    if not before:
        hs.checkpoint(wrapped, policy)
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        wrapped.zero_grad()
        loss = wrapped(inputs(seed=rank)).square().sum()
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in grads)]  # type: ignore[union-attr]


def equal_to_plain(wrap: Wrap, rank: int) -> dict[str, bool]:
    """Policy and order -> whether the loss and this rank's gradients have the bits of the wrapped model without it."""
    plain = gradients(wrap, None, True, rank)
    found = {}
    for policy in ("layer", "selective"):
        for before in (True, False):
            got = gradients(wrap, policy, before, rank)
            found[f"{policy} {'before' if before else 'after'}"] = all(map(torch.equal, got, plain))
    return found


CHECKS: dict[str, Callable[[int], Any]] = {
    f"checkpoint {name}": partial(equal_to_plain, w) for name, w in WRAPS.items()
}
