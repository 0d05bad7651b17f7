"""The knapsack behind ByteBudget against trying every choice, and numbers of bytes as people write them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import halfstep as hs
from halfstep.activations import knapsack
from halfstep.activations.byte_size import format_bytes, parse_bytes
from halfstep.activations.knapsack import Call, Choice, Item

Model = tuple[list[Call], list[int]]  # calls, sizes of storages


def every_choice(call: Call) -> list[Choice]:
    places = range(len(call.items))
    return [None, *(frozenset(c) for n in range(len(places) + 1) for c in itertools.combinations(places, n))]


def tried(calls: Sequence[Call], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(bytes, cost) of all choices for all calls."""
    found = []
    for choices in itertools.product(*map(every_choice, calls)):
        found.append((knapsack.kept_bytes(calls, choices, sizes), total_cost(calls, choices)))
    return found


def total_cost(calls: Sequence[Call], choices: Sequence[Choice]) -> int:
    return sum(map(knapsack.cost, calls, choices))


def drawn_chain(rng: random.Random) -> Model:
    """Blocks that take the one before's result and a mask, which all save; anything else may be saved or not."""
    sizes: list[int] = []
    unit = rng.choice([1, 100_003])

    def new() -> int:
        sizes.append(rng.randint(1, 9) * unit + rng.randint(0, unit - 1))
        return len(sizes) - 1

    mask, x, calls = new(), new(), []
    for _ in range(rng.randint(1, 3)):
        made = [new() for _ in range(rng.randint(1, 4))]
        items = tuple(Item(frozenset([s]), rng.randint(1, 9)) for s in made)
        saved = {s for s in [*made, x] if rng.random() < 0.6} | {new() for _ in range(rng.randint(0, 2))}
        calls.append(Call(frozenset([x, mask]), frozenset(saved | {mask}), items, rng.randint(0, 3)))
        x = rng.choice(made)
    return calls, sizes


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_blocks_against_every_choice(seed, monkeypatch):
    monkeypatch.setattr(knapsack, "CELLS", 16)  # so few that thinning would show; these lists are too short for it
    rng = random.Random(seed)
    calls, sizes = drawn_chain(rng)
    tries = tried(calls, sizes)
    least = min(size for size, _ in tries)
    for capacity in {least - 1, least, *(rng.randint(1, sum(sizes)) for _ in range(5)), sum(sizes)}:
        solution = knapsack.solve(calls, sizes, capacity)
        assert solution.least == least
        if capacity < least:
            assert solution.choices is None
            continue
        assert solution.choices is not None
        assert knapsack.kept_bytes(calls, solution.choices, sizes) <= capacity
        assert total_cost(calls, solution.choices) == min(cost for size, cost in tries if size <= capacity)


def test_storages_that_some_blocks_share_never_break_the_capacity():
    """A storage that only some choices hold is counted always: maybe not the cheapest, but never too much."""
    for seed in range(20):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 9) for _ in range(12)]

        def some(n: int, rng: random.Random = rng) -> frozenset[int]:
            return frozenset(rng.sample(range(12), n))

        calls = [
            Call(some(2), some(3), tuple(Item(frozenset([s]), rng.randint(1, 9)) for s in some(2)), 1) for _ in range(3)
        ]
        tries = tried(calls, sizes)
        for capacity in range(1, sum(sizes) + 1, 11):
            solution = knapsack.solve(calls, sizes, capacity)
            if solution.choices is not None:
                assert knapsack.kept_bytes(calls, solution.choices, sizes) <= capacity
            everything = max(size for size, _ in tries)
            assert solution.choices is not None or capacity < everything


def identical_layers(layers: int) -> Model:
    """Each takes the one before's result of 2 bytes, makes 1, 3, 5 and its own result, and saves the first three."""
    sizes, calls = [2], []
    for layer in range(layers):
        a, b, c = (4 * layer + i for i in (1, 2, 3))
        sizes += [1, 3, 5, 2]
        result = 4 * layer + 4
        items = tuple(Item(frozenset([s]), cost) for s, cost in ((a, 4), (b, 7), (c, 9), (result, 1)))
        calls.append(Call(frozenset([4 * layer]), frozenset([a, b, c]), items, 2))
    return calls, sizes


def by_counts(layers: int, capacity: int) -> int:
    """The least cost over how many layers make each choice: layers are alike, so nothing but counts matters. A layer
    without a checkpoint does not hold its input, which nobody else does."""
    kinds = [(9, 0)]  # all that is saved
    for n in range(4):
        for kept in itertools.combinations([(1, 4), (3, 7), (5, 9)], n):
            kinds.append((2 + sum(size for size, _ in kept), 2 + 1 + 20 - sum(cost for _, cost in kept)))
    best = None
    for counts in itertools.combinations_with_replacement(kinds, layers):
        if sum(size for size, _ in counts) <= capacity:
            cost = sum(cost for _, cost in counts)
            best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@pytest.mark.parametrize("capacity", [8, 9, 13, 17, 22, 26, 31, 35, 36])
