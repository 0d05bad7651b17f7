"""torch's SyncBatchNorm on CPUs, for tests: it runs on GPUs alone, since five operators have no kernel elsewhere.

This is what those operators compute, in plain PyTorch; the layer, its autograd function and collectives are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _view(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = counts[:, None] / counts.sum()
    mean = (means * weights).sum(0)
    variance = ((inverses**-2 - eps + (means - mean).square()) * weights).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (variance + eps).rsqrt()


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    normal = (x - _view(mean, x)) * _view(inverse, x)
    return normal if weight is None or bias is None else normal * _view(weight, x) + _view(bias, x)


def backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, of_x: bool, of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sums = grad.sum(_dims(x))
    products = (grad * (x - _view(mean, x))).sum(_dims(x))
    return sums, products, products * inverse, sums.clone()


def backward_elemt(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, sums: Tensor, products: Tensor,
    counts: Tensor,
) -> Tensor:  # fmt: skip
    n = counts.sum()
    own = (x - _view(mean, x)) * _view(inverse.square() * products / n, x)
    scale = inverse if weight is None else inverse * weight
    return (grad - _view(sums / n, x) - own) * _view(scale, x)


KERNELS = {
    "batch_norm_stats": stats, "batch_norm_gather_stats_with_counts": gather_stats_with_counts,
    "batch_norm_elemt": elemt, "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}  # fmt: skip


@contextmanager
def on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    name_of = torch._C._get_privateuse1_backend_name
    torch._C._get_privateuse1_backend_name = lambda: "cpu"  # type: ignore[assignment]  # what the layer compares with
    try:
        yield
    finally:
        torch._C._get_privateuse1_backend_name = name_of
        library._destroy()
