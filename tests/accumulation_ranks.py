"""What each of two ranks runs for test_accumulator_ranks.py (see ranks_job.py); the test is where it is compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from accumulation import batches, gradients, model, run, token_loss, valid
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep import gradient_sync

# Micro-batches of each rank: different counts, one without a valid token, and a second, shorter window.
WINDOWS = {0: [[3, 40, 0], [5]], 1: [[17, 1, 30], [2]]}
UNEVEN = {0: [[3, 40, 7], [5]], 1: [[17], []]}  # a rank has fewer micro-batches, or none
CHECKS: dict[str, Callable[[int], Any]] = {}


def check(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CHECKS[function.__name__] = function
    return function


def parts(rank: int, window: int, windows: dict[int, list[list[int]]] = WINDOWS) -> list[Any]:
    return batches(windows[rank][window], seed=10 * rank + window)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()  # type: ignore[operator]


def windows_of(
    net: nn.Module, wrapped: nn.Module, accumulator: hs.Accumulator, rank: int, windows: Any = WINDOWS, **options: Any
) -> list[dict[str, Any]]:
    found = []
    for i in range(2):
        for k, batch in enumerate(mine := parts(rank, i, windows)):
            last = {"last": k + 1 == len(mine)} if options.get("announced") else {}
            accumulator.backward(token_loss(wrapped, batch), tokens=valid(batch[1]), **last)
        accumulator.finish()
        found.append(
            {
                "gradients": {name: whole(grad) for name, grad in gradients(net).items()},
                "dtypes": {name: grad.dtype for name, grad in gradients(net).items()},
                "loss": accumulator.loss.clone(),
                "tokens": accumulator.tokens.item(),
                "weights": {name: whole(p) for name, p in net.named_parameters()},
            }
        )
        accumulator.step()
    found.append({"weights": {name: whole(p) for name, p in net.named_parameters()}})
    return found


def replicated(rank: int, dtype: torch.dtype, *, ddp: bool, windows: Any = WINDOWS, **options: Any) -> Any:
    net = model(dtype)
    wrapped = DistributedDataParallel(net, **options) if ddp else net
    group = {"model": wrapped} if ddp else {"process_group": dist.group.WORLD}
    optimizer = hs.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.5)
    accumulator = hs.Accumulator(optimizer, 3, scaler=hs.LossScaler(init_scale=8.0), **group)
    return windows_of(net, wrapped, accumulator, rank, windows)


@check
def ddp_float32(rank: int) -> Any:
    return replicated(rank, torch.float32, ddp=True)


@check
def ddp_bfloat16(rank: int) -> Any:
    return replicated(rank, torch.bfloat16, ddp=True, gradient_as_bucket_view=True)


@check
def ddp_static(rank: int) -> Any:
    return replicated(rank, torch.float32, ddp=True, static_graph=True)


@check
def ddp_unused(rank: int) -> Any:
    return replicated(rank, torch.float32, ddp=True, find_unused_parameters=True)


@check
def ddp_uneven(rank: int) -> Any:
    return replicated(rank, torch.bfloat16, ddp=True, windows=UNEVEN)


@check
def group_float32(rank: int) -> Any:
    return replicated(rank, torch.float32, ddp=False)


@check
def a_parameter_that_one_rank_uses(rank: int) -> Any:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    accumulator = hs.Accumulator(torch.optim.SGD([first, second]), 1, process_group=dist.group.WORLD)
    accumulator.backward((first if rank else first * second).mean(), tokens=1 + 2 * rank)
    accumulator.finish()
    return first.grad, second.grad


@check
def sums_in_buckets(rank: int) -> Any:
    """Of tensors smaller and larger than a bucket, one of them not contiguous."""
    before, gradient_sync._BUCKET_BYTES = gradient_sync._BUCKET_BYTES, 64
    tensors = [torch.full((n,), float(n + rank)) for n in (1, 7, 16, 40, 3, 12)]
    tensors += [(torch.arange(40.0).view(5, 8) + rank).t(), torch.full((9,), 1.0 + rank, dtype=torch.float64)]
    gradient_sync._all_reduce(tensors, dist.group.WORLD)
    gradient_sync._BUCKET_BYTES = before
    return tensors


@check
def fsdp_syncs_again(rank: int) -> Any:
    net = fully_shard(nn.Linear(4, 2))
    accumulator = hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net, sync="last")
    del accumulator
    net(torch.ones(1, 4)).sum().backward()
    return net.weight.grad is not None


@check
def an_overflow_on_one_rank(rank: int) -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)
    accumulator = hs.Accumulator(hs.AdamW(net.parameters()), 1, scaler=hs.LossScaler(init_scale=8.0), model=wrapped)
    (batch,) = batches([4])
    batch[0].mul_(torch.inf if rank else 1.0)
    before = whole(net.inner.weight)
    run(accumulator, wrapped, [batch])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a skip is told
        skipped = bool(accumulator.step())
    return skipped, torch.equal(before, net.inner.weight), accumulator.scaler.get_scale()


@check
def buffers_of_ddp(rank: int) -> Any:
    """DistributedDataParallel hands rank 0's buffers out in the first forward of every window."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = DistributedDataParallel(net)
    accumulator = hs.Accumulator(hs.AdamW(net.parameters()), 2, model=wrapped)
    seen = []
    net[0].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.clone()))
    for k in range(4):
        accumulator.backward(wrapped(torch.full((3, 4), float(rank + k))).mean(), tokens=3)
        if accumulator.ready:
            accumulator.step()
    del accumulator
    return seen, wrapped.require_backward_grad_sync


