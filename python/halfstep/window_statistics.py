"""Mean and variance of a window of micro-batches, and normalising with them: the arithmetic below `batch_norm.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable


class Moments(NamedTuple):
    """Of one or several micro-batches, per channel, float64."""

    count: Tensor  # 0-d: elements of a channel
    mean: Tensor
    squares: Tensor  # sum of squared distances from the mean

    def variance(self, *, unbiased: bool) -> Tensor:
        return self.squares / (self.count - float(unbiased)).clamp(min=1)


class MicroBatch(NamedTuple):
    """What is kept of one micro-batch; nothing of it is read on the host."""

    count: int
    mean: Tensor
    variance: Tensor
    unbiased: bool


def measured(x: Tensor) -> MicroBatch:
    """In float32 at least."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, channel_dims(x), correction=0)
    return MicroBatch(x.numel() // x.shape[1], mean, variance, unbiased=False)


def channel_dims(x: Tensor) -> list[int]:
    """All but the channels', which come second."""
    return [dim for dim in range(x.ndim) if dim != 1]


def merged(parts: Sequence[MicroBatch], channels: int, device: torch.device) -> Moments:
    """The moments of all parts together: exact, whatever their sizes. Of no part: zeros.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    if not parts:
        zeros = torch.zeros(channels, dtype=torch.float64, device=device)
        return Moments(zeros.new_zeros(()), zeros, zeros.clone())
    total = sum(part.count for part in parts)
    means = torch.stack([part.mean for part in parts]).double()
    mean = sum((m * (part.count / total) for m, part in zip(means, parts, strict=True)), torch.zeros_like(means[0]))
    squares = torch.zeros_like(mean)
    for part, m in zip(parts, means, strict=True):
        squares += part.variance.double() * (part.count - part.unbiased) + (m - mean).square() * part.count
    return Moments(torch.full((), total, dtype=torch.float64, device=mean.device), mean, squares)


def over_ranks(moments: Sequence[Moments], group: dist.ProcessGroup) -> list[Moments]:
    """The moments of all ranks together, in two all-reduces for all norms: 8 bytes a channel each."""
    sizes = [m.mean.numel() for m in moments]
    sums = torch.cat([torch.stack([m.count for m in moments]), *(m.mean * m.count for m in moments)])
    dist.all_reduce(sums, group=group)
    counts, *rest = sums.split([len(sizes), *sizes])
    totals = counts.unbind()
    means = [part / count.clamp(min=1) for part, count in zip(rest, totals, strict=True)]
    own = [m.squares + (m.mean - mean).square() * m.count for m, mean in zip(moments, means, strict=True)]
    squares = torch.cat(own)
    dist.all_reduce(squares, group=group)
    return [Moments(*parts) for parts in zip(totals, means, squares.split(sizes), strict=True)]


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias with given statistics, in float32.

    Backward, the statistics count as those of this micro-batch: the two means that batch normalisation subtracts from
    the gradient are taken over the micro-batch, which estimates those over the window without bias from elsewhere.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, inverse)
        normal = (x - _view(mean, x)) * _view(inverse if weight is None else inverse * weight, x)
        return (normal if bias is None else normal + _view(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        dims, count = channel_dims(x), x.numel() // x.shape[1]
        wide = grad.to(mean.dtype)
        of_bias = wide.sum(dims)
        of_weight = (wide * (x - _view(mean, x))).sum(dims) * inverse
        own = (x - _view(x.to(mean.dtype).mean(dims), x)) * _view(inverse * of_weight / count, x)
        scale = inverse if weight is None else inverse * weight
        of_x = (wide - _view(of_bias / count, x) - own) * _view(scale, x)
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None, None, None,
        )  # fmt: skip


def _view(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))
