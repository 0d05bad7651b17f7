"""How the gradient sums of several ranks become one: not at all, by one all-reduce, or by FSDP2's reduce-scatter.

The one place of the accumulator that knows process groups, DistributedDataParallel and FSDP2's modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .fsdp2_state import check_settings, drop_unreduced, is_fsdp2
from .ops.layout import NARROW
from .shards import is_sharded

_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's own size of a bucket


class OneRank:
    """This rank's micro-batches are the whole batch."""

    size = 1  # how many ranks share the batch
    divided_by = 1  # what every micro-batch's gradient was divided by already

    def check(self, params: Sequence[Tensor]) -> None:
        """ValueError if a parameter's gradient would be summed over the wrong ranks."""
        for p in params:
            if is_sharded(p):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is a DTensor; pass the model that fully_shard() was "
                    "called on as model=, so that its gradients are summed over the right ranks"
                )

    def before_backward(self, *, last: bool) -> None:
        """Tells the model whether this is the window's last micro-batch."""

    def largest(self, count: Tensor) -> Tensor:
        """The largest of the ranks' counts."""
        return count

    def sum_totals(self, totals: Tensor) -> None:
        """In place, over the ranks."""

    def check_summed(self) -> None:
        """RuntimeError if gradients of the window are still on their way."""

    def sum_gradients(self, params: Sequence[Tensor], sums: dict[Tensor, Tensor]) -> None:
        """In place, over the ranks; ranks that have no sum of a parameter get one if another rank has."""

    def after_window(self) -> None: ...

    def release(self) -> None:
        """The model as it was found."""


class Replicated(OneRank):
    """Every rank has all parameters and sums of its own, which are added up once, when the window ends."""

    def __init__(self, models: Sequence[DistributedDataParallel], group: dist.ProcessGroup) -> None:
        self._models = models
        self._group = group
        self.size = group.size()
        for model in models:
            if model.static_graph:
                raise ValueError(
                    "DistributedDataParallel(static_graph=True) cannot leave out its own synchronisation (torch stops "
                    "in an internal assertion); build it without static_graph"
                )
        for model in models:
            model.require_backward_grad_sync = False

    def largest(self, count: Tensor) -> Tensor:
        common = count.clone()
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self._group)
        return common

    def sum_totals(self, totals: Tensor) -> None:
        dist.all_reduce(totals, group=self._group)

    def sum_gradients(self, params: Sequence[Tensor], sums: dict[Tensor, Tensor]) -> None:
        missing = [i for i, p in enumerate(params) if p not in sums]
        has = torch.ones(len(params), dtype=torch.int32, device=params[0].device)
        for i in missing:
            has[i].zero_()
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        for i in missing:
            sums[params[i]] = torch.zeros_like(params[i], dtype=_sum_dtype(params[i]))
        _all_reduce([sums[p] for p in params], self._group)
        if missing:  # the one wait, on ranks whose micro-batches have left something out
            elsewhere = has.tolist()
            for i in missing:
                if not elsewhere[i]:
                    del sums[params[i]]

    def after_window(self) -> None:
        for model in self._models:
            model.require_forward_param_sync = True  # buffers are broadcast by the next forward, as after a sync

    def release(self) -> None:
        for model in self._models:
            model.require_backward_grad_sync = True