def sharded(rank: int, sync: str, dtype: torch.dtype = torch.float32, policy: Any = None, **options: Any) -> Any:
    net = model(dtype)
    del net.unused  # FSDP2 gives all parameters of a group a gradient or none
    mesh = init_device_mesh("cpu", (2,))
    policy = {"mp_policy": policy} if policy else {}
    fully_shard(net.inner, mesh=mesh, **policy)
    fully_shard(net, mesh=mesh, **policy)
    optimizer = hs.AdamW(net.parameters(), lr=1e-2, skip_nonfinite=False)
    accumulator = hs.Accumulator(optimizer, 3, model=net, sync=sync)
    return windows_of(net, net, accumulator, rank, announced=sync == "last", **options)


@check
def fsdp_every(rank: int) -> Any:
    return sharded(rank, "every")


@check
def fsdp_last(rank: int) -> Any:
    return sharded(rank, "last")


@check
def fsdp_bfloat16(rank: int) -> Any:
    return sharded(rank, "every", torch.bfloat16, MixedPrecisionPolicy(reduce_dtype=torch.float32))


@check
def fsdp_last_mixed(rank: int) -> Any:
    """The model of float32 parameters runs in bfloat16, its gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(rank, "last", policy=policy)


@check
def fsdp_last_in_16_bits(rank: int) -> Any:
    return sharded(rank, "last", policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@check
def fsdp_last_of_bfloat16(rank: int) -> Any:
    return sharded(rank, "last", torch.bfloat16)


def dropped(policy: MixedPrecisionPolicy) -> Any:
    net = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    accumulator = hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net, sync="last")
    accumulator.backward(net(torch.ones(2, 4)).float().mean(), tokens=2)
    assert not accumulator._sums.sums, "the gradients stay inside FSDP2 until the last micro-batch"
    try:
        accumulator.step()
    except RuntimeError as error:
        said = str(error)
    accumulator.reset()
    for x, tokens in ((torch.ones(2, 4), 2), (torch.zeros(2, 4), 6)):
        accumulator.backward(net(x).float().mean(), tokens)
    accumulator.finish()
    return said, whole(net.weight.grad)


@check
def fsdp_last_not_announced(rank: int) -> Any:
    """FSDP2 keeps sums in the parameter's gradient, or beside it where they have another dtype."""
    policies = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [dropped(policy) for policy in policies]


@check
def fsdp_divided(rank: int) -> Any:
    net = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
    net.set_gradient_divide_factor(1.0)
    hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net)


@check
def fsdp_after_the_optimizer(rank: int) -> Any:
    net = nn.Linear(4, 2)
    optimizer = hs.AdamW(net.parameters())
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    hs.Accumulator(optimizer, 2, model=net)


@check
def fsdp_without_a_model(rank: int) -> Any:
    net = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
    hs.Accumulator(hs.AdamW(net.parameters()), 2, process_group=dist.group.WORLD)


@check
def two_wrappers(rank: int) -> Any:
    net = nn.ModuleList([fully_shard(nn.Linear(4, 2)), DistributedDataParallel(nn.Linear(4, 2))])
    hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net)


@check
def two_groups(rank: int) -> Any:
    net = DistributedDataParallel(nn.Linear(4, 2))
    hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net, process_group=dist.new_group([0, 1]))


@check
def inside_ddp(rank: int) -> Any:
    net = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(net)
    hs.Accumulator(hs.AdamW(wrapped.parameters()), 2, model=net)


@check
def one_of_two_ddp(rank: int) -> Any:
    nets = [DistributedDataParallel(nn.Linear(4, 2)) for _ in range(2)]
    hs.Accumulator(hs.AdamW([p for net in nets for p in net.parameters()]), 2, model=nets[0])


@check
def wrapped_again(rank: int) -> Any:
    """The first wrapper is dropped, in a cycle, and has no say."""
    net = nn.Linear(4, 2)
    first = DistributedDataParallel(net)
    first.itself = [first]
    del first
    hs.Accumulator(hs.AdamW(net.parameters()), 2, model=DistributedDataParallel(net))
    return True


@check
def no_group(rank: int) -> Any:
    hs.Accumulator(hs.AdamW([nn.Parameter(torch.ones(2))]), 2)


@check
def nothing_on_any_rank(rank: int) -> Any:
    hs.Accumulator(hs.AdamW([nn.Parameter(torch.ones(2))]), 2, process_group=dist.group.WORLD).step()
