"""Warnings of the optimizer phase: skipped steps and healed masters, counted on the device and told without waiting."""

from __future__ import annotations

import warnings

from torch import Tensor


class StepReports:
    """Takes each step's results and warns at the 1st, 2nd, 4th, 8th ... event in a row.

    Results on the CPU are read at once. Those of another device are read at the next step, when they have long been
    computed, so that no step waits for its own result.
    """

    def __init__(self) -> None:
        self.skips = 0  # in a row
        self.heals = 0  # steps in a row that healed something
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
        if _power_of_two(self.skips):
            index = -1 if first_bad is None else int(first_bad)
            culprit = f"the first non-finite gradient is that of {names[index]}" if index >= 0 else "found_inf was set"
            row = f"{self.skips} steps in a row were skipped" if self.skips > 1 else "this step was skipped"
            warnings.warn(f"halfstep: {row} ({culprit}); weights and states are unchanged", RuntimeWarning, stacklevel=5)
        if _power_of_two(self.heals):
            warnings.warn(
                f"halfstep: {int(healed)} weights were written by someone else since the last step; their float32 masters "
                "were refreshed from them (call refresh_masters() after loading weights to do it silently)",
                RuntimeWarning,
                stacklevel=5,
            )


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
