"""Lists of (bytes, cost) pairs of which none beats another, and what a knapsack does with them.

A list whose merge would be too long is thinned: to the cheapest pair in each cell, of which the capacity has a given
number, and the smallest pair. Sums stay exact, so what fits still fits; what costs least may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """Where lists are thinned: merges of more than `pairs`, to `cells` in the capacity."""

    capacity: int
    pairs: int
    cells: int

    @property
    def cell(self) -> int:
        return max(1, -(-self.capacity // self.cells))


@dataclass(frozen=True)
class Front:
    """Bytes rise (or stay), costs fall. `back` says how each pair was made."""

    bytes: Tensor
    cost: Tensor
    back: Tensor  # [pairs] or [pairs, columns]


def column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def best(size: Tensor, price: Tensor, back: Tensor, capacity: int) -> Front:
    """The pairs that fit and that no smaller one beats, and the smallest, which says how much is needed."""
    fits = size <= capacity
    fits[size.argmin()] = True
    size, price, back = size[fits], price[fits], back[fits]
    order = torch.argsort(size)
    falling = torch.cummin(price[order], 0).values
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = falling[1:] < falling[:-1]
    order = order[better]
    return Front(size[order], price[order], back[order])


def sums(
    sofar: Front, front: Front, twice: int, limits: Limits, promising: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every pair of one list with every pair of the other that is promising, or the smallest: bytes, costs, and the
    places in both lists. `twice` bytes are in both."""
    a, b = _places(len(sofar.bytes)), _places(len(front.bytes))
    thin = len(a) * len(b) > limits.pairs
    if thin:
        a, b = (_thinned(f.bytes, f.cost, limits) for f in (sofar, front))
    size = (sofar.bytes[a][:, None] + front.bytes[b] - twice).flatten()
    price = (sofar.cost[a][:, None] + front.cost[b]).flatten()
    chosen = _places(len(size))
    if promising is not None:
        good = promising(size, price) & (size <= limits.capacity)
        good[size.argmin()] = True
        chosen = chosen[good]
    if thin:
        chosen = chosen[_thinned(size[chosen], price[chosen], limits)]
    return size[chosen], price[chosen], a[chosen // len(b)], b[chosen % len(b)]


def _places(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def _thinned(size: Tensor, price: Tensor, limits: Limits) -> Tensor:
    """Places of the cheapest pair in each cell, and of the smallest pair."""
    cell = size.clamp(max=limits.capacity + 1) // limits.cell
    cheapest = torch.full((limits.cells + 2,), torch.iinfo(torch.int64).max, device="cpu")
    cheapest.scatter_reduce_(0, cell, price, "amin")
    winners = (price == cheapest[cell]).nonzero().flatten()
    first = torch.full_like(cheapest, len(size)).scatter_reduce_(0, cell[winners], winners, "amin")
    return torch.cat([size.argmin()[None], first[first < len(size)]])


def subsets(items: Sequence[tuple[int, int, int]], limits: Limits) -> list[tuple[int, int, int]]:
    """(bytes, saved cost, bits of the places) of the subsets of items (place, bytes, cost) that no other beats."""
    front = [(0, 0, 0)]
    for place, size, price in items:
        more = [(b + size, c + price, bits | 1 << place) for b, c, bits in front if b + size <= limits.capacity]
        merged: list[tuple[int, int, int]] = []
        for pair in sorted(front + more, key=lambda pair: (pair[0], -pair[1])):
            if not merged or pair[1] > merged[-1][1]:
                merged.append(pair)
        if len(merged) > limits.cells:
            merged = [(0, 0, 0), *{pair[0] // limits.cell: pair for pair in merged[1:]}.values()]
        front = merged
    return front
