"""The loss scale and its rule: when it grows, when it shrinks, and the bounds it never leaves.

The scale lives on the loss's device and moves there: learning from a step waits for nothing.
"""

from __future__ import annotations

from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import devices

_FLOAT32 = torch.finfo(torch.float32)


class Pace(NamedTuple):
    """How fast the scale moves: by which factors, and after how many clean steps it grows."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int

    def checked(self) -> Pace:
        """Itself; ValueError if a number is out of range."""
        if not self.growth_factor >= 1 or not 0 < self.backoff_factor <= 1 or self.growth_interval < 1:
            raise ValueError(
                "expected growth_factor >= 1, backoff_factor in (0, 1] and growth_interval >= 1, got "
                f"{self.growth_factor}, {self.backoff_factor} and {self.growth_interval}"
            )
        return self


class _Numbers(NamedTuple):
    scale: float
    clean_steps: int  # since the last overflow or growth
    tolerance: int  # overflows left before the scale shrinks


class LossScale:
    """A loss scale and the rule it follows; arguments as those of `LossScaler`."""

    def __init__(
        self, device: torch.device | None, init_scale: float, pace: Pace, *, hysteresis: int, min_scale: float,
        max_scale: float,
    ) -> None:  # fmt: skip
        if not _FLOAT32.tiny <= min_scale <= init_scale <= max_scale <= _FLOAT32.max:
            raise ValueError(
                f"expected {_FLOAT32.tiny:.4g} <= min_scale <= init_scale <= max_scale <= {_FLOAT32.max:.4g} (normal "
                f"float32 numbers), got {min_scale}, {init_scale}, {max_scale}"
            )
        self.pace = pace.checked()
        if hysteresis < 1 or hysteresis % 1 != 0:  # of inf and NaN the remainder is NaN
            raise ValueError(f"hysteresis={hysteresis}: expected an integer >= 1")
        self.min_scale, self.max_scale = min_scale, max_scale
        self._hysteresis = hysteresis
        self._device = device
        self._start = _Numbers(init_scale, 0, hysteresis)  # until the first use shows the device
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = None

    def _on_device(self, near: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(scale float32, clean steps int64, tolerance int64), 0-d, made at the first use."""
        if self._tensors is None:
            where = self._device or near or torch.device("cpu")
            if devices.is_capturing(where):
                raise RuntimeError(
                    "the loss scale, made while a CUDA graph is captured, would start again at every replay; call "
                    "scale() once before the capture"
                )
            self._tensors = (
                torch.full((), self._start.scale, dtype=torch.float32, device=where),
                torch.full((), self._start.clean_steps, dtype=torch.int64, device=where),
                torch.full((), self._start.tolerance, dtype=torch.int64, device=where),
            )
        return self._tensors

    def tensor(self, near: torch.device | None = None) -> Tensor:
        """The scale, 0-d float32; where it had no device yet, it is made on `near`. Later steps move it in place."""
        return self._on_device(near)[0]

    def inverse(self, near: torch.device | None = None) -> Tensor:
        """f32(1 / scale), 0-d. Finite for every scale within the bounds."""
        return (1.0 / self.tensor(near).double()).float()

    def learn(self, found: Tensor) -> Tensor:
        """Moves the scale after a step that overflowed or not (0-d bool).

        An overflow shrinks it once the tolerance is used up; enough clean steps grow it and restore the tolerance.
        Returns two bools, on the device: it should have shrunk but was at its minimum; it is above its minimum now.
        """
        scale, clean, tolerance = self._on_device()
        clean.add_(1).masked_fill_(found, 0)
        tolerance.sub_(found.long()).clamp_(min=0)
        grow = clean >= self.pace.growth_interval
        shrink = found & (tolerance == 0)
        stuck = shrink & (scale <= self.min_scale)
        factor = torch.where(grow, self.pace.growth_factor, torch.where(shrink, self.pace.backoff_factor, 1.0))
        scale.mul_(factor.float()).clamp_(self.min_scale, self.max_scale)
        clean.masked_fill_(grow, 0)
        tolerance.masked_fill_(grow, self._hysteresis)
        return torch.stack((stuck, scale > self.min_scale))

    def set(self, value: float | Tensor) -> None:
        """A scale given by hand, within the bounds; ValueError for a NaN.

        A tensor on a device is not read, so as not to wait: a NaN in it leaves the scale as it is.
        """
        if isinstance(value, Tensor) and not devices.is_host(value.device):
            scale = self.tensor(value.device)
            given = devices.scalar_on(value.detach(), scale.device, torch.float32, "the new loss scale")
            scale.copy_(torch.where(given.isnan(), scale, given).clamp_(self.min_scale, self.max_scale))
            return
        value = float(value)
        self._start = self._start._replace(scale=self._within_bounds(value))
        if self._tensors is not None:
            self._tensors[0].fill_(self._start.scale)

    def _within_bounds(self, scale: float) -> float:
        if isnan(scale):
            raise ValueError("the new loss scale is NaN; expected a number (it is brought within the bounds)")
        return min(max(scale, self.min_scale), self.max_scale)

    # ---- state -----------------------------------------------------------------------------------------------------
    def value(self) -> float:
        """The scale as a number (waits for the device)."""
        return self._numbers().scale

    def _numbers(self) -> _Numbers:
        if self._tensors is None:
            return self._start
        scale, clean, tolerance = self._tensors
        return _Numbers(float(scale), int(clean), int(tolerance))

    def state_dict(self) -> dict[str, Any]:
        numbers = self._numbers()
        return {
            "scale": numbers.scale,
            **self.pace._asdict(),
            "_growth_tracker": numbers.clean_steps,
            "_hysteresis_tracker": numbers.tolerance,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes GradScaler's keys, with or without a hysteresis; ValueError, before anything changes, if one is bad."""
        missing = sorted({"scale", *Pace._fields, "_growth_tracker"} - state_dict.keys())
        if missing:
            raise ValueError(
                f"the scaler's state lacks {', '.join(missing)}; expected what state_dict() of a LossScaler or of "
                "torch.amp.GradScaler returns"
            )
        for key in ("_growth_tracker", "_hysteresis_tracker"):
            count = state_dict.get(key, 0)
            if not isinstance(count, (int, float)) or count < 0 or count % 1 != 0:
                raise ValueError(f"the scaler's state has {key}={count!r}; expected a whole number of steps, 0 or more")
        pace = Pace(*(state_dict[field] for field in Pace._fields)).checked()
        self._start = _Numbers(
            self._within_bounds(float(state_dict["scale"])),
            int(state_dict["_growth_tracker"]),
            int(state_dict.get("_hysteresis_tracker", self._hysteresis)),
        )
        self.pace = pace
        if self._tensors is not None:
            device = self._tensors[0].device
            self._tensors = None
            self._on_device(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_start": self._numbers(), "_tensors": None}
