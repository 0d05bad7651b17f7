"""The two places where a GPT multiplies matrices, and which multiplication this machine is good at.

On a GPU, tensor cores read 16-bit operands and accumulate in float32: the ordinary `F.linear` and
`scaled_dot_product_attention` are what you want. Most CPUs have no such unit and torch's 16-bit matmuls are slow
there (many times slower than float32), so on those `Matmul("upcast", ...)` keeps weights, activations and gradients
in 16 bits, multiplies in float32 and rounds the result: the numerics of a tensor core, at the speed of float32.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["native", "upcast"]


class _UpcastLinear(torch.autograd.Function):
    """y = round(x @ w.T), with x [tokens, in], w [out, in] and y [tokens, out] in 16 bits, the product in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):  # autocast would turn this product back into 16 bits
            return (x.float() @ weight.float().T).to(x.dtype)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].float()
        return (grad @ weight.float()).to(x.dtype), (grad.T @ x.float()).to(weight.dtype)


@dataclass(frozen=True)
class Matmul:
    """How a model multiplies: `kind` is "native" or "upcast", `reason` says in one sentence why."""

    kind: Kind
    reason: str

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in] times weight [out, in] -> [..., out]; under autocast both are cast to its dtype first."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        if self.kind == "native" or x.dtype == torch.float32:
            return F.linear(x, weight)
        return _UpcastLinear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over [batch, heads, length, dim]; softmax in float32 either way."""
        if self.kind == "native" or v.dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.autocast(q.device.type, enabled=False):
            out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        return out.to(v.dtype)

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [vocabulary, width]. A CPU adds the rows' gradients up in the weight's dtype, and a 16-bit
        sum of a frequent token's thousands of gradients stalls; upcasting the table first keeps that sum in float32."""
        if self.kind == "native":
            return F.embedding(tokens, weight)
        return F.embedding(tokens, weight.float()).to(weight.dtype)


def choose(device: torch.device, dtype: torch.dtype, kind: Literal["auto", "native", "upcast"] = "auto") -> Matmul:
    """The multiplication for operands of `dtype` on `device`; "auto" times both ways once where it is in doubt."""
    if kind != "auto":
        return Matmul(kind, "as asked for")
    if dtype == torch.float32:
        return Matmul("native", "float32 operands: the ordinary matmul")
    if device.type != "cpu":
        return Matmul("native", f"{device.type} multiplies 16-bit operands itself")
    slow, fast = _gflops(dtype), _gflops(torch.float32)
    measured = f"this CPU reaches {slow:.0f} GFLOP/s in {_name(dtype)} and {fast:.0f} in float32"
    return Matmul("native", measured) if slow > fast else Matmul("upcast", measured)


def _gflops(dtype: torch.dtype, size: int = 256) -> float:
    """Median of five products: small enough that 0.3 GFLOP/s, the slowest seen, answers in half a second."""
    a = torch.ones(size, size, dtype=dtype)
    a @ a  # the first call sets up threads and kernels
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds) / 1e9


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
