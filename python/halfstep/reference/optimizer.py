"""The optimizer phase in plain PyTorch: gradient statistics, unscaling, clipping and the Adam update.

This is the definition of every result bit; the native and Triton kernels are compared with it. Hence: float32
throughout, one torch operation per rounding, in the order written here. Three things torch offers are avoided:
addcmul, addcdiv and lerp may contract two operations into one rounding; float32 torch.sqrt on the CPU is not correctly
rounded; division by a Python number multiplies by its reciprocal on CUDA, as number / tensor does everywhere.

Tensors are taken in logical row-major order whatever their strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .philox import philox_words
from .rounding import join_master, round_stochastic, round_to, split_master
from .sum_squares import sum_squares

STREAM_WEIGHT, STREAM_EXP_AVG, STREAM_EXP_AVG_SQ, STREAM_MAX_EXP_AVG_SQ = range(4)
Words = Callable[[int], Tensor]  # stream -> random words of a tensor's elements


class AdamGroup(NamedTuple):
    """Hyper-parameters of a parameter group, as the user gave them (float64)."""

    lr: float | Tensor  # a tensor is 0-d, float32 or float64, on the rows' device; kernels there read it themselves
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW: decay the weight; else Adam: add to the gradient
    maximize: bool


class AdamScalars(NamedTuple):
    """What one update multiplies with: computed in float64, then each rounded once to float32."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    weight_decay: float
    decay: float
    step_size: float
    sqrt_bias_correction2: float


def power(b: float, t: int) -> float:
    """b**t for t >= 0 by binary exponentiation: a fixed sequence of float64 products, where libm's pow may differ."""
    result = 1.0
    while t:
        if t & 1:
            result *= b
        b *= b
        t >>= 1
    return result


def adam_scalars(group: AdamGroup, t: int) -> AdamScalars:
    """The scalars of step t >= 1 (the number of this update, counted per parameter)."""
    lr, beta1, beta2, eps, weight_decay = map(float, group[:5])
    step_size = lr / (1.0 - power(beta1, t))
    sqrt_bias_correction2 = math.sqrt(1.0 - power(beta2, t))
    betas = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    exact = (*betas, eps, weight_decay, 1.0 - lr * weight_decay, step_size, sqrt_bias_correction2)
    return AdamScalars(*torch.tensor(exact, dtype=torch.float64, device="cpu").float().tolist())


@torch.no_grad()
def grad_stats(grads: Sequence[Tensor], inv_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm of the unscaled gradients, and the first tensor that is not finite.

    The unscaled gradient is u = f32(g) * inv_scale. Squares add up in the order of sum_squares.py, then the tensors in
    order in float64. Finite gradients never overflow or vanish, whatever their size.

    Args:
        grads: float32, bfloat16 or float16, any shapes and strides, on one device.
        inv_scale: a float32 value or 0-d tensor, 1 / loss scale; 1.0 leaves the gradients as they are.

    Returns: (sum of squares, 0-d float64; index in `grads` of the first tensor with a non-finite u, or -1, 0-d int64).
    """
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    bad = []
    for grad in grads:
        u = grad.float() * inv_scale
        total = total + sum_squares(u)
        bad.append(~u.isfinite().all())
    return total, _first(bad, device)


def clip_coefficient(norm: Tensor | float, max_norm: Tensor | float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)) as a 0-d float64 tensor, as torch.nn.utils.clip_grad_norm_; NaN stays NaN."""
    norm = norm.double() if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64, device="cpu")
    limit = max_norm.to(norm) if isinstance(max_norm, Tensor) else torch.full_like(norm, max_norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: float | Tensor) -> Tensor:
    """Multiply every gradient by inv_scale in float32 and round it to its own dtype (nearest even), in place.

    Args:
        grads: float32, bfloat16 or float16, any strides, on one device.
        inv_scale: a float32 value or 0-d tensor.

    Returns: 0-d int64, the index of the first tensor that now holds a non-finite value (so overflow in the product and
        in the rounding count), or -1.
    """
    bad = []
    for grad in grads:
        grad.copy_(round_to(grad.float() * inv_scale, grad.dtype))
        bad.append(~grad.isfinite().all())
    return _first(bad, grads[0].device if grads else torch.device("cpu"))


