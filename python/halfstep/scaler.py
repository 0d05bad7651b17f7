"""LossScaler: static or dynamic loss scaling with torch.amp.GradScaler's interface.

With halfstep's optimizers nothing waits for the device: unscaling, the overflow check and the skip are part of step().
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .gradients import unscale_
from .optim import FusedAdam
from .shards import local

_UNSCALED, _STEPPED = "unscaled", "stepped"


class LossScaler:
    """Multiplies the loss so that small float16 gradients survive, and undoes it in the optimizer step.

    Dynamic: after `growth_interval` clean steps the scale grows by `growth_factor`; a step with Inf or NaN gradients is
    skipped (weights, states and counters keep every bit) and the scale shrinks by `backoff_factor`. Growing by 1.05
    every step is growth_factor=1.05, growth_interval=1; a static scale is growth_factor=1, backoff_factor=1.

    Args:
        device: where the scale lives; None: the first loss's device.
        init_scale: between min_scale and max_scale.
        growth_factor: >= 1. backoff_factor: in (0, 1]. growth_interval: >= 1 clean steps.
        enabled: False makes every method pass through, as with GradScaler.
        hysteresis: overflows tolerated before the scale shrinks, counted since it last grew; >= 1.
        min_scale, max_scale: the scale never leaves these bounds, so it is never 0, Inf or NaN.

    Raises ValueError for values out of range.

    Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        >>> optimizer, scaler = hs.AdamW([weight]), hs.LossScaler(init_scale=1024.0)
        >>> scaler.scale(weight.float().sum()).backward()
        >>> scaler.step(optimizer).item()
        False
        >>> scaler.update()
    """

    def __init__(
        self, device: torch.device | str | None = None, init_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, *, enabled: bool = True, hysteresis: int = 1,
        min_scale: float = 1.0, max_scale: float = 2.0**32,
    ) -> None:  # fmt: skip
        if not 0 < min_scale <= init_scale <= max_scale < float("inf"):
            raise ValueError(
                f"expected 0 < min_scale <= init_scale <= max_scale < inf, got {min_scale}, {init_scale}, {max_scale}"
            )
        if not growth_factor >= 1 or not 0 < backoff_factor <= 1:
            raise ValueError(
                f"expected growth_factor >= 1 and backoff_factor in (0, 1], got {growth_factor} and {backoff_factor}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(f"expected growth_interval and hysteresis >= 1, got {growth_interval} and {hysteresis}")
        self._device = None if device is None else torch.device(device)
        self._init_scale, self._growth_factor, self._backoff_factor = init_scale, growth_factor, backoff_factor
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._min_scale, self._max_scale, self._enabled = min_scale, max_scale, enabled
        self._scale: Tensor | None = None  # 0-d float32, made at the first use; so are the counters
        self._clean_steps: Tensor | None = None  # 0-d int32
        self._tolerance: Tensor | None = None  # 0-d int32, overflows left before the scale shrinks
        self._resume: dict[str, Any] = {}
        self._forget()
        self._warned_at_floor = False

    def _forget(self) -> None:
        self._stage: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()

    def _state(self, device: torch.device | None = None) -> Tensor:
        if self._scale is None:
            device = self._device or device or torch.device("cpu")
            saved = self._resume
            self._scale = torch.tensor(saved.get("scale", self._init_scale), dtype=torch.float32, device=device)
            self._clean_steps = torch.tensor(saved.get("_growth_tracker", 0), dtype=torch.int32, device=device)
            tolerance = saved.get("_hysteresis_tracker", self._hysteresis)
            self._tolerance = torch.tensor(tolerance, dtype=torch.int32, device=device)
        return self._scale

    # ---- the training loop -----------------------------------------------------------------------------------------
    def scale(self, outputs: Any) -> Any:
        """The loss (a tensor, or an iterable of them) times the scale, differentiable."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._state(outputs.device).to(outputs.device)
        if isinstance(outputs, Iterable):
            scaled = [self.scale(output) for output in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        raise TypeError(f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, for code that wants to look at them or clip them.

        Not needed before step(). float16 gradients are allowed. Raises RuntimeError if called twice between updates, or
        after step().
        """
        if not self._enabled:
            return
        stage = self._stage.get(optimizer)
        if stage is not None:
            raise RuntimeError(
                f"unscale_() on an optimizer that was {stage} since the last update(): its gradients would be divided twice. "
                "Call update() first"
            )
        grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        scale = self._state(grads[0].device if grads else None)
        inverse = (1.0 / scale.double()).float()
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        for device in dict.fromkeys(g.device for g in grads):
            here = torch.zeros((), dtype=torch.float32, device=device)
            unscale_([g for g in grads if g.device == device], inverse.to(device), here)
            found = torch.maximum(found, here.to(found.device))
        self._found[optimizer] = found
        self._stage[optimizer] = _UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """optimizer.step(), left out if a gradient is Inf or NaN after unscaling. Returns whether it was (0-d bool).

        halfstep's optimizers check, unscale and skip on the device; other optimizers cost one wait for the flag here.
        Gradients that became non-finite between unscale_() and step() count too (with halfstep's optimizers).

        Raises RuntimeError if called twice without update().
        """
        if not self._enabled:
            optimizer.step(*args, **kwargs)
            return torch.tensor(False)
        if "closure" in kwargs or args:
            raise RuntimeError("step() with a closure is not possible under a scaler: a skipped step cannot be retried inside it")
        if self._stage.get(optimizer) == _STEPPED:
            raise RuntimeError("step() was already called on this optimizer since the last update(); call update() first")
        if isinstance(optimizer, FusedAdam):
            skipped = self._step_fused(optimizer)
        else:
            skipped = self._step_foreign(optimizer)
        self._found[optimizer] = skipped.float()
        self._stage[optimizer] = _STEPPED
        return skipped

    def _step_fused(self, optimizer: FusedAdam) -> Tensor:
        unscaled = self._stage.get(optimizer) == _UNSCALED
        optimizer.grad_scale = None if unscaled else self._state()
        optimizer.found_inf = self._found[optimizer] if unscaled else None
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None
        return optimizer.skipped

    def _step_foreign(self, optimizer: torch.optim.Optimizer) -> Tensor:
        if self._stage.get(optimizer) != _UNSCALED:
            self.unscale_(optimizer)
        skipped = self._found[optimizer] > 0
        if not skipped.item():  # the one wait
            optimizer.step()
        return skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The next scale, after every optimizer had its step(); or `new_scale`, as given. Without waiting.

        Raises RuntimeError if no optimizer was stepped or unscaled since the last update.
        """
        if not self._enabled:
            return
        scale = self._state()
        if new_scale is not None:
            scale.fill_(float(new_scale)).clamp_(self._min_scale, self._max_scale)
        else:
            if not self._found:
                raise RuntimeError("update() before any step() or unscale_(): there is nothing to learn from yet")
            found = torch.stack([f.to(scale.device) for f in self._found.values()]).max() > 0
            self._next_scale(scale, found)
        self._forget()

    def _next_scale(self, scale: Tensor, found: Tensor) -> None:
        clean, tolerance = self._clean_steps, self._tolerance
        assert clean is not None and tolerance is not None
        clean.copy_(torch.where(found, 0, clean + 1))
        tolerance.copy_(torch.where(found, tolerance - 1, tolerance))
        grow = clean >= self._growth_interval
        shrink = found & (tolerance <= 0)
        factor = torch.where(grow, self._growth_factor, torch.where(shrink, self._backoff_factor, 1.0))
        scale.mul_(factor.float()).clamp_(self._min_scale, self._max_scale)
        clean.copy_(torch.where(grow, 0, clean))
        tolerance.copy_(torch.where(grow, self._hysteresis, tolerance.clamp(min=0)))
        if scale.device.type == "cpu":
            self._warn_at_floor(bool(shrink), float(scale))

    def _warn_at_floor(self, shrink: bool, scale: float) -> None:
        if not shrink or scale > self._min_scale or self._backoff_factor == 1.0:
            self._warned_at_floor &= shrink
            return
        if not self._warned_at_floor:
            self._warned_at_floor = True
            warnings.warn(
                f"halfstep: the loss scale is at its minimum, {scale:g}, and gradients still overflow: they are too large for "
                "their dtype or the loss is not finite. Look at the parameter named by the optimizer's warning",
                RuntimeWarning,
                stacklevel=4,
            )

    # ---- queries and state -----------------------------------------------------------------------------------------
    def get_scale(self) -> float:
        """The current scale (waits for the device); 1.0 if disabled."""
        return float(self._state()) if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys plus the hysteresis; at any time, also before the first scale(). Empty if disabled."""
        if not self._enabled:
            return {}
        started = self._clean_steps is not None and self._tolerance is not None
        return {
            "scale": self.get_scale() if started else self._resume.get("scale", self._init_scale),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._clean_steps) if started else self._resume.get("_growth_tracker", 0),
            "_hysteresis_tracker": int(self._tolerance)
            if started
            else self._resume.get("_hysteresis_tracker", self._hysteresis),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of LossScaler or GradScaler. Raises RuntimeError if it is empty (saved while disabled)."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the scaler's state is empty: it was saved from a disabled scaler")
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._resume = dict(state_dict)
        device = None if self._scale is None else self._scale.device
        self._scale = self._clean_steps = self._tolerance = None
        if device is not None:
            self._state(device)
