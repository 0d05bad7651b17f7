"""The two places where a GPT multiplies matrices, and which multiplication this machine is good at.

On a GPU, tensor cores read 16-bit operands and accumulate in float32: the ordinary `F.linear` is what you want. Most
CPUs have no such unit and torch's 16-bit matmuls are slow there (many times slower than float32), so on those
`Matmul("upcast", ...)` keeps weights, activations and gradients in 16 bits, multiplies in float32 and rounds the
result: the numerics of a tensor core, at the speed of float32.

Attention is torch's `scaled_dot_product_attention`, for which that is done here, or `hs.attention`, which does it by
itself. On a CPU both end in the same kernel, and hs.attention keeps 16 bits instead of 32 for the backward pass, at the
price of converting again: some 3 % of a step of the small preset (2 shared 2.8 GHz cores), so it is not the default.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import halfstep as hs

Kind = Literal["native", "upcast"]
Attention = Literal["halfstep", "sdpa"]


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
    """How a model multiplies: `kind` is "native" or "upcast", `reason` says in one sentence why; `attends`: whose
    attention it has."""

    kind: Kind
    reason: str
    attends: Attention = "sdpa"

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in] times weight [out, in] -> [..., out]; under autocast both are cast to its dtype first."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        if self.kind == "native" or x.dtype == torch.float32:
            return F.linear(x, weight)
        return _UpcastLinear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over [batch, heads, length, dim]; softmax in float32 whoever computes it."""
        if self.attends == "halfstep":
            return hs.attention(q, k, v, causal=True)
        if self.kind == "native" or v.dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.autocast(q.device.type, enabled=False):
            out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        return out.to(v.dtype)

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [vocabulary, width]. torch's CPU kernel adds the rows' gradients up in the weight's dtype, and
        a 16-bit sum over a frequent token stalls; upcasting the table first keeps that sum in float32."""
        if weight.device.type != "cpu":
            return F.embedding(tokens, weight)
        return F.embedding(tokens, weight.float()).to(weight.dtype)


def choose(
    device: torch.device, dtype: torch.dtype, kind: Literal["auto", "native", "upcast"] = "auto",
    attends: Attention = "sdpa",
) -> Matmul:  # fmt: skip
    """The multiplication for operands of `dtype` on `device`; "auto" times both ways once where it is in doubt."""
    if kind != "auto":
        return Matmul(kind, "as asked for", attends)
    if dtype == torch.float32:
        return Matmul("native", "float32 operands: the ordinary matmul", attends)
    if device.type != "cpu":
        return Matmul("native", f"{device.type} multiplies 16-bit operands itself", attends)
    narrow, wide = _gflops(dtype), _gflops(torch.float32)
    name = str(dtype).removeprefix("torch.")
    return Matmul(
        "native" if narrow > wide else "upcast",
        f"a core of this CPU reaches {narrow:.0f} GFLOP/s in {name} and {wide:.0f} in float32",
        attends,
    )


def _gflops(dtype: torch.dtype, size: int = 256, budget: float = 0.2) -> float:
    """The best of at least three products on one thread: other processes only slow down, and threads on busy cores
    wait for each other at every product. So small that 0.3 GFLOP/s, the slowest seen, answers in half a second."""
    a = torch.ones(size, size, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a.matmul(a)  # the first call sets up the kernel
        seconds: list[float] = []
        while len(seconds) < 3 or sum(seconds) < budget:
            start = time.perf_counter()
            a.matmul(a)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / min(seconds) / 1e9
