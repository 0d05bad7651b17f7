"""Attention on Triton's kernels: allocates, brings tensors into a form that the kernels can read, launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .attention_call import AttentionCall, empty_like_order

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@cache
def kernels() -> Any:
    from ..triton_kernels.attention import launch  # here: what needs no GPU does not wait for triton's import

    return launch


def forward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(out, LSE, log_sum), as every backend's attention_forward."""
    _check_lengths(call)
    q = call.q
    out = empty_like_order(q, (*call.stat_shape, call.v.shape[3]))
    stat = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(call.stat_shape, dtype=stat, device=q.device)
    log_sum = torch.empty(call.stat_shape if call.bias is not None else (0,), dtype=stat, device=q.device)
    if call.varlen:  # rows of no segment
        out.zero_()
        lse.fill_(-torch.inf)
    if out.numel():
        written = _place(out)
        kernels().forward(_operands(call), written, lse, None if call.bias is None else log_sum)
        _fill((out,), (written,))
    return out, lse, log_sum


def backward(
    call: AttentionCall, out: Tensor, lse: Tensor, log_sum: Tensor, d_out: Tensor, d_lse: Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v and the bias, as every backend's attention_backward."""
    launch = kernels()
    inputs = (call.q, call.k, call.v)
    nothing = not out.numel() or not call.k.numel()
    made = [empty_like_order(t, t.shape) if needed else None for t, needed in zip(inputs, needs, strict=False)]
    for gradient in made:
        if gradient is not None and (nothing or call.varlen):  # rows of no segment
            gradient.zero_()
    if nothing:
        d_bias = call.bias.new_zeros(call.bias.shape) if call.bias is not None and needs[3] else None
        return made[0], made[1], made[2], d_bias
    a = _operands(call)
    d_out = launch.movable(d_out)
    stats = launch.row_stats(
        a, launch.movable(out), d_out, lse, None if call.bias is None else log_sum,
        None if d_lse is None else d_lse.contiguous(),
    )  # fmt: skip
    d_q, d_k, d_v = places = [None if gradient is None else _place(gradient) for gradient in made]
    if d_k is not None or d_v is not None:
        launch.keys(a, d_out, stats, d_k, d_v)
    if d_q is not None:
        launch.queries(a, d_out, stats, d_q)
    _fill(made, places)
    d_bias = launch.bias(a, d_out, stats, call.bias) if call.bias is not None and needs[3] else None
    return made[0], made[1], made[2], d_bias


def _place(x: Tensor) -> Tensor:
    """Where kernels write x: itself, or a contiguous copy if its rows lie too far apart for them."""
    return x if kernels().reachable(x) else x.contiguous()


def _fill(tensors: Sequence[Tensor | None], places: Sequence[Tensor | None]) -> None:
    for x, place in zip(tensors, places, strict=True):
        if x is not None and place is not None and place is not x:
            x.copy_(place)


def _check_lengths(call: AttentionCall) -> None:
    longest = kernels().LONGEST
    if max(call.q.shape[2], call.k.shape[2]) >= longest:
        raise ValueError(
            f"attention takes less than 2^29 rows on a GPU, got {call.q.shape[2]} queries and {call.k.shape[2]} keys: "
            "split the call"
        )


def _operands(call: AttentionCall) -> Any:
    launch = kernels()
    q, k, v = (launch.movable(t) for t in (call.q, call.k, call.v))
    segments = q.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1
    sizes = (segments, q.shape[1], q.shape[2], k.shape[2])
    rules, is_plain = launch.rules(
        call.scale, call.softcap, call.left, call.right, call.mask, call.bias, call.alibi_slopes, call.seed,
        call.drop_below, call.dropout_p, sizes,
    )  # fmt: skip
    return launch.Operands(
        q,
        k,
        v,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        rules,
        call.top_left,
        is_plain,
        _precision(q.dtype),
        _shared(q.device),
    )


def _precision(dtype: torch.dtype) -> str:
    """Of dot products of float32: what torch's own may have. (allow_tf32 raises where newer settings are in use.)"""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; 0 in the interpreter."""
    if device.type == "cpu":
        return 0
    import triton

    driver: Any = triton.runtime.driver.active
    return driver.utils.get_device_properties(device.index)["max_shared_mem"]
