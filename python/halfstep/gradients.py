"""grad_stats, l2_norms, unscale_, clip_grad_norm_: the first half of the optimizer phase, for loops that want it alone.

halfstep's optimizers do all of this inside step(); nothing here needs to be called before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .ops import devices, lists
from .ops import optimizer as optimizer_ops
from .ops.layout import check_tensor
from .ops.overlap import check_writable
from .shards import refuse_sharded


def _checked(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    found = list(tensors)
    plain = lists.read(found)
    if plain is not None:
        return plain
    for i, tensor in enumerate(found):
        check_tensor(tensor, f"{name}[{i}]")
        refuse_sharded(tensor, f"{name}[{i}]")
        if tensor.device != found[0].device:
            raise ValueError(
                f"{name}[{i}] is on {tensor.device}, {name}[0] on {found[0].device}; use one device a call"
            )
    return found


def _check_writable(grads: list[Tensor], name: str) -> None:
    """`name` has braces where the index goes."""
    if not lists.are_apart(grads):
        check_writable(grads, [name.format(i) for i in range(len(grads))])


def _scalar(value: Tensor | float, name: str, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return devices.scalar_on(value, device, torch.float32, name)
    if torch.compiler.is_compiling():
        return _variable(value, device).to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _variable(value: float, device: torch.device) -> Tensor:
    """A number that stays one variable of a compiled graph, 0-d float64: arithmetic with a tensor keeps it so.

    As an argument of torch.full() or of an operator each value would be compiled anew.
    """
    return torch.ones((), dtype=torch.float64, device=device) * value


@torch.no_grad()
def grad_stats(grads: Iterable[Tensor], scale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """Global norm and overflow check of u = f32(grad) * f32(1 / scale), in one read of the gradients.

    Args:
        grads: float32, bfloat16 or float16 tensors of one device, any shapes and strides; read only.
        scale: the loss scale they carry, a number or 1-element tensor; None for unscaled gradients.

    Returns:
        (norm, found_inf): 0-d float64, and 0-d float32 that is 1.0 if any u is Inf or NaN. The norm has one fixed order
            of summation on every backend, and does not overflow or vanish for finite gradients of any size. Both are on
            the gradients' device, and nothing waits for it.

    Bytes read per element: the gradient's item size. Raises TypeError (dtype, sparse, DTensor), ValueError (devices).

    Example:
        >>> norm, found_inf = hs.grad_stats([torch.tensor([3.0]), torch.tensor([4.0])])
        >>> norm.item(), found_inf.item()
        (5.0, 0.0)
    """
    checked = _checked(grads, "grads")
    device = checked[0].device if checked else torch.device("cpu")
    divisor = None if scale is None else _scalar(scale, "scale", device)
    if torch.compiler.is_compiling():
        return torch.ops.halfstep.grad_stats(checked, divisor)
    total, first_bad = optimizer_ops.grad_stats(checked, divisor)
    return optimizer_ops.norm_from(total), (first_bad >= 0).float()


@torch.no_grad()
def l2_norms(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The 2-norm of every tensor and of all of them together, in one read.

    Args:
        tensors: n float32, bfloat16 or float16 tensors of one device, any shapes and strides; read only. Gradients,
            weights, updates; a gradient that still carries a loss scale is not unscaled.

    Returns:
        (norms, total): float64 [n] and 0-d float64, on the tensors' device. Inf or NaN where a tensor has one; 0 for a
            tensor without elements. They have one fixed order of summation on every backend, `total` that of
            `grad_stats`, and do not overflow or vanish for finite numbers of any size.

    Bytes read per element: the tensor's item size. Raises as `grad_stats`.

    Example:
        >>> norms, total = hs.l2_norms([torch.tensor([3.0, 4.0]), torch.tensor([12.0], dtype=torch.bfloat16)])
        >>> norms.tolist(), total.item()
        ([5.0, 12.0], 13.0)
    """
    checked = _checked(tensors, "tensors")
    if torch.compiler.is_compiling():
        return torch.ops.halfstep.l2_norms(checked)
    return optimizer_ops.l2_norms(checked)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor | float, found_inf: Tensor) -> None:
    """grad = round(f32(grad) * inv_scale), in place, and found_inf = 1 if a stored value is Inf or NaN.

    Args:
        grads: as in `grad_stats`; written in place, so expanded or overlapping ones are refused.
        inv_scale: 1 / loss scale, a number or 1-element tensor; taken as float32.
        found_inf: 1-element floating tensor on the same device; raised to 1, never lowered, as torch's own unscale.
            Nothing waits for that device.

    Bytes moved per element: twice the gradient's item size. float16 gradients are allowed: what underflows here was
    kept by the scale until now, so prefer the optimizer's own unscaling, which loses nothing. Raises as `grad_stats`.

    Example:
        >>> grads, found_inf = [torch.tensor([1024.0])], torch.zeros(())
        >>> hs.unscale_(grads, 1 / 1024, found_inf)
        >>> grads[0].item(), found_inf.item()
        (1.0, 0.0)
    """
    factor = _scalar(inv_scale, "inv_scale", found_inf.device)
    if found_inf.numel() != 1 or not found_inf.is_floating_point():
        raise ValueError(
            f"found_inf must be a 1-element floating tensor, got {found_inf.dtype} {tuple(found_inf.shape)}"
        )
    checked = _checked(grads, "grads")
    if checked and checked[0].device != found_inf.device:
        raise ValueError(f"found_inf is on {found_inf.device}, grads[0] on {checked[0].device}; they need one device")
    if torch.compiler.is_compiling():
        torch.ops.halfstep.unscale_(checked, factor, found_inf)
        return
    _check_writable(checked, "grads[{}]")
    first_bad = optimizer_ops.unscale_(checked, factor)
    found_inf.copy_(torch.maximum(found_inf, (first_bad >= 0).to(found_inf)))


