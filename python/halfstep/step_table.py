"""The rows of one optimizer's active parameters, by device, cached from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ops.layout import NARROW, check_tensor
from .ops.optimizer import AdamGroup, AdamRow, AdamStep, StepInputs, StepResult
from .shards import first_index, local, ranks

if TYPE_CHECKING:
    from .optim import FusedAdam


class StepTable:
    """The rows of one set of active parameters, grouped by device, ready to run again and again.

    Args:
        active: (group index, parameter) of every parameter with a gradient, in the optimizer's order.
        held: all their states, to notice replaced ones.
        flags: what else the rows depend on (each group's amsgrad).
    """

    def __init__(
        self, optimizer: FusedAdam, active: Sequence[tuple[int, Tensor]], held: list[Any], flags: list[bool]
    ) -> None:
        self.params = [p for _, p in active]
        self.held = held
        self.flags = flags
        position = {id(p): i for i, p in enumerate(chain.from_iterable(g["params"] for g in optimizer.param_groups))}
        every_name = optimizer.names()
        self.names = [every_name[position[id(p)]] for p in self.params]
        self.rows = [_row(optimizer, g, p, position[id(p)]) for g, p in active]
        self.any_narrow = any(row.param.dtype in NARROW for row in self.rows)
        self.many_ranks = any(ranks(p) > 1 for p in self.params)
        by_device: dict[torch.device, list[int]] = {}
        for i, row in enumerate(self.rows):
            by_device.setdefault(row.param.device, []).append(i)
        self._places = list(by_device.values())
        self._steps = [
            AdamStep([self.rows[i] for i in place], optimizer.backend, stochastic_weight=optimizer.stochastic_rounding)
            for place in self._places
        ]

    def matches(self, params: list[Tensor], held: list[Any], flags: list[bool]) -> bool:
        """True if these are the same parameters and states, where they were."""
        return (
            flags == self.flags
            and len(params) == len(self.params)
            and len(held) == len(self.held)
            and all(map(is_, params, self.params))
            and all(map(is_, held, self.held))
            and not any(step.stale() for step in self._steps)
        )

    def set_grads(self, grads: list[Tensor]) -> None:
        for i, grad in enumerate(grads):
            check_tensor(grad, f"the gradient of {self.names[i]}")
        for place, step in zip(self._places, self._steps, strict=True):
            step.set_grads([grads[i] for i in place])

    def run(self, groups: list[AdamGroup], inputs: StepInputs, forced: str | None) -> tuple[StepResult, Tensor | None]:
        """The step on every device; (the result, the first non-finite gradient's index in `names` or None)."""
        first_bad = None
        if inputs.skip_nonfinite or inputs.max_norm is not None:
            if self.many_ranks:
                raise RuntimeError(
                    "this version cannot reduce the gradient norm and the overflow flag over the ranks of a DTensor mesh; "
                    "clip beforehand and build the optimizer with skip_nonfinite=False and max_grad_norm=None"
                )
            total, first_bad = self._stats(inputs.scale, forced)
            inputs = inputs._replace(sum_squares=total, first_bad=first_bad)
        results = [step.update(groups, _on(inputs, step)) for step in self._steps]
        healed = sum((r.healed.to(results[0].healed.device) for r in results[1:]), results[0].healed)
        return results[0]._replace(healed=healed), first_bad

    def _stats(self, scale: Tensor | None, forced: str | None) -> tuple[Tensor, Tensor]:
        found = [step.grad_stats(scale, forced) for step in self._steps]
        if len(found) == 1:
            return found[0]
        total = torch.stack([total.cpu() for total, _ in found]).cumsum(0)[-1]  # devices in order of appearance
        bad = [place[int(i)] for (_, i), place in zip(found, self._places, strict=True) if int(i) >= 0]
        return total, torch.tensor(min(bad, default=-1))


def _on(inputs: StepInputs, step: AdamStep) -> StepInputs:
    device = step.rows[0].param.device
    return StepInputs(*(v.to(device) if isinstance(v, Tensor) else v for v in inputs))


def _row(optimizer: FusedAdam, group: int, param: Tensor, position: int) -> AdamRow:
    state = optimizer.state[param]
    master = state.get("master", state.get("remainder"))
    amsgrad = optimizer.param_groups[group]["amsgrad"]
    return AdamRow(
        param=local(param),  # not detached: a new .data must show, so that stale() sees it
        exp_avg=local(state["exp_avg"]),
        exp_avg_sq=local(state["exp_avg_sq"]),
        max_exp_avg_sq=local(state["max_exp_avg_sq"]) if amsgrad else None,
        master=None if master is None else local(master),
        step=state["step"],
        group=group,
        param_id=position,
        first_index=first_index(param) or 0,
    )
