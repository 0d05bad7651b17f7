"""The rows of one optimizer's active parameters, by device, cached from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .hyper import groups_on
from .ops import devices
from .ops.layout import NARROW
from .ops.optimizer import AdamGroup, AdamRow, AdamStep, StepInputs, StepResult
from .ops.overlap import check_writable
from .outcomes import first_of_all
from .shards import first_index, is_sharded, local, ranks
from .state_map import BorrowedStates, StateMap

if TYPE_CHECKING:
    from .fused_adam import FusedAdam


class StepTable:
    """The rows of one set of active parameters, grouped by device, ready to run again and again.

    Args:
        params, names: all parameters of the optimizer, in order. missing: which of them have no gradient now.
        held: every state of the optimizer in one list, to notice what is replaced.
        modes: whatever else the rows were made from.
    """

    def __init__(
        self, optimizer: FusedAdam, params: list[Tensor], names: list[str], missing: list[bool], held: list[Any],
        modes: list[Any],
    ) -> None:  # fmt: skip
        self._params, self._missing, self._held, self._modes = params, missing, held, modes
        groups = [g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._active = [i for i, none in enumerate(missing) if not none]
        self.names = [names[i] for i in self._active]
        self._sharded = [i for i in self._active if is_sharded(params[i])]
        self._locals = [local(params[i]) for i in self._sharded]
        rows = [_row(optimizer, groups[i], params[i], i) for i in self._active]
        _check_memory(rows, self.names)
        self.any_narrow = any(row.param.dtype in NARROW for row in rows)
        self._many_ranks = any(ranks(params[i]) > 1 for i in self._sharded)
        by_device: dict[torch.device, list[int]] = {}
        for k, row in enumerate(rows):
            by_device.setdefault(row.param.device, []).append(k)
        self._places = list(by_device.values())
        self._steps = [
            AdamStep(
                [rows[k] for k in place],
                [self.names[k] for k in place],
                optimizer.backend,
                stochastic_weight=optimizer.stochastic_rounding,
            )
            for place in self._places
        ]
        self._quick = False

    def __bool__(self) -> bool:
        return bool(self._active)

    def belongs(self, params: list[Tensor], held: list[Any], modes: list[Any]) -> bool:
        """True if the optimizer still has these parameters and states. Otherwise the table only keeps memory alive."""
        return (
            modes == self._modes
            and len(params) == len(self._params)
            and len(held) == len(self._held)
            and all(map(is_, params, self._params))
            and all(map(is_, held, self._held))
        )

    def fits(self, params: list[Tensor], missing: list[bool]) -> bool:
        """True if the same of these parameters have a gradient and every tensor is where it was."""
        return (
            missing == self._missing
            and all(local(params[i]) is part for i, part in zip(self._sharded, self._locals, strict=True))
            and not any(step.stale() for step in self._steps)
        )

    def replaced_by(self, other: StepTable) -> bool:
        """True if both are for the same gradients."""
        return self._missing == other._missing

    def settle(self, params: list[Tensor], state: StateMap | BorrowedStates) -> None:
        """Remembers, after a close look, what `ready` may take for granted until somebody gets hold of a state."""
        self._state, self._changes, self._handed_out = state, state.changes, len(state.handed_out)
        rows = [-1] * len(params)
        for row, i in enumerate(self._active):
            rows[i] = row
        handed_out = (state.own_state(param) for param in state.handed_out if param in state)
        looked_at = [held for held in handed_out if isinstance(held, dict)]  # torch.optim allows other entries
        self._quick = len(self._steps) == 1 and not self._sharded and self._steps[0].watch(params, rows, looked_at)

    def ready(self, params: list[Tensor], modes: list[Any], state: StateMap | BorrowedStates) -> bool:
        """True in the usual case: nothing has changed, and the gradients are set. False only says: look closely."""
        return (
            self._quick
            and state is self._state
            and state.changes == self._changes
            and len(state.handed_out) == self._handed_out
            and modes == self._modes
            and self._steps[0].read(params)
        )

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of all parameters, in order; None where there is none."""
        active = [g for g in grads if g is not None]
        if self._sharded:
            active = [local(g) for g in active]
        if len(self._steps) == 1:
            self._steps[0].set_grads(active)
            return
        for place, step in zip(self._places, self._steps, strict=True):
            step.set_grads([active[k] for k in place])

    def drop_grads(self) -> None:
        for step in self._steps:
            step.drop_grads()

    def captures(self) -> bool:
        """True while steps are recorded in a CUDA graph; RuntimeError if this one cannot be."""
        if not any(devices.is_capturing(step.device) for step in self._steps):
            return False
        if len(self._steps) > 1:
            raise RuntimeError(
                f"a step over {len(self._steps)} devices waits for all of them, so no CUDA graph can capture it; use "
                "an optimizer for each device, without clipping and overflow check across them"
            )
        self._steps[0].check_capturable()
        return True

    def run(self, groups: list[AdamGroup], inputs: StepInputs) -> tuple[StepResult, Tensor | None]:
        """The step on every device; (the result, the first non-finite gradient's index in `names` or None)."""
        with_stats = inputs.skip_nonfinite or inputs.max_norm is not None
        if with_stats and self._many_ranks:
            raise RuntimeError(
                "this version cannot reduce the gradient norm and the overflow flag over the ranks of a DTensor "
                "mesh; clip beforehand and build the optimizer with skip_nonfinite=False and max_grad_norm=None"
            )
        if len(self._steps) == 1:
            step = self._steps[0]
            return step.run(groups_on(groups, step.device), _on(inputs, step.device), with_stats)
        return self._run_on_each(groups, inputs, with_stats)

    def _run_on_each(
        self, groups: list[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        """Waits for every device: none may update before the gradients of all have been looked at."""
        first_bad = None
        if with_stats:
            found = [step.grad_stats(_on(inputs, step.device).scale) for step in self._steps]
            total = torch.stack([total.cpu() for total, _ in found]).cumsum(0)[-1]  # devices in order of appearance
            first_bad = first_of_all([first_bad for _, first_bad in found], self._places)
            inputs = inputs._replace(sum_squares=total, first_bad=first_bad)
        results = [step.update(groups_on(groups, step.device), _on(inputs, step.device)) for step in self._steps]
        healed = sum((r.healed.to(results[0].healed.device) for r in results[1:]), results[0].healed)
        return results[0]._replace(healed=healed), first_bad


def _on(inputs: StepInputs, device: torch.device) -> StepInputs:
    """With its tensors on the device of the rows, of the dtypes that kernels read."""
    scale, found_inf, total, first_bad = inputs.scale, inputs.found_inf, inputs.sum_squares, inputs.first_bad
    if found_inf is not None and found_inf.dtype is not torch.float32:
        found_inf = found_inf > 0  # a float64 may be too small for float32
    return inputs._replace(
        scale=None if scale is None else devices.scalar_on(scale, device, torch.float32, "grad_scale"),
        found_inf=None if found_inf is None else devices.scalar_on(found_inf, device, torch.float32, "found_inf"),
        sum_squares=None if total is None else devices.scalar_on(total, device, torch.float64, "sum_squares"),
        first_bad=None if first_bad is None else devices.scalar_on(first_bad, device, torch.int64, "first_bad"),
    )


def _check_memory(rows: list[AdamRow], names: list[str]) -> None:
    """One tensor that is the state of two parameters (a shared step) would be updated by both."""
    found = [
        (t, f"a state of {name}") for row, name in zip(rows, names, strict=True) for t in row[1:6] if t is not None
    ]
    check_writable([t for t, _ in found], [label for _, label in found])


def _row(optimizer: FusedAdam, group: int, param: Tensor, position: int) -> AdamRow:
    state = optimizer.own_states().own_state(param)
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
