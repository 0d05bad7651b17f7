"""Small tensors for attention, a backend that notes what it is asked for, and attention written out."""

from __future__ import annotations

from typing import Any

import torch
from adversarial import FLOAT32, generator
from torch import Tensor

from halfstep.ops import attention_torch
from halfstep.ops.attention_call import AttentionCall

BATCH, HEADS, SHARED, QUERIES, KEYS, DIM, VALUE_DIM = 2, 4, 2, 5, 7, 16, 24
SHAPES = {
    "q": (BATCH, HEADS, QUERIES, DIM),
    "k": (BATCH, SHARED, KEYS, DIM),
    "v": (BATCH, SHARED, KEYS, VALUE_DIM),
    "bias": (HEADS, 1, KEYS),
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers; the same ones for every dtype, up to rounding."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64, device="cpu").to(dtype)


def qkv(dtype: torch.dtype = FLOAT32, *, grad: bool = True, seed: int = 0, queries: int = QUERIES) -> list[Tensor]:
    shapes = [(BATCH, HEADS, queries, DIM), SHAPES["k"], SHAPES["v"]]
    return [drawn(shape, dtype, seed + i).requires_grad_(grad) for i, shape in enumerate(shapes)]


def packed_rows(dtype: torch.dtype = FLOAT32, *, grad: bool = True, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """q, k and v [9, heads, dim] of three segments, one of them empty, and where those begin and end."""
    shapes = [(9, HEADS, DIM), (9, SHARED, DIM), (9, SHARED, VALUE_DIM)]
    tensors = [drawn(shape, dtype, seed + i).requires_grad_(grad) for i, shape in enumerate(shapes)]
    return tensors, torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def gradients(out: Tensor, inputs: list[Tensor], *, retain_graph: bool = False) -> list[Tensor]:
    """Of a sum that weighs every element differently."""
    total = (out * drawn(tuple(out.shape), out.dtype, 99)).sum()
    return list(torch.autograd.grad(total, inputs, retain_graph=retain_graph))


def written_out(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Tensor:
    """Plain attention in torch, for autograd to differentiate."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


class Asked:
    """A backend for `override` that notes which gradients are asked for, and with which d_lse."""

    name = "asked"

    def __init__(self) -> None:
        self.needs: list[tuple[bool, ...]] = []
        self.d_lse: list[Tensor | None] = []
        self.calls: list[AttentionCall] = []

    def attention_forward(self, call: AttentionCall) -> Any:
        self.calls.append(call)
        return attention_torch.attention_forward(call)

    def attention_backward(self, call: AttentionCall, *rest: Any) -> Any:
        self.d_lse.append(rest[-2])
        self.needs.append(rest[-1])
        return attention_torch.attention_backward(call, *rest)