def test_identical_layers_against_every_count(capacity):
    """The results that are passed on cost 1 and take 2 in any case where the next layer is checkpointed, which the
    counts leave out: a solution may be cheaper by that, and the bound is met where it cannot."""
    calls, sizes = identical_layers(4)
    solution = knapsack.solve(calls, sizes, capacity)
    assert solution.choices is not None
    assert total_cost(calls, solution.choices) <= by_counts(4, capacity)
    assert total_cost(calls, solution.choices) == min(c for s, c in tried_quickly(calls, sizes) if s <= capacity)


def tried_quickly(calls: list[Call], sizes: list[int]) -> list[tuple[int, int]]:
    """As `tried`, call by call, without what costs more bytes for the same cost; who holds the last result matters."""
    found = {(0, 0, False): None}
    for place, call in enumerate(calls):
        following: dict[tuple[int, int, bool], None] = {}
        link_in, link_out = 4 * place, 4 * place + 4
        for (size, cost, before), choice in itertools.product(found, every_choice(call)):
            storages = knapsack.held(call, choice)
            added = sum(sizes[s] for s in storages if not (before and s == link_in))
            following[size + added, cost + knapsack.cost(call, choice), link_out in storages] = None
        found = following
    return [(size, cost) for size, cost, _ in found]


def test_thinned_lists_keep_the_capacity_and_come_close(monkeypatch):
    """20 layers of sizes without a common unit: the lists are too long to be merged in full. No choice costs less than
    Lagrange's bound, for any price of a byte: every item is recomputed or pays for its bytes, whichever is less."""
    rng = random.Random(0)
    sizes, calls = [], []
    for layer in range(20):
        sizes += [rng.randint(10_000, 90_000) for _ in range(9)]
        x, *made = range(9 * layer, 9 * layer + 9)
        items = tuple(Item(frozenset([s]), rng.randint(10_000, 90_000)) for s in made)
        calls.append(Call(frozenset([x]), frozenset([x, *made]), items, 0))
    capacity = sum(sizes) // 2
    monkeypatch.setattr(knapsack, "PAIRS", 2**10)
    monkeypatch.setattr(knapsack, "ROUGH", (2**10, 64))
    monkeypatch.setattr(knapsack, "CELLS", 1024)
    solution = knapsack.solve(calls, sizes, capacity)
    assert solution.choices is not None
    assert knapsack.kept_bytes(calls, solution.choices, sizes) <= capacity
    inputs = sum(sizes[::9])
    pairs = [(sum(sizes[s] for s in item.storages), item.cost) for call in calls for item in call.items]
    prices = [n / 100 for n in range(1, 300, 3)]
    bound = max(sum(min(cost, price * size) for size, cost in pairs) - price * (capacity - inputs) for price in prices)
    assert bound <= total_cost(calls, solution.choices) <= 1.01 * bound


def test_modes_and_devices_of_the_caller_do_not_reach_the_solver():
    from halfstep.activations.plan import make_plan
    from halfstep.activations.recorded import BlockCall, Operator

    operator = Operator((torch.ops.aten.mm.default, 0), "mm", 100, 10, (1,), True)
    call = BlockCall("block", frozenset([0]), {0, 1}, [operator], 1)
    with torch.device("meta"), hs.measure_activations() as measured:
        plan = make_plan([call], [5, 7], 8, 1.0)
    assert measured.peak == 0
    assert not isinstance(plan, int)
    assert (plan.bytes, plan.least, plan.most, plan.extra_flops, plan.extra_cost) == (5, 5, 12, 100, 110)


# ---- numbers of bytes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "size"),
    [(1, 1), (7.0, 7), ("512MB", 512_000_000), ("1.5GiB", 3 * 2**29), (" 2 kB ", 2000), ("2KB", 2000), ("64KiB", 65536),
     ("10 B", 10), (".5kB", 500), ("1TB", 10**12), ("0.1GB", 10**8), ("1MiB", 2**20), ("2TiB", 2**41)],
)  # fmt: skip
def test_numbers_of_bytes(written, size):
    assert parse_bytes(written, "n") == size


@pytest.mark.parametrize("wrong", ["512", "512 mb", "1.5.2GB", "GB", "-1GB", "1e3B", 0, -5, "0B", float("nan")])
def test_what_is_no_number_of_bytes(wrong):
    with pytest.raises(ValueError, match=r'n must be a number of bytes, at least 1, such as .*"1.5GiB".*; got '):
        parse_bytes(wrong, "n")


@pytest.mark.parametrize("wrong", [True, None, [1], torch.tensor(3), b"1GB"])
def test_what_is_of_another_type(wrong):
    with pytest.raises(TypeError, match=r"n must be a number of bytes, at least 1, .*; got "):
        parse_bytes(wrong, "n")


@pytest.mark.parametrize("fraction", [2.5, "1.5B", "0.0001kB"])
def test_fractions_of_bytes(fraction):
    with pytest.raises(ValueError, match=r"which is no whole number of bytes"):
        parse_bytes(fraction, "n")


def test_units_are_listed():
    with pytest.raises(ValueError, match=r"units: B, kB, MB, GB, TB, KB, KiB, MiB, GiB, TiB"):
        parse_bytes("3 megabytes", "n")


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_800_000, "12.8 MB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
     (5 * 10**15, "5000.0 TB")],
)  # fmt: skip
def test_shown_sizes(size, shown):
    assert format_bytes(size) == shown
