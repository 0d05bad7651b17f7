"""Warnings of the optimizer phase: skipped steps, healed masters, a loss scale that can shrink no further.

What they tell is read when it has reached the host, at once on the CPU and at a later step on other devices, so that no
step waits for its own result.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .outcomes import HostCopy, StepOutcome

_INSIDE = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


def warn(message: str, category: type[Warning]) -> None:
    """warnings.warn at the line of the first caller outside halfstep and torch, however many wrappers lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def parameter_names(param_groups: Sequence[dict[str, Any]]) -> list[str]:
    """One name per parameter of an optimizer, in order: the user's (named parameters), or its place; and its shape."""
    names = []
    for g, group in enumerate(param_groups):
        for i, param in enumerate(group["params"]):
            given = group.get("param_names")
            label = repr(given[i]) if given else f"{i} of group {g}"
            names.append(f"parameter {label} (shape {tuple(param.shape)}, {param.dtype})")
    return names


class _Row:
    """Events in a row. Those in all are in the messages too: Python's default filter shows one text only once."""

    def __init__(self) -> None:
        self.length = self.in_all = 0

    def is_told(self, happened: bool) -> bool:
        """Counts one step; True at the 1st, 2nd, 4th, 8th ... event in a row."""
        self.length = self.length + 1 if happened else 0
        self.in_all += happened
        return happened and self.length & (self.length - 1) == 0


class StepReports:
    """Takes each step's outcome and warns of skips and of healed masters at the 1st, 2nd, 4th, 8th ... in a row."""

    def __init__(self) -> None:
        self._skips, self._heals = _Row(), _Row()
        self._pending: deque[StepOutcome] = deque()

    def add(self, outcome: StepOutcome) -> None:
        """Tells what is known by now, which on the CPU is all. Asks nothing while a CUDA graph is captured."""
        if outcome.captured:
            return
        self._pending.append(outcome)
        while self._pending and self._pending[0].ready():
            self._tell(self._pending.popleft())

    def flush(self) -> None:
        """Waits for what is pending."""
        while self._pending:
            self._tell(self._pending.popleft())

    def _tell(self, outcome: StepOutcome) -> None:
        skips, heals, healed = self._skips, self._heals, outcome.healed()
        skip_is_told, heal_is_told = skips.is_told(outcome.was_skipped()), heals.is_told(healed > 0)
        if skip_is_told:
            row = f"{skips.length} steps in a row were skipped" if skips.length > 1 else "a step was skipped"
            warn(
                f"halfstep: {row}, {skips.in_all} in all ({_cause([outcome])}); weights and states are unchanged",
                RuntimeWarning,
            )
        if heal_is_told:
            warn(
                f"halfstep: {healed} weights were written by someone else since the last step "
                f"(seen {heals.in_all} times in all); their float32 masters were refreshed from them (call "
                "refresh_masters() after loading weights to do it silently)",
                RuntimeWarning,
            )


class FloorReports:
    """Warns when steps overflow though the loss scale is at its minimum: once, until the scale has left it."""

    def __init__(self, min_scale: float) -> None:
        self._min_scale = min_scale
        self._told = False
        self._pending: deque[tuple[HostCopy, list[StepOutcome]]] = deque()

    def add(self, floor: Tensor, outcomes: list[StepOutcome]) -> None:
        """`floor`: what LossScale.learn() returned. `outcomes`: the steps it learned from, none of them captured."""
        self._pending.append((HostCopy(floor), outcomes))
        while self._pending and self._pending[0][0].ready():
            self._tell(*self._pending.popleft())

    def flush(self) -> None:
        """Waits for what is pending."""
        while self._pending:
            self._tell(*self._pending.popleft())

    def _tell(self, floor: HostCopy, outcomes: list[StepOutcome]) -> None:
        ((stuck, left),) = floor.values()
        if left:
            self._told = False
        elif stuck and not self._told:
            self._told = True
            warn(
                f"halfstep: the loss scale is at its minimum, {self._min_scale:g}, and gradients still overflow "
                f"({_cause(outcomes)}): they are too large for their dtype, or the loss is not finite",
                RuntimeWarning,
            )


def _cause(outcomes: Sequence[StepOutcome]) -> str:
    culprit = next(filter(None, (outcome.culprit() for outcome in outcomes)), None)
    return "found_inf was set" if culprit is None else f"the first non-finite gradient is that of {culprit}"
