"""Small models for the tests of `hs.checkpoint`, and what a forward and backward of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

WIDTH, HEADS = 16, 2


def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy that keeps the result of every operator, random numbers too."""
    return True


class KeepSome:
    """A policy that keeps every second result."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        self.count += 1
        return self.count % 2 == 0


POLICIES = {"layer": lambda: "layer", "selective": lambda: "selective", "all": lambda: keep_all, "some": KeepSome}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # with dropout the CPU writes attention out, with the scores' mask drawn in the middle of the block
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        return self.out(heads.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A Transformer block that draws random numbers in three ways and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = x + self.dropout(self.attention(self.norms[0](x)))
        y = self.mlp(self.norms[1](x))
        return x + self.dropout(y + 0.1 * torch.rand_like(y) if self.training else y)


class Stack(nn.Module):
    def __init__(self, layers: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(layers: int = 2, block: Callable[[], nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(layers, block)


def inputs(requires_grad: bool = True, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, WIDTH, generator=generator).requires_grad_(requires_grad)


def run(model: nn.Module, x: Tensor, forward: Callable[..., Any] | None = None, seed: int = 2) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of one forward and backward, and the next random number."""
    torch.manual_seed(seed)
    model.zero_grad()
    x.grad = None
    outputs = [leaf for leaf in tree_leaves((model if forward is None else forward)(x)) if isinstance(leaf, Tensor)]
    sum(output.float().square().sum() for output in outputs if output.requires_grad).backward()
    found = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    found["random"] = torch.rand(1)
    return found if x.grad is None else {**found, "input": x.grad.clone()}


def assert_same_run(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(got[name], tensor, name)
