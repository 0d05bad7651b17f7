"""Warnings of the optimizer phase: skipped steps and healed masters, counted on the device and told without waiting."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

_INSIDE = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


def warn(message: str, category: type[Warning]) -> None:
    """warnings.warn at the line of the first caller outside halfstep and torch, however many wrappers lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class StepReports:
    """Takes each step's results and warns at the 1st, 2nd, 4th, 8th ... event in a row.

    Results on the CPU are read at once. Those of another device are read at the next step, when they have long been
    computed, so that no step waits for its own result.
    """

    def __init__(self) -> None:
        self.skips = 0  # in a row
        self.heals = 0  # steps in a row that healed something
        # in all; in the messages, so that Python's default filter does not take two events for one repeated
        self.every_skip = self.every_heal = 0
        self._pending: tuple[Tensor, Tensor, Tensor | None, list[str]] | None = None

    def add(self, skipped: Tensor, healed: Tensor, first_bad: Tensor | None, names: list[str]) -> None:
        """`names`: what to call the parameters that `first_bad` indexes."""
        self.flush()
        self._pending = (skipped, healed, first_bad, names)
        if skipped.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Reads what is pending."""
        if self._pending is None:
            return
        (skipped, healed, first_bad, names), self._pending = self._pending, None
        self.skips = self.skips + 1 if bool(skipped) else 0
        self.heals = self.heals + 1 if int(healed) else 0
        self.every_skip += self.skips > 0
        self.every_heal += self.heals > 0
        if _power_of_two(self.skips):
            index = -1 if first_bad is None else int(first_bad)
            culprit = f"the first non-finite gradient is that of {names[index]}" if index >= 0 else "found_inf was set"
            row = f"{self.skips} steps in a row were skipped" if self.skips > 1 else "this step was skipped"
            warn(
                f"halfstep: {row}, {self.every_skip} in all ({culprit}); weights and states are unchanged",
                RuntimeWarning,
            )
        if _power_of_two(self.heals):
            warn(
                f"halfstep: {int(healed)} weights were written by someone else since the last step "
                f"(seen {self.every_heal} times in all); their float32 masters were refreshed from them (call "
                "refresh_masters() after loading weights to do it silently)",
                RuntimeWarning,
            )


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
