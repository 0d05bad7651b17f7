"""Which results to keep, so that recomputing the others costs least and what is kept fits: a multiple-choice knapsack.

Every call of a block is run without a checkpoint (it keeps what autograd saves and costs nothing), or with one: then it
keeps its inputs and the results of any of its operators, and the others' costs add up, since a recomputation runs all
that was not kept. Solved exactly, by lists of the (bytes, cost) pairs that no other pair beats, merged call by call.

Storages that several calls hold count once. The one that a call makes and the next takes as input is exact: lists are
kept apart by whether it is held. Any other storage that several calls hold (a mask, rotary angles) is counted once and
always, which is exact when each choice of some call holds it, and too much by that storage otherwise.

Two lists are merged in full while they have at most MERGED pairs together; beyond, they and what comes of them are
thinned to the cheapest pair in each 1/4096 of the capacity. A thinned list still only has sums that are exact, so a
solution never takes more than the capacity, but it may cost more than the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MERGED = 2**18
CELLS = 4096


@dataclass(frozen=True)
class Item:
    """An operator's results that may be kept: the storages they add, and what recomputing them costs."""

    storages: frozenset[int]
    cost: int


@dataclass(frozen=True)
class Call:
    """One call of a block: the storages that any checkpoint of it holds, what runs without one keeps, what may be kept,
    and the cost of what a recomputation runs in any case."""

    inputs: frozenset[int]
    saved: frozenset[int]
    items: tuple[Item, ...]
    fixed_cost: int


Choice = frozenset[int] | None  # places of the items that are kept; None = no checkpoint


def held(call: Call, choice: Choice) -> frozenset[int]:
    """The storages that a call keeps for backward."""
    if choice is None:
        return call.saved
    return call.inputs.union(*(call.items[place].storages for place in choice))


def cost(call: Call, choice: Choice) -> int:
    """What recomputing costs."""
    if choice is None:
        return 0
    return call.fixed_cost + sum(item.cost for place, item in enumerate(call.items) if place not in choice)


def kept_bytes(calls: Sequence[Call], choices: Sequence[Choice], sizes: Sequence[int]) -> int:
    """Bytes that all calls keep, each storage once."""
    return sum(sizes[s] for s in frozenset().union(*map(held, calls, choices)))


# ---- lists of pairs --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Front:
    """Pairs of bytes and cost, none of which beats another: bytes rise, costs fall. `back` says how each was made."""

    bytes: Tensor
    cost: Tensor
    back: Tensor  # [pairs] or [pairs, columns]


def _best(size: Tensor, price: Tensor, back: Tensor, capacity: int) -> Front:
    """The pairs that no other beats and that fit, and the smallest, which says how much is needed."""
    fits = size <= capacity
    fits[size.argmin()] = True
    size, price, back = size[fits], price[fits], back[fits]
    order = torch.argsort(price, stable=True)
    order = order[torch.argsort(size[order], stable=True)]
    falling = torch.cummin(price[order], 0).values
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = falling[1:] < falling[:-1]
    order = order[better]
    return Front(size[order], price[order], back[order])