@torch.no_grad()
def unscale_and_find_(grads: Iterable[Tensor], inv_scale: Tensor) -> Tensor:
    """`unscale_` that tells which gradient is the first with a value that is Inf or NaN: 0-d int64, -1 if none is."""
    checked = _checked(grads, "grads")
    _check_writable(checked, "grads[{}]")
    return optimizer_ops.unscale_(checked, inv_scale)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for the 2-norm: float32, bfloat16 and float16 gradients, two passes for all.

    Args:
        parameters: a parameter or an iterable of them; those without a gradient are left out.
        max_norm: gradients are scaled by min(1, max_norm / (norm + 1e-6)); a number, not negative.
        norm_type: must be 2.
        error_if_nonfinite: raise RuntimeError if the norm is Inf or NaN, before anything is written. This waits for the
            device; nothing else here does.
        foreach: accepted for compatibility; all tensors go in one call anyway.

    Returns: the norm before clipping, 0-d float64.

    Bytes moved per element: the gradient's item size, three times if it clips; on a GPU always, since the host does not
    wait to know whether it does (a factor of 1 changes nothing). Optimizers with max_grad_norm= clip
    inside the step and write nothing back.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> hs.clip_grad_norm_([weight], max_norm=1.0).item()
        5.0
    """
    if float(norm_type) != 2.0:
        raise ValueError(
            f"norm_type={norm_type}: halfstep clips by the 2-norm; use torch.nn.utils.clip_grad_norm_ for others"
        )
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: expected a number >= 0")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if error_if_nonfinite and torch.compiler.is_dynamo_compiling():
        from .untraced import call  # whether to raise is decided by a value

        return call(clip_grad_norm_, params, max_norm, error_if_nonfinite=True)
    grads = _checked([p.grad for p in params if p.grad is not None], "parameters' gradients")
    if torch.compiler.is_compiling():
        limit = _variable(max_norm, grads[0].device if grads else torch.device("cpu"))
        return torch.ops.halfstep.clip_grad_norm_(grads, limit)
    _check_writable(grads, "gradient {}")
    if error_if_nonfinite:
        norm, _ = grad_stats(grads)
        if not norm.isfinite():
            raise RuntimeError(
                f"the gradients' norm is {norm.item()}, so they were not clipped; some gradient is not finite"
            )
    return optimizer_ops.clip_grad_norm_(grads, float(max_norm))
