"""torch.ops.halfstep.attention and attention_backward: schemas, fake functions, one backward for eager and compiled.

Both go to the backend chosen in backend.py. A graph takes the operator with its registered gradient. Eager calls put
the same two functions into a torch.autograd.Function of our own, and go past the dispatcher where it would only hand
them on: torch's wrapper around a registered gradient costs more host time than all the rest of a small call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import devices
from .attention_call import AttentionCall, empty_like_order
from .backend import choose_attention
from .schemas import define

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seed, float scale, float softcap, SymInt? left, SymInt? right, bool top_left, "
    "float dropout_p"
)
_FIELDS = len(AttentionCall._fields)
_DIFFERENTIABLE = [AttentionCall._fields.index(name) for name in ("q", "k", "v", "bias")]
_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = AttentionCall._fields.index("scale")  # the tensors come before


def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, differentiable in q, k, v and bias."""
    # A trace of what a backend does would keep today's lengths
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return torch.ops.halfstep.attention(*call)[:2]
    if _wants_gradient(call):
        return _Attention.apply(*call)[:2]  # type: ignore[return-value, index]
    return _forward(call)[:2]


def _wants_gradient(call: AttentionCall) -> bool:
    # In forward-mode differentiation no tensor says so; torch's refusal is in apply()
    return (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in _differentiable(call))) or (
        torch.autograd.forward_ad._current_level >= 0
    )


def _unwatched(tensors: Sequence[Any]) -> bool:
    """True if the dispatcher would only hand these on: no mode, transformation or subclass has a say, none is lazy."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and all(t is None or (type(t) in _PLAIN and not _lazy(t) and not t.is_meta) for t in tensors)
    )


def _lazy(t: Tensor) -> bool:
    """The memory, if there is any, does not have the numbers: signs that are yet to be turned, autograd's zeros."""
    return t.is_neg() or t._is_zerotensor()


def _forward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    run = _attention if _unwatched(call[:_NUMBERS]) else torch.ops.halfstep.attention
    return run(*call)


def _differentiable(values: Sequence[Any]) -> list[Any]:
    return [values[i] for i in _DIFFERENTIABLE]


# ---- the operators ---------------------------------------------------------------------------------------------------
def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = AttentionCall(*arguments)
    _check_segments(call)
    with _no_autocast(call.q.device):
        return choose_attention(call.q.device).attention_forward(call)


def _attention_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, log_sum: Tensor, needs: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    call = AttentionCall(*arguments)
    with _no_autocast(call.q.device):
        backend = choose_attention(call.q.device)
        gradients = backend.attention_backward(call, out, lse, log_sum, d_out, d_lse, tuple(needs))
    return tuple(call.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _fake_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = AttentionCall(*arguments)
    stat = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    return (
        empty_like_order(call.q, (*call.stat_shape, call.v.shape[3])),
        call.q.new_empty(call.stat_shape, dtype=stat),
        call.q.new_empty((0,) if call.bias is None else call.stat_shape, dtype=stat),
    )


def _fake_attention_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, log_sum: Tensor, needs: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    *qkv, bias = _differentiable(arguments)
    made = [empty_like_order(t, t.shape) if needed else out.new_empty(0) for t, needed in zip(qkv, needs, strict=False)]
    # A bias' gradient is a sum in float32, which is contiguous
    return *made, out.new_empty(bias.shape, dtype=bias.dtype) if needs[3] else out.new_empty(0)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A backend's own products keep their dtypes: autocast would round the float32 ones to 16 bits."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def _check_segments(call: AttentionCall) -> None:
    """Where reading them waits for nothing; kernels on a device stay inside the tensors."""
    if not call.varlen or not devices.is_host(call.q.device):
        return
    rows = {"cu_seqlens_q": (call.cu_seqlens_q, call.q), "cu_seqlens_k": (call.cu_seqlens_k, call.k)}
    for name, (boundaries, tensor) in rows.items():
        assert boundaries is not None
        places, total = boundaries.tolist(), tensor.shape[2]
        down = next((i for i in range(1, len(places)) if places[i] < places[i - 1]), None)
        if down is None and places[0] == 0 and places[-1] <= total:
            continue
        came = f"decreases from {places[down - 1]} to {places[down]} at index {down}" if down is not None else (
            f"goes from {places[0]} to {places[-1]}"
        )  # fmt: skip
        raise ValueError(
            f"{name} {came}; expected running sums of the segments' lengths, which start at 0, never decrease and do "
            f"not pass {total}, the rows of {name[-1]}: F.pad(lengths.cumsum(0), (1, 0))"
        )


# ---- gradients -------------------------------------------------------------------------------------------------------
def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps the inputs, out and 4 bytes a row; d_lse stays None when nobody differentiates lse."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:_NUMBERS], *output)
    ctx.numbers = inputs[_NUMBERS:]


def _backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
    d_out, d_lse, _ = grad_outputs  # None for what nobody differentiates
    gradients: list[Tensor | None] = [None] * _FIELDS
    if d_out is None and d_lse is None:
        return tuple(gradients)
    *tensors, out, lse, log_sum = ctx.saved_tensors
    if d_out is None:
        d_out = out.new_zeros(()).expand(out.shape)
    needs = _differentiable(ctx.needs_input_grad)
    # A graph, and the error of a second derivative, need the operator
    direct = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _unwatched((d_out, d_lse, *tensors))
    run = _attention_backward if direct else torch.ops.halfstep.attention_backward
    made = run(d_out, d_lse, out, lse, log_sum, needs, *tensors, *ctx.numbers)
    for place, gradient, needed in zip(_DIFFERENTIABLE, made, needs, strict=True):
        gradients[place] = gradient if needed else None
    return tuple(gradients)


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "hs.attention has no second derivative: the gradient that it made was differentiated again, as for a gradient "
        "penalty or a Hessian. Use torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that term"
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(AttentionCall(*arguments))
        _setup_context(ctx, arguments, output)
        return output

    backward = staticmethod(_backward)


define(f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor log_sum)", _attention, _fake_attention)
define(
    "attention_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, Tensor log_sum, bool[4] needs, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _fake_attention_backward,
)
torch.library.register_autograd("halfstep::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("halfstep::attention_backward", _no_second_derivative)