def _cell(capacity: int) -> int:
    return max(1, -(-capacity // CELLS))


def _thinned(size: Tensor, price: Tensor, capacity: int) -> Tensor:
    """Places of the cheapest pair in each cell, and of the smallest pair."""
    order = torch.argsort(price, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = _places(len(order))
    cell = size.clamp(max=capacity + 1) // _cell(capacity)
    best = torch.full((CELLS + 2,), len(order), device="cpu").scatter_reduce_(0, cell, ranks, "amin")
    return torch.cat([size.argmin()[None], order[best[best < len(order)]]])


def _sums(sofar: Front, front: Front, twice: int, held_before: bool, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of one list with every pair of the other; `twice` bytes are in both."""
    a, b = _places(len(sofar.bytes)), _places(len(front.bytes))
    thin = len(a) * len(b) > MERGED
    if thin:
        a, b = (_thinned(f.bytes, f.cost, capacity) for f in (sofar, front))
    size = (sofar.bytes[a][:, None] + front.bytes[b] - twice).flatten()
    price = (sofar.cost[a][:, None] + front.cost[b]).flatten()
    chosen = _thinned(size, price, capacity) if thin else _places(len(size))
    first, second = a[chosen // len(b)], front.back[b[chosen % len(b)]]
    back = torch.stack([torch.full_like(chosen, held_before), first, second], 1)
    return size[chosen], price[chosen], back


def _places(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _subsets(items: Sequence[tuple[int, int, int]], capacity: int) -> list[tuple[int, int, int]]:
    """(bytes, saved cost, bits of the places) of the subsets of items (place, bytes, cost) that no other beats."""
    front = [(0, 0, 0)]
    for place, size, price in items:
        more = [(b + size, c + price, bits | 1 << place) for b, c, bits in front if b + size <= capacity]
        merged: list[tuple[int, int, int]] = []
        for pair in sorted(front + more, key=lambda pair: (pair[0], -pair[1])):
            if not merged or pair[1] > merged[-1][1]:
                merged.append(pair)
        if len(merged) > CELLS:
            merged = [*{pair[0] // _cell(capacity): pair for pair in merged}.values()]
            merged[:0] = [(0, 0, 0)] * (merged[0][0] > 0)
        front = merged
    return front


# ---- one call --------------------------------------------------------------------------------------------------------
Ends = tuple[bool, bool]  # whether the storage shared with the call before is held, and the one shared with the next


@dataclass(frozen=True)
class _Weighed:
    """A call with sizes in place of storages: equal for equal layers, which then share their lists."""

    inputs: int
    saved: int
    saved_ends: Ends
    items: tuple[tuple[int, int, bool], ...]  # bytes, cost, whether it adds the storage shared with the next call
    fixed_cost: int
    ends: tuple[int, int]  # sizes of the two shared storages; 0 = there is none

    def fronts(self, capacity: int) -> tuple[dict[Ends, Front], list[Choice]]:
        """For each way to hold the ends the best pairs; `back` is a place in the list of choices."""
        choices: list[Choice] = [None]
        pairs: dict[Ends, list[tuple[int, int, int]]] = {self.saved_ends: [(self.saved, 0, 0)]}
        free = [(place, size, price) for place, (size, price, link) in enumerate(self.items) if not link]
        everything = self.fixed_cost + sum(price for _, price, _ in self.items)
        before, behind = self.ends
        for link in [None, *(place for place, item in enumerate(self.items) if item[2])]:
            base, bits, spared = self.inputs + before, 0, 0
            if link is not None:
                base, bits, spared = base + behind + self.items[link][0], 1 << link, self.items[link][1]
            found = pairs.setdefault((before > 0, link is not None), [])
            for size, price, more in _subsets(free, capacity - base):
                found.append((base + size, everything - spared - price, len(choices)))
                choices.append(frozenset(place for place in range(len(self.items)) if (more | bits) >> place & 1))
        fronts = {}
        for ends, found in pairs.items():
            size, price, back = (_column(column) for column in zip(*found, strict=True))
            fronts[ends] = _best(size, price, back, capacity)
        return fronts, choices


def _weigh(calls: Sequence[Call], sizes: Sequence[int]) -> tuple[list[_Weighed], int]:
    """The calls with sizes in place of storages, and the bytes of those that are counted once and always."""
    users: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        for storage in call.inputs.union(call.saved, *(item.storages for item in call.items)):
            users.setdefault(storage, []).append(place)
    links: list[int | None] = [None] * (len(calls) + 1)  # what each call shares with the one before
    for storage, used in users.items():
        adjacent = len(used) == 2 and used[1] == used[0] + 1
        if adjacent and storage in calls[used[1]].inputs and storage not in calls[used[0]].inputs:
            links[used[1]] = storage
    own = {storage for storage, used in users.items() if len(used) == 1}

    def weight(storages: frozenset[int | None]) -> int:
        return sum(sizes[s] for s in storages if s is not None)

    weighed = []
    for call, first, last in zip(calls, links, links[1:], strict=False):
        weighed.append(
            _Weighed(
                inputs=weight(call.inputs & own),
                saved=weight(call.saved & (own | {first, last})),
                saved_ends=(first in call.saved, last in call.saved),
                items=tuple((weight(i.storages & own), i.cost, last in i.storages) for i in call.items),
                fixed_cost=call.fixed_cost,
                ends=(weight(frozenset([first])), weight(frozenset([last]))),
            )
        )
    return weighed, weight(frozenset(users) - own - {*links})


# ---- all calls -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Solution:
    """The cheapest choices that fit, or None if none do; the fewest bytes that any choices keep."""

    choices: list[Choice] | None
    least: int


def solve(calls: Sequence[Call], sizes: Sequence[int], capacity: int) -> Solution:
    """The cheapest choices for the calls of one forward, in order, that keep at most `capacity` bytes."""
    weighed, shared = _weigh(calls, sizes)
    stages: list[dict[bool, Front]] = [{False: Front(_column([0]), _column([0]), _column([0]))}]
    fronts: dict[_Weighed, tuple[dict[Ends, Front], list[Choice]]] = {}
    for call in weighed:
        if call not in fronts:
            fronts[call] = call.fronts(capacity - shared)
        stages.append(_merged(stages[-1], fronts[call][0], call.ends[0], capacity - shared))
    plain: list[Choice] = [None] * len(calls)
    all_plain = kept_bytes(calls, plain, sizes)
    least = min([all_plain, *(int(front.bytes[0]) + shared for front in stages[-1].values())])
    if all_plain <= capacity:
        return Solution(plain, least)
    if least > capacity:
        return Solution(None, least)
    # Costs fall along a list, so the cheapest that fits is the last
    ends = [(int(front.cost[-1]), int(front.bytes[-1]), last) for last, front in stages[-1].items()
            if int(front.bytes[0]) + shared <= capacity]  # fmt: skip
    held_last = min(ends)[2]
    return Solution(_traced_back(stages, [fronts[call][1] for call in weighed], held_last), least)


def _merged(sofar: dict[bool, Front], of_call: dict[Ends, Front], shared: int, capacity: int) -> dict[bool, Front]:
    parts: dict[bool, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for held_before, front in sofar.items():
        for (first, last), choices in of_call.items():
            twice = shared if held_before and first else 0
            parts.setdefault(last, []).append(_sums(front, choices, twice, held_before, capacity))
    merged = {}
    for last, several in parts.items():
        size, price, back = (torch.cat(column) for column in zip(*several, strict=True))
        merged[last] = _best(size, price, back, capacity)
    return merged


def _traced_back(stages: list[dict[bool, Front]], choices: list[list[Choice]], held_last: bool) -> list[Choice]:
    """What led to the last pair of the last list."""
    held, place, found = held_last, -1, []
    for stage, of_call in zip(reversed(stages[1:]), reversed(choices), strict=True):
        before, place_before, choice = stage[held].back[place].tolist()
        found.append(of_call[choice])
        held, place = bool(before), place_before
    return found[::-1]