@torch.no_grad()
def update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    master: Tensor | None,
    *,
    group: AdamGroup,
    t: int,
    grad_factor: float | None,
    seed: int = 0,
    param_id: int = 0,
    first_index: int = 0,
    stochastic: bool = False,
    heal: bool = True,
) -> Tensor:
    """One Adam or AdamW step of one tensor, in place (Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi et al. 2018).

    All tensors have the parameter's shape and device; strides are free.

    Args:
        param: float32, bfloat16 or float16.
        grad: float32, bfloat16 or float16; read only.
        exp_avg, exp_avg_sq, max_exp_avg_sq: float32, or a 16-bit dtype, which is always rounded stochastically (nearest
            would freeze the slow decay of v). max_exp_avg_sq is given for AMSGrad. The update itself uses the float32
            moments, before they are rounded for storage.
        master: float32, the wide copy of a 16-bit param; int16, the remainder of a split bfloat16 param (see
            `split_master`); or None.
        group: hyper-parameters.
        t: number of this update, >= 1.
        grad_factor: a float32 value the gradient is multiplied with first (clip coefficient / loss scale), or None.
        seed, param_id, first_index: of the random words; first_index is the index of the first element in the whole,
            unsharded parameter.
        stochastic: round a 16-bit param without master stochastically instead of to nearest even.
        heal: where a float32 master does not round to the weight, somebody wrote the weight: go on from the weight.
            False: always go on from the master.

    Returns: 0-d int64, the number of elements healed.
    """
    scalars = adam_scalars(group, t)

    def words(stream: int) -> Tensor:
        return philox_words(seed, t, param_id, stream, first_index, param.numel(), param.device)

    p, healed = _load_weight(param, master, heal)
    g = grad.reshape(-1).float()
    if grad_factor is not None:
        g = g * grad_factor
    if group.maximize:
        g = -g
    if scalars.weight_decay != 0.0:
        if group.decoupled:
            p = p * scalars.decay
        else:
            g = g + scalars.weight_decay * p

    m = _lerp(exp_avg.reshape(-1).float(), g, scalars)
    v = scalars.beta2 * exp_avg_sq.reshape(-1).float() + (scalars.one_minus_beta2 * g) * g
    _store_rounded(exp_avg, m, words, STREAM_EXP_AVG)
    _store_rounded(exp_avg_sq, v, words, STREAM_EXP_AVG_SQ)
    if max_exp_avg_sq is not None:
        v = _maximum(max_exp_avg_sq.reshape(-1).float(), v)
        _store_rounded(max_exp_avg_sq, v, words, STREAM_MAX_EXP_AVG_SQ)

    d = _sqrt(v) / torch.full_like(v, scalars.sqrt_bias_correction2) + scalars.eps
    p = p - (scalars.step_size * m) / d
    _store_weight(param, master, p, words if stochastic else None)
    return healed


def _first(bad: list[Tensor], device: torch.device) -> Tensor:
    """Index of the first true flag, or -1, as a 0-d int64 tensor; without waiting for the device."""
    none = len(bad)
    index = torch.arange(none, device=device)
    candidates = torch.where(torch.stack(bad), index, none) if bad else index
    first = torch.cat((candidates, torch.full((1,), none, device=device))).min()
    return torch.where(first == none, -1, first)


def _load_weight(param: Tensor, master: Tensor | None, heal: bool) -> tuple[Tensor, Tensor]:
    """The float32 weight to go on from, flat, and how many of its elements were healed."""
    weight = param.reshape(-1)
    healed = torch.zeros((), dtype=torch.int64, device=param.device)
    if master is None:
        return weight.float(), healed
    if master.dtype == torch.int16:
        return join_master(weight, master.reshape(-1)), healed
    wide = master.reshape(-1)
    if not heal:
        return wide, healed
    rounded = round_to(wide, param.dtype)
    bits = torch.int32 if param.dtype == torch.float32 else torch.int16
    same = (rounded.view(bits) == weight.view(bits)) | (rounded.isnan() & weight.isnan())
    return torch.where(same, wide, weight.float()), (~same).sum()


def _store_weight(param: Tensor, master: Tensor | None, p: Tensor, words: Words | None) -> None:
    """Write the new weight; a weight with a master is never rounded stochastically."""
    if master is not None and master.dtype == torch.int16:
        weight, remainder = split_master(p)
        _write(param, weight)
        _write(master, remainder)
    elif master is not None:
        _write(param, round_to(p, param.dtype))
        _write(master, p)
    elif words is not None:
        _store_rounded(param, p, words, STREAM_WEIGHT)
    else:
        _write(param, round_to(p, param.dtype))


def _store_rounded(target: Tensor, value: Tensor, words: Words, stream: int) -> None:
    """Write float32 values, stochastically rounded if the target is narrower."""
    if target.dtype != torch.float32:
        value = round_stochastic(value, target.dtype, words(stream))
    _write(target, value)


def _write(target: Tensor, flat: Tensor) -> None:
    target.copy_(flat.view(target.shape))


def _lerp(m: Tensor, g: Tensor, scalars: AdamScalars) -> Tensor:
    """torch.lerp(m, g, 1 - beta1): of its two forms the one that is exact at the nearer end."""
    if scalars.one_minus_beta1 < 0.5:
        return m + scalars.one_minus_beta1 * (g - m)
    return g - (g - m) * scalars.beta1


def _maximum(stored: Tensor, v: Tensor) -> Tensor:
    """torch.maximum, NaN propagating, with the choice between equals (a stored -0 and a new 0) fixed: the new one."""
    return torch.where((stored > v) | stored.isnan(), stored, v)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded float32 square root: float64 has more than twice the digits, so rounding twice is exact."""
    return x.double().sqrt().float()
