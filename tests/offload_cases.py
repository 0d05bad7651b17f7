"""Models whose saved tensors are views, offsets, shared, strided, packed or cast, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.transfers.host import HostTransfers

ALL = dict(min_bytes=1, keep_last_bytes=0)  # every storage moves


class Attention(nn.Module):
    """q, k and v are views of one storage, transposed."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout=dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.drop(self.down(F.silu(gate) * up))


class Views(nn.Module):
    """Products of views with offsets, strides, expanded dims, other dtypes and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight  # [n, 8]
        parts = y[:, 1:5] * y[:, 3:7].exp()
        columns = y.t()[::2] * y.t()[1::2].sin()
        spread = y[:1].expand(4, 8) * y[1:5]
        z = torch.view_as_complex(y.unflatten(1, (4, 2)).contiguous())
        turned = (z * z.conj()).abs() + (z.conj() * z.imag).real + z.conj().imag.exp() * z.conj().imag
        wide = y.double() * y.double().cos()
        bits = y * (y.detach().view(torch.int32) % 2).to(y.dtype)
        empty = (y[:0] * y[:0].exp()).sum()
        return sum(t.sum() for t in (parts, columns, spread, turned, wide.float(), bits)) + empty


class Images(nn.Module):
    """channels_last, in-place operators on what is saved by nobody else, pooling with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        x = F.relu_(self.norm(self.conv1(x)))
        x = F.max_pool2d(self.conv2(x), 2)
        return F.leaky_relu(x, 0.1).mean()


def transformer(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(layers)), nn.LayerNorm(16))


def tokens() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


# name -> (model, input, loss)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor]]] = {
    "transformer": (transformer, tokens, plain),
    "dropout": (lambda: transformer(dropout=0.2), tokens, plain),
    "autocast": (transformer, tokens, autocast),
    "checkpointed": (lambda: transformer(dropout=0.2), tokens, checkpointed),
    "views": (Views, lambda: torch.randn(7, 6, generator=torch.Generator().manual_seed(2)), plain),
    "images": (Images, lambda: torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3)), plain),
}


def gradients(
    name: str, forward: Callable[[], AbstractContextManager[Any]] = nullcontext, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The loss, the parameters' and the input's gradients, with a context around forward."""
    make, inputs, loss_of = CASES[name]
    torch.manual_seed(0)
    model, x = make().to(device), inputs().to(device).requires_grad_()
    with forward():
        loss = loss_of(model, x)
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"loss": loss.detach(), "input": x.grad, **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert not value.isnan().any(), key
        assert torch.equal(ours[key], value), key


def offloaded(seed: int = 0, **options: Any) -> tuple[Any, HostTransfers]:
    device = HostTransfers(seed)
    return hs.offload_activations(**{**ALL, **options}, transfers=device), device
