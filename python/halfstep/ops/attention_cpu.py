"""torch's fused attention for CPU tensors, for the dense calls that it can express: no mask, or plain causal.

It keeps no [Lq, Lk] matrix and reads grouped heads and any strides as they are. 16-bit tensors go through copies in
float32: its own 16-bit path multiplies rounded probabilities, and is slow where the CPU has no 16-bit matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import devices
from .attention_call import AttentionCall

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def expresses(call: AttentionCall) -> bool:
    """True if torch's kernel computes exactly this call, which is dense."""
    plain = call.mask is None and call.bias is None and call.alibi_slopes is None and call.seed is None
    # It multiplies by the scale what the mask has made -inf.
    plain = plain and call.softcap == 0 and call.scale > 0
    # Of empty tensors it divides by 0, which ends the process.
    filled = call.q.numel() > 0 and call.k.numel() > 0
    same_dims = call.q.shape[3] == call.v.shape[3]
    return devices.is_host(call.q.device) and plain and same_dims and filled and (_all_visible(call) or _causal(call))


def attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out, of what the kernel computes in, and lse."""
    return _forward(*map(_readable, (call.q, call.k, call.v)), is_causal=_causal(call), scale=call.scale)


def attention_backward(call: AttentionCall, out: Tensor, lse: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, of what the kernel computes in."""
    given = (_readable(x) for x in (d_out, call.q, call.k, call.v, out))
    return _backward(*given, lse, 0.0, _causal(call), scale=call.scale)


def _all_visible(call: AttentionCall) -> bool:
    """The window's ends lie beyond the keys: also of one causal query over all keys, the step of a decoder."""
    Lq, Lk, shift = call.q.shape[2], call.k.shape[2], call.shift
    return (call.left is None or Lq - 1 + shift - call.left <= 0) and (
        call.right is None or shift + call.right >= Lk - 1
    )


def _causal(call: AttentionCall) -> bool:
    Lq, Lk = call.q.shape[2], call.k.shape[2]
    return Lq == Lk > 1 and call.right == 0 and (call.left is None or call.left >= Lk - 1)


def _readable(x: Tensor) -> Tensor:
    """In float32 at least, with a last dimension that is contiguous."""
    if x.dtype.itemsize == 2:
        x = x.float()
    return x if x.stride(3) == 1 else x.contiguous()
