"""What an Adam or AdamW with masters has to do, on plain lists: the oracle of test_state_machine.py.

Only halfstep.reference computes here; the rules of the optimizer (who takes part in a step, when it is skipped, which
states exist, what a checkpoint brings) are written down once more, so that none of its host code is its own judge.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from bits import bits
from torch import Tensor

from halfstep.reference import (
    AdamGroup,
    clip_coefficient,
    grad_stats,
    join_master,
    round_to,
    split_master,
    unscale_,
    update_,
)

NARROW = (torch.bfloat16, torch.float16)


@dataclass
class Member:
    """A parameter: contiguous tensors, whatever the layout of the real one."""

    weight: Tensor
    grad: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)  # empty until a step takes it along


@dataclass
class Group:
    members: list[Member]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    master: str | None  # a mode, not loaded from a checkpoint, as the next
    state_dtype: torch.dtype

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "members"}

    def kept(self, weight: Tensor) -> str | None:
        """What a weight keeps beside itself."""
        if weight.dtype not in NARROW or self.master is None:
            return None
        return "remainder" if self.master == "split" else "master"

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0)}
        state.update({key: torch.zeros(weight.shape, dtype=self.state_dtype) for key in self.moments})
        kept = self.kept(weight)
        if kept == "master":
            state["master"] = weight.float()
        elif kept == "remainder":
            state["remainder"] = torch.zeros(weight.shape, dtype=torch.int16)
        return state


class Row(NamedTuple):
    position: int  # in the whole optimizer
    name: str
    member: Member
    group: Group


@dataclass
class Checkpoint:
    """Hyper-parameters of every group, and the states of its members."""

    groups: list[dict[str, Any]]
    states: list[list[dict[str, Tensor]]]


_LOADED = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


@dataclass
class ReferenceOptimizer:
    groups: list[Group]
    decoupled: bool
    stochastic_rounding: bool
    seed: int
    max_grad_norm: float | None
    skip_nonfinite: bool | None
    on_stale: str

    norm: float = math.nan  # of the last step, as the next two
    skipped: bool = False
    healed: int = 0
    skips_in_a_row: int = 0
    heals_in_a_row: int = 0

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]

    def _rows(self) -> list[Row]:
        rows = []
        for g, group in enumerate(self.groups):
            for i, member in enumerate(group.members):
                rows.append(Row(len(rows), f"parameter {i} of group {g}", member, group))
        return rows

    # ---- step ------------------------------------------------------------------------------------------------------
    def step(self, scale: float | None = None, found_inf: bool | None = None) -> list[str]:
        """One step; returns what it has to warn of: the 1st, 2nd, 4th, 8th ... skip or heal in a row."""
        rows = [row for row in self._rows() if row.member.grad is not None]
        self.norm, self.skipped, self.healed = math.nan, False, 0
        if not rows:
            return []
        for row in rows:
            _complete(row.member, row.group)
        scaled = scale is not None or found_inf is not None
        checked = self.skip_nonfinite
        if checked is None or scaled:
            narrow = any(row.member.weight.dtype in NARROW for row in rows)
            checked = scaled or self.max_grad_norm is not None or narrow
        bad = -1
        if checked or self.max_grad_norm is not None:
            inverse = 1.0 if scale is None else _float32(1.0 / scale)
            sum_squares, first = grad_stats([row.member.grad for row in rows], inverse)
            self.norm, bad = math.sqrt(sum_squares), int(first)
        self.skipped = bool(found_inf) or (checked and bad >= 0)
        if not self.skipped:
            self._update(rows, scale)
        culprit = "found_inf was set" if bad < 0 else f"that of {rows[bad].name} "
        return self._reports(culprit)

    def _update(self, rows: list[Row], scale: float | None) -> None:
        factor = None
        if scale is not None or self.max_grad_norm is not None:
            limit = self.max_grad_norm
            coefficient = 1.0 if limit is None else float(clip_coefficient(self.norm, limit))
            factor = _float32(coefficient / (scale or 1.0))
        for position, _, member, group in rows:
            state = member.state
            t = int(state["step"]) + 1
            healed = update_(
                member.weight, member.grad, state["exp_avg"], state["exp_avg_sq"],
                state["max_exp_avg_sq"] if group.amsgrad else None, state.get(group.kept(member.weight) or ""),
                group=AdamGroup(
                    group.lr, *group.betas, group.eps, group.weight_decay, self.decoupled, group.maximize
                ),
                t=t, grad_factor=factor, seed=self.seed, param_id=position,
                stochastic=self.stochastic_rounding, heal=self.on_stale == "refresh",
            )  # fmt: skip
            state["step"] = torch.tensor(t)
            self.healed += int(healed)

    def _reports(self, culprit: str) -> list[str]:
        self.skips_in_a_row = self.skips_in_a_row + 1 if self.skipped else 0
        self.heals_in_a_row = self.heals_in_a_row + 1 if self.healed else 0
        told = [culprit] if _power_of_two(self.skips_in_a_row) else []
        if _power_of_two(self.heals_in_a_row):
            told.append(f"{self.healed} weights were written by someone else")
        return told

    # ---- state -----------------------------------------------------------------------------------------------------
    def refresh_masters(self) -> None:
        for member in self.members:
            if "master" in member.state:
                member.state["master"] = member.weight.float().clone()
            if "remainder" in member.state:
                member.state["remainder"] = torch.zeros(member.weight.shape, dtype=torch.int16)

    def save(self) -> Checkpoint:
        return Checkpoint(
            [{key: getattr(group, key) for key in _LOADED} for group in self.groups],
            copy.deepcopy([[member.state for member in group.members] for group in self.groups]),
        )

    def fits(self, saved: Checkpoint) -> bool:
        return [len(group.members) for group in self.groups] == [len(states) for states in saved.states]

    def load(self, saved: Checkpoint) -> list[str]:
        """Returns what it has to warn of."""
        told = []
        for group, values in zip(self.groups, saved.groups, strict=True):
            for key, value in values.items():
                setattr(group, key, value)
        for row, state in zip(self._rows(), chain.from_iterable(saved.states), strict=True):
            why_not = _load(row.member, state, row.group)
            told += [f"{row.name} .*: {why_not}"] if why_not else []
        return told

    def forget(self) -> None:
        """What a copy does not have: gradients, results, reports."""
        self.norm, self.skipped, self.healed = math.nan, False, 0
        self.skips_in_a_row = self.heals_in_a_row = 0
        for member in self.members:
            member.grad = None


@dataclass
class ReferenceScaler:
    """A dynamic loss scale in plain numbers."""

    scale: float
    growth_interval: int
    hysteresis: int
    max_scale: float
    clean: int = 0
    tolerance: int = 0

    def __post_init__(self) -> None:
        self.tolerance = self.hysteresis

    def update(self, found: bool) -> None:
        if found:
            self.clean, self.tolerance = 0, max(self.tolerance - 1, 0)
            self.scale = max(self.scale / 2, 1.0) if self.tolerance == 0 else self.scale
            return
        self.clean += 1
        if self.clean == self.growth_interval:
            self.clean, self.tolerance = 0, self.hysteresis
            self.scale = min(self.scale * 2, self.max_scale)

    def unscale_(self, grads: list[Tensor]) -> bool:
        """In place; whether something is not finite afterwards."""
        return int(unscale_(grads, _float32(1.0 / self.scale))) >= 0


def _complete(member: Member, group: Group) -> None:
    """The states a step needs; a parameter that changed its dtype loses the old dtype's master."""
    wanted = ("step", *_MOMENTS, group.kept(member.weight))
    state = {key: value for key, value in member.state.items() if key in wanted}
    member.state = {**group.new_state(member.weight), **state}


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _load(member: Member, saved: dict[str, Tensor], group: Group) -> str | None:
    """The saved state in the group's modes; returns why the saved master is not taken."""
    if not saved:
        member.state = {}
        return None
    member.state = state = group.new_state(member.weight)
    state["step"] = saved["step"].clone()
    for key in group.moments:
        if key in saved:
            state[key] = round_to(saved[key].float(), group.state_dtype).clone()
    kept, weight = group.kept(member.weight), member.weight
    if kept is None or not {"master", "remainder"} & saved.keys():
        return None
    if "master" in saved:
        wide = saved["master"]
        if not torch.equal(bits(round_to(wide, weight.dtype)), bits(weight)):
            return "the saved master does not round to the weight"
    else:
        if weight.dtype is not torch.bfloat16:
            return "the saved remainder is torch.int16 for a torch.float16 weight"
        wide = join_master(weight, saved["remainder"])
    if kept == "master":
        state["master"], member.weight = wide.clone(), round_to(wide, weight.dtype)
    else:
        member.weight, state["remainder"] = split_master(wide)
    return None


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
