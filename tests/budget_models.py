"""Small models whose blocks run under a ByteBudget, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from example_runs import tiny
from gpt.matmul import Matmul
from gpt.model import GPT
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import halfstep as hs
from halfstep.activations.measure import flop_formulas

LOTS = 10**9


class LlamaBlock(nn.Module):
    """As transformers computes it: RMSNorms in float32, grouped heads repeated, SDPA, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        sizes = {"q": width, "k": kv_heads * self.dim, "v": kv_heads * self.dim, "o": width}
        self.attention = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes.items()})
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ParameterList([torch.ones(width), torch.ones(width)])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x, self.norms[0])
        q, k, v = (self.attention[n](y).unflatten(-1, (-1, self.dim)).transpose(1, 2) for n in "qkv")
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        x = x + self.attention["o"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Chain(nn.Module):
    """Blocks between an embedding and a loss, all of which take the same mask."""

    def __init__(self, blocks: list[nn.Module], width: int = 16, masked: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks, self.masked = nn.Embedding(50, width), nn.ModuleList(blocks), masked
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = (tokens > 5)[..., None] if self.masked else None
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask)
        return x.mean() if self.masked else self.head(x).square().mean()  # a mean does not keep what it is taken of


class DroppedLlama(LlamaBlock):
    """With dropout behind both branches."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2, self.training)), 0.2, self.training)


class Masked(nn.Module):
    """Saves its mask only where there is no checkpoint, and changes a result in place."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = F.relu(self.up(x), inplace=True)
        return torch.where(mask, x + F.dropout(self.down(y), 0.1, self.training), x).tanh()


def llama() -> nn.Module:
    return Chain([LlamaBlock(16, 2, 1, 24) for _ in range(3)])


def dropped() -> nn.Module:
    return Chain([DroppedLlama(16, 2, 1, 24) for _ in range(2)])


def masked() -> nn.Module:
    return Chain([Masked() for _ in range(3)], masked=True)


def gpt() -> nn.Module:
    config = tiny(layers=2, width=16)
    matmul = Matmul("native", "a test", "halfstep")

    class Loss(GPT):
        def forward(self, tokens: Tensor, targets: Any = None) -> Tensor:
            return super().forward(tokens, tokens)

    return Loss(50, config.width, config.layers, config.heads, matmul)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "dropout": dropped, "masks": masked, "gpt": gpt}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def tokens_of(length: int = 12, batch: int = 2) -> Tensor:
    return (torch.arange(batch * length) * 7 % 50).view(batch, length)


def budgeted(make: Callable[[], nn.Module], n: int, length: int = 12, **settings: Any) -> tuple[nn.Module, Any]:
    """A model under a budget, after the forward that measures it."""
    model = made(make)
    handle = hs.checkpoint(model, hs.ByteBudget(n, **settings))
    model(tokens_of(length)).backward()
    return model, handle


def gradients(model: nn.Module, tokens: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(tokens_of() if tokens is None else tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


def bytes_of(model: nn.Module, tokens: Tensor | None = None) -> int:
    with hs.measure_activations() as measured:
        loss = model(tokens_of() if tokens is None else tokens)
    del loss
    return measured.bytes


def flops_of(model: nn.Module) -> int:
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counted:
        model(tokens_of()).backward()
    return counted.get_total_flops()


def budgets_between(make: Callable[[], nn.Module], steps: int) -> list[int]:
    """From the least that blocks can keep to all that they would."""
    least, most = _extremes(make)
    return [least + (most - least) * i // steps for i in range(steps + 1)]


@cache
def _extremes(make: Callable[[], nn.Module]) -> tuple[int, int]:
    plan = budgeted(make, LOTS)[1].plan
    return plan.least, plan.most
