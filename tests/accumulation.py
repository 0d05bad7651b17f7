"""A small model and micro-batches of very different lengths, with the whole batch's gradient in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH = 7, 16
LENGTHS = [3, 40, 17, 1]  # valid tokens; each micro-batch has two more that are not
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two linear layers around a norm; a tied weight, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.outer = nn.Linear(WIDTH, CLASSES, bias=False)
        self.again = self.outer
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.inner(x)))
        return self.outer(hidden) + self.again(self.rms(hidden))


def model(dtype: torch.dtype = torch.float32) -> Block:
    """The same numbers in every dtype that is not 16 bits wide, and in those rounded."""
    torch.manual_seed(3)
    return Block().to(dtype)


def batches(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        x = torch.randn(length + 2, WIDTH, generator=generator)
        labels = torch.randint(CLASSES, (length + 2,), generator=generator)
        labels[length:] = -100
        made.append((x, labels))
    return made


def valid(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def token_loss(net: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """In float32 at least, as everyone computes it."""
    x, labels = batch
    dtype = next(net.parameters()).dtype
    logits = net(x.to(dtype))
    return F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), labels, reduction=reduction)


def together(parts: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([labels for _, labels in parts])


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def whole_batch(net: nn.Module, parts: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of all micro-batches as one batch, in the model's dtype."""
    net.zero_grad()
    loss = token_loss(net, together(parts))
    loss.backward()
    found = gradients(net)
    net.zero_grad()
    return loss.detach(), found


def in_float64(make: Callable[[], nn.Module], parts: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    return whole_batch(make().double(), parts)


def spread(make: Callable[[], nn.Module], parts: Sequence[Batch]) -> dict[str, Tensor]:
    """Sum of the absolute gradients of the tokens: what terms that cancel are rounded against."""
    net = make().double()
    total: dict[str, Tensor] = {}
    for x, labels in parts:
        for i in range(int(valid(labels))):
            token_loss(net, (x[i : i + 1], labels[i : i + 1])).backward()
            for name, grad in gradients(net).items():
                total[name] = total.get(name, torch.zeros_like(grad)) + grad.abs()
            net.zero_grad()
    count = sum(int(valid(labels)) for _, labels in parts)
    return {name: value / count for name, value in total.items()}


def assert_within_budget(
    got: dict[str, Tensor], naive: dict[str, Tensor], exact: dict[str, Tensor], terms: dict[str, Tensor]
) -> None:
    """No further from float64 than the whole batch at once in the model's dtype, but for rounding."""
    assert got.keys() == exact.keys() == naive.keys()
    for name, truth in exact.items():
        floor = 2 * torch.finfo(naive[name].dtype).eps * terms[name]
        error, theirs = (got[name].double() - truth).abs(), (naive[name].double() - truth).abs()
        assert not error.isnan().any(), name
        assert error.max() <= 3 * (theirs.max() + floor.max()), name
        assert error.mean() <= 1.5 * theirs.mean() + floor.mean(), name


def run(accumulator: Any, net: nn.Module, parts: Sequence[Batch], reduction: str = "mean") -> None:
    for batch in parts:
        accumulator.backward(token_loss(net, batch, reduction), tokens=valid(batch[1]))


def assert_to_rounding(got: Tensor, expected: Tensor, terms: int, among: Sequence[Tensor] = ()) -> None:
    """Equal up to the rounding of sums of so many terms, in the first one's dtype, beside the largest number; `among`:
    of these tensors, where the terms cancel."""
    largest = max(tensor.abs().max() for tensor in (*among, expected))
    bound = terms * torch.finfo(got.dtype).eps * largest
    assert (got.double() - expected.double()).abs().max() <= bound