def _sum_dtype(param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype in NARROW else param.dtype


def _all_reduce(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums over the ranks, in place: large tensors where they lie, small ones together in buffers."""
    waiting: list[Any] = []
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for kind in kinds.values():
        bucket: list[Tensor] = []
        for tensor in kind:
            if tensor.nbytes >= _BUCKET_BYTES and tensor.is_contiguous():
                waiting.append(dist.all_reduce(tensor, group=group, async_op=True))
                continue
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET_BYTES:
                _all_reduce_bucket(bucket, group)
                bucket = []
            bucket.append(tensor)
        _all_reduce_bucket(bucket, group)
    for work in waiting:
        work.wait()


def _all_reduce_bucket(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if not bucket:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class Sharded(OneRank):
    """FSDP2: gradients are reduce-scattered, and divided by the number of ranks, by the model itself.

    Args:
        model: what holds the modules that fully_shard() was called on.
        params: the optimizer's.
        at_the_end: reduce once a window; FSDP2 keeps the sums of whole gradients until then.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor], *, at_the_end: bool) -> None:
        self._parts: list[Any] = [module for module in model.modules() if is_fsdp2(module)]
        self._at_the_end = at_the_end
        self._synced = True
        self.check(params)
        mesh = next(p.device_mesh for p in params if is_sharded(p))  # type: ignore[attr-defined]
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.size = self.divided_by = mesh.size()
        for part in self._parts:
            check_settings(part, params, at_the_end)
        self._sync(not at_the_end)

    def check(self, params: Sequence[Tensor]) -> None:
        meshes = [p.device_mesh for p in params if is_sharded(p)]  # type: ignore[attr-defined]
        for p in params:
            if not is_sharded(p):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is no DTensor though the model has FSDP2 modules, so its "
                    "gradient is not summed over the ranks. Build the optimizer after fully_shard(), of parameters "
                    "that it has sharded"
                )
            kinds = [type(placement).__name__ for placement in p.placements]  # type: ignore[attr-defined]
            if kinds not in (["Shard"], ["Replicate", "Shard"]) or p.device_mesh != meshes[0]:  # type: ignore[attr-defined]
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} lies on {p.device_mesh} as {p.placements}; "  # type: ignore[attr-defined]
                    "this version sums gradients over one mesh of data-parallel ranks, sharded, or replicated and "
                    "sharded. Tensor-parallel and expert-parallel parameters are not among them"
                )

    def before_backward(self, *, last: bool) -> None:
        self._synced = last or not self._at_the_end
        self._sync(self._synced)

    def largest(self, count: Tensor) -> Tensor:
        common = count.clone()
        for group in self._groups:
            dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
        return common

    def sum_totals(self, totals: Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(totals, group=group)

    def check_summed(self) -> None:
        if not self._synced:
            raise RuntimeError(
                'with sync="last" the window\'s gradients are still unreduced inside the FSDP2 modules: the last '
                "micro-batch of a shorter window needs backward(loss, tokens, last=True). Call reset() to drop the "
                'window, or use sync="every", which needs no announcement'
            )

    def after_window(self) -> None:
        if not self._synced:
            for part in self._parts:
                drop_unreduced(part)
        self._synced = True

    def release(self) -> None:
        self._sync(True)

    def _sync(self, on: bool) -> None:
        for part in self._parts:
            part.set_requires_gradient_sync(on, recurse=False)


def ranks_of(
    model: nn.Module | None, process_group: dist.ProcessGroup | None, params: Sequence[Tensor], sync: str
) -> OneRank:
    """How this model's gradients come together, checked."""
    modules = [] if model is None else list(model.modules())
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                "model has a FullyShardedDataParallel module (FSDP1), whose flat parameters this cannot sum up; use "
                "fully_shard() (FSDP2)"
            )
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    sharded = any(is_fsdp2(module) for module in modules)
    if replicas and sharded:
        raise TypeError("model has DistributedDataParallel and FSDP2 modules; use one of them")
    if sharded and model is not None:
        return Sharded(model, params, at_the_end=sync == "last")
    groups = {id(replica.process_group): replica.process_group for replica in replicas}
    if process_group is not None:
        groups[id(process_group)] = process_group
    if len(groups) > 1:
        raise ValueError(
            "gradients would be summed over two process groups: that of the DistributedDataParallel module and "
            "another; give one group"
        )
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if model is None and not groups and not alone:
        raise ValueError(
            f"torch.distributed runs {dist.get_world_size()} ranks, and the accumulator cannot see which of them "
            "share the batch. Pass model= (the DistributedDataParallel or FSDP2 model, or a plain one that only this "
            "rank trains), or process_group= to sum over its ranks"
        )
    if not alone and _averaged_outside(replicas, params):
        gc.collect()  # it may be one that was wrapped before and dropped
        if _averaged_outside(replicas, params):
            raise ValueError(
                "a DistributedDataParallel module that is not in model= averages gradients of this optimizer's "
                "parameters in every backward pass, so they would be weighted wrongly and differ between ranks. Pass "
                "that module itself as model=, or what contains it; not the module inside"
            )
    (group,) = groups.values() or (None,)
    ranks = OneRank() if group is None else Replicated(replicas, group)
    ranks.check(params)
    return ranks


def _averaged_outside(replicas: Sequence[DistributedDataParallel], params: Sequence[Tensor]) -> bool:
    """Whether a DistributedDataParallel that is none of these has one of the parameters. It leaves no mark on them, so
    that all objects are looked through: some 50 ms, once."""
    known, wanted = {id(replica) for replica in replicas}, {id(p) for p in params}
    others = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel) and id(o) not in known]
    return any(id(p) in wanted for other in others if "_modules" in vars(other) for p in other.parameters())
