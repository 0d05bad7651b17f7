"""What a ByteBudget decided: for each call of a block which results are kept, and what that takes and costs."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import knapsack
from .byte_size import format_bytes
from .recorded import BlockCall, Operator, OperatorKey


@dataclass(frozen=True)
class BlockPlan:
    """One call of one block.

    Attributes:
        name: the block's in the model.
        checkpointed: False = it runs as without hs.checkpoint.
        kept: names of the operators whose results are kept, in order; empty = its inputs alone.
        kept_bytes: bytes of each one's results.
        recomputed: names of those that run again in backward and make something.
        bytes: what it holds for backward, storages that it shares with other blocks included.
        extra_flops: of what runs again.
        transient_bytes: what its recomputation makes for backward, gone with the block's backward.
    """

    name: str
    checkpointed: bool
    kept: tuple[str, ...]
    kept_bytes: tuple[int, ...]
    recomputed: tuple[str, ...]
    bytes: int
    extra_flops: int
    transient_bytes: int
    keys: frozenset[OperatorKey]  # of the kept results

    def words(self) -> str:
        """What is kept, for people: results below 1 % of the block's bytes are only counted."""
        if not self.checkpointed:
            return "what autograd saves"
        kept, again, sizes = Counter(self.kept), Counter(self.recomputed), Counter[str]()
        for name, size in zip(self.kept, self.kept_bytes, strict=True):
            sizes[name] += size
        large = {name: n for name, n in kept.items() if 100 * sizes[name] >= self.bytes}
        some = [f"{name} {n} of {n + again[name]}" if n + again[name] > 1 else name for name, n in large.items()]
        small = kept.total() - sum(large.values())
        return ", ".join(["inputs", *some, *([f"{small} small result{'s' * (small > 1)}"] if small else [])])


@dataclass(frozen=True)
class Plan:
    """What the blocks of one forward keep under a budget; `print(plan)` shows it as a table.

    Attributes:
        budget: bytes that may be kept.
        bytes: bytes that are kept between forward and backward, each storage once. The parameters and the model's own
            inputs do not count.
        least: bytes of the choice that keeps fewest.
        most: bytes without any checkpoint.
        extra_flops: FLOPs that run again in backward.
        forward_flops: FLOPs of the blocks' forward.
        transient_bytes: the most that one block's recomputation makes for its backward, beside `bytes`.
        blocks: a BlockPlan for each call of a block, in the forward's order.
    """

    budget: int
    bytes: int
    least: int
    most: int
    extra_flops: int
    extra_cost: int
    forward_flops: int
    transient_bytes: int
    blocks: tuple[BlockPlan, ...]

    @property
    def extra_share(self) -> float:
        """FLOPs that run again, as a share of the blocks' forward; 0.5 of a forward is a sixth of a training step."""
        return self.extra_flops / self.forward_flops if self.forward_flops else 0.0

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="none")
        for heading in ("blocks", "each keeps", "bytes each", "GFLOP again"):
            table.add_column(heading, justify="left" if heading in ("blocks", "each keeps") else "right")
        for first, last, block in self._runs():
            names = first if first == last else f"{first} to {last}"
            table.add_row(names, block.words(), format_bytes(block.bytes), f"{block.extra_flops / 1e9:.3g}")
        out = io.StringIO()
        Console(file=out, width=100, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in [*self._summary(), *out.getvalue().splitlines()])

    def _summary(self) -> list[str]:
        return [
            f"{format_bytes(self.bytes)} kept of a budget of {format_bytes(self.budget)} "
            f"(least {format_bytes(self.least)}, without checkpoints {format_bytes(self.most)})",
            f"{self.extra_share:.1%} of the blocks' forward runs again; {format_bytes(self.transient_bytes)} more "
            "while one block does",
        ]

    def _runs(self) -> list[tuple[str, str, BlockPlan]]:
        """Neighbours that do the same, as (first name, last name, what each does)."""
        runs: list[tuple[str, str, BlockPlan]] = []
        for block in self.blocks:
            if runs and _same(runs[-1][2], block):
                runs[-1] = (runs[-1][0], block.name, block)
            else:
                runs.append((block.name, block.name, block))
        return runs


def _same(a: BlockPlan, b: BlockPlan) -> bool:
    return (a.words(), a.bytes, a.extra_flops) == (b.words(), b.bytes, b.extra_flops)


def make_plan(calls: Sequence[BlockCall], sizes: Sequence[int], budget: int, flops_per_byte: float) -> Plan | int:
    """The cheapest plan that fits, or the fewest bytes that any plan keeps if none does."""
    items = [_candidates(call, flops_per_byte) for call in calls]
    problem = [_weighed(call, kept, flops_per_byte) for call, kept in zip(calls, items, strict=True)]
    # In a thread of its own, where no mode of the caller (a default device, a FLOP counter) sees what the solver does
    with ThreadPoolExecutor(1) as pool:
        solution = pool.submit(knapsack.solve, problem, sizes, budget).result()
    if solution.choices is None:
        return solution.least
    blocks = tuple(map(_block_plan, calls, items, solution.choices, [sizes] * len(calls)))
    return Plan(
        budget=budget,
        bytes=knapsack.kept_bytes(problem, solution.choices, sizes),
        least=solution.least,
        most=knapsack.kept_bytes(problem, [None] * len(calls), sizes),
        extra_flops=sum(block.extra_flops for block in blocks),
        extra_cost=sum(map(knapsack.cost, problem, solution.choices)),
        forward_flops=sum(operator.flops for call in calls for operator in call.operators),
        transient_bytes=max((block.transient_bytes for block in blocks), default=0),
        blocks=blocks,
    )


def _cost(operator: Operator, flops_per_byte: float) -> int:
    return operator.flops + round(operator.moved * flops_per_byte)


def _candidates(call: BlockCall, flops_per_byte: float) -> list[Operator]:
    """Operators whose results are worth keeping, if there is room."""
    return [o for o in call.rerun() if o.keepable and _cost(o, flops_per_byte)]


def _weighed(call: BlockCall, candidates: Sequence[Operator], flops_per_byte: float) -> knapsack.Call:
    everything = sum(_cost(o, flops_per_byte) for o in call.rerun())
    items = tuple(knapsack.Item(frozenset(o.made), _cost(o, flops_per_byte)) for o in candidates)
    fixed = everything - sum(item.cost for item in items)
    return knapsack.Call(call.inputs, frozenset(call.saved), items, fixed)


def _block_plan(
    call: BlockCall, candidates: Sequence[Operator], choice: knapsack.Choice, sizes: Sequence[int]
) -> BlockPlan:
    if choice is None:
        return BlockPlan(call.name, False, (), (), (), _total(call.saved, sizes), 0, 0, frozenset())
    kept = [candidates[place] for place in sorted(choice)]
    keys = frozenset(operator.key for operator in kept)
    again = [operator for operator in call.rerun() if operator.key not in keys]
    held = call.inputs.union(*(operator.made for operator in kept))
    return BlockPlan(
        name=call.name,
        checkpointed=True,
        kept=tuple(operator.name for operator in kept),
        kept_bytes=tuple(_total(operator.made, sizes) for operator in kept),
        recomputed=tuple(operator.name for operator in again if operator.made),
        bytes=_total(held, sizes),
        extra_flops=sum(operator.flops for operator in again),
        transient_bytes=_total(frozenset(call.saved) - held, sizes),
        keys=keys,
    )


def _total(numbers: Any, sizes: Sequence[int]) -> int:
    return sum(sizes[number] for number in numbers)
