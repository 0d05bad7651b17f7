"""Which results to keep, so that recomputing the others costs least and what is kept fits: a multiple-choice knapsack.

Every call of a block is run without a checkpoint (it keeps what autograd saves and costs nothing), or with one: then it
keeps its inputs and the results of any of its operators, and the others' costs add up, since a recomputation runs all
that was not kept. Solved by lists of the (bytes, cost) pairs that no other pair beats, merged call by call, without
those that cannot lead to a better end than one that is known (Lagrange's bound: Fisher, Management Science 27, 1981).

Storages that several calls hold count once. The one that a call makes and the next takes as input is exact: lists are
kept apart by whether it is held. Any other storage that several calls hold (a mask, rotary angles) is counted once and
always, which is exact when each choice of some call holds it, and too much by that storage otherwise.

The cheapest choice is found unless a list would still be too long: merges of more than PAIRS pairs, and lists of one
call of more than CELLS, are thinned to the cheapest in each 1/CELLS of the capacity (pareto.py). What is chosen never
takes more than the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pareto import Front, Limits, best, column, subsets, sums

PAIRS = 2**21
CELLS = 4096
ROUGH = (2**14, 256)  # the same of a first solution, whose cost no better one passes on its way


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

    def fronts(self, limits: Limits) -> tuple[dict[Ends, Front], list[Choice]]:
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
            for size, price, more in subsets(free, Limits(limits.capacity - base, limits.pairs, limits.cells)):
                found.append((base + size, everything - spared - price, len(choices)))
                choices.append(frozenset(place for place in range(len(self.items)) if (more | bits) >> place & 1))
        fronts = {}
        for ends, found in pairs.items():
            size, price, back = (column(values) for values in zip(*found, strict=True))
            fronts[ends] = best(size, price, back, limits.capacity)
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
    plain: list[Choice] = [None] * len(calls)
    all_plain = kept_bytes(calls, plain, sizes)
    nothing = Limits(0, PAIRS, CELLS)  # of what does not fit, lists keep the smallest
    smallest = _merge_all(_chain(weighed, nothing)[0], nothing, None)[-1].values()
    least = min([all_plain, *(int(front.bytes[0]) + shared for front in smallest)])
    if all_plain <= capacity:
        return Solution(plain, least)
    if least > capacity:
        return Solution(None, least)
    limits = Limits(capacity - shared, PAIRS, CELLS)
    chain, choices = _chain(weighed, limits)
    rough = _merge_all(chain, Limits(limits.capacity, *ROUGH), None)
    stages = _merge_all(chain, limits, _bound(chain, limits.capacity, _cheapest(rough[-1], limits.capacity)[0]))
    return Solution(_traced_back(stages, choices, _cheapest(stages[-1], limits.capacity)[1]), least)


# The calls in order: the size of what each shares with the one before, and its lists by which ends they hold
Chain = Sequence[tuple[int, dict[Ends, Front]]]
# For each call, by whether its end is held: the pairs so far
Stages = list[dict[bool, Front]]


def _chain(weighed: Sequence[_Weighed], limits: Limits) -> tuple[Chain, list[list[Choice]]]:
    """The calls' lists, equal ones made once, and the choices that they name."""
    distinct = {call: call.fronts(limits) for call in dict.fromkeys(weighed)}
    return [(call.ends[0], distinct[call][0]) for call in weighed], [distinct[call][1] for call in weighed]


def _cheapest(front: dict[bool, Front], capacity: int) -> tuple[int, bool]:
    """The least cost that fits, and the list it ends; costs fall along a list, so it is the last."""
    fitting = [(int(f.cost[-1]), held) for held, f in front.items() if int(f.bytes[0]) <= capacity]
    return min(fitting)


@dataclass(frozen=True)
class _Bound:
    """No end of a pair costs less than cost + price x bytes + `rest`; beyond `most` a better one is known."""

    price: float
    rest: list[dict[bool, float]]  # behind each call, by whether its end is held
    most: float

    def promising(self, place: int, held: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """Which pairs of bytes and cost behind a call may lead to a better end."""
        most = self.most - self.rest[place][held]
        return lambda size, price: price.double() + self.price * size.double() <= most


def _bound(chain: Chain, capacity: int, known: int) -> _Bound:
    """With the price of a byte for which the bound is highest: more bytes than fit mean that it is too low."""
    low, high = 0.0, 1.0
    while _relaxed(chain, high)[1] > capacity and high < 1e18:
        low, high = high, 8 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _relaxed(chain, middle)[1] > capacity else (low, middle)
    # Float64: sums of costs and bytes are exact to some 1e-15
    slack = 1e-9 * (known + high * capacity) + 1
    return _Bound(high, _relaxed(chain, high)[0], known + high * capacity + slack)


def _relaxed(chain: Chain, price: float) -> tuple[list[dict[bool, float]], int]:
    """If bytes had a price and there were no capacity: the least that the calls behind each one then cost, by whether
    its end is held, and the bytes of all calls."""
    rest: list[dict[bool, float]] = [{False: 0.0, True: 0.0}]
    taken: list[dict[bool, int]] = [{False: 0, True: 0}]
    lists: dict[int, dict[Ends, tuple[float, int]]] = {}  # equal calls share theirs
    for shared, fronts in reversed(chain):
        if id(fronts) not in lists:
            lists[id(fronts)] = {ends: _least(front, price) for ends, front in fronts.items()}
        found: dict[bool, tuple[float, int]] = {}
        for held in (False, True):
            options = []
            for (first, last), (cost, size) in lists[id(fronts)].items():
                twice = shared if held and first else 0
                options.append((cost - price * twice + rest[-1][last], size - twice + taken[-1][last]))
            found[held] = min(options)
        rest.append({held: cost for held, (cost, _) in found.items()})
        taken.append({held: size for held, (_, size) in found.items()})
    return rest[-2::-1], taken[-1][False]


def _least(front: Front, price: float) -> tuple[float, int]:
    costs = front.cost.double() + price * front.bytes.double()
    place = costs.argmin()
    return float(costs[place]), int(front.bytes[place])


def _merge_all(chain: Chain, limits: Limits, bound: _Bound | None) -> Stages:
    stages: Stages = [{False: Front(column([0]), column([0]), column([0]))}]
    for place, (shared, fronts) in enumerate(chain):
        parts: dict[bool, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for held_before, front in stages[-1].items():
            for (first, last), choices in fronts.items():
                twice = shared if held_before and first else 0
                promising = None if bound is None else bound.promising(place, last)
                size, price, before, choice = sums(front, choices, twice, limits, promising)
                back = torch.stack([torch.full_like(before, held_before), before, choices.back[choice]], 1)
                parts.setdefault(last, []).append((size, price, back))
        stages.append({})
        for last, several in parts.items():
            size, price, back = (torch.cat(columns) for columns in zip(*several, strict=True))
            stages[-1][last] = best(size, price, back, limits.capacity)
    return stages


def _traced_back(stages: Stages, choices: list[list[Choice]], held_last: bool) -> list[Choice]:
    """What led to the last pair of the last list."""
    held, place, found = held_last, -1, []
    for stage, of_call in zip(reversed(stages[1:]), reversed(choices), strict=True):
        before, place_before, choice = stage[held].back[place].tolist()
        found.append(of_call[choice])
        held, place = bool(before), place_before
    return found[::-1]
