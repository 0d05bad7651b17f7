"""LossScaler: static or dynamic loss scaling with torch.amp.GradScaler's interface.

With halfstep's optimizers nothing waits for the device: unscaling, the overflow check and the skip are part of step().
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .fused_adam import FusedAdam
from .gradients import unscale_
from .loss_scale import LossScale, Pace
from .reports import warn
from .shards import local, ranks

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
        hysteresis: the scale shrinks from this many overflows on, counted since it last grew; >= 1.
        min_scale, max_scale: the scale never leaves these bounds, so it is never 0, Inf or NaN. Normal float32 numbers.

    Raises ValueError for values out of range. Survives pickle and deepcopy between update() and the next step().

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
        self._enabled = enabled
        self._scale = LossScale(
            None if device is None else torch.device(device), init_scale,
            Pace(growth_factor, backoff_factor, growth_interval),
            hysteresis=hysteresis, min_scale=min_scale, max_scale=max_scale,
        )  # fmt: skip
        self._forget()
        self._warned_at_floor = False

    def _forget(self) -> None:
        self._stage: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()

    # ---- the training loop -----------------------------------------------------------------------------------------
    def scale(self, outputs: Any) -> Any:
        """The loss (a tensor, or an iterable of them) times the scale, differentiable."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._scale.tensor(outputs.device).to(outputs.device)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping)):
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
                f"unscale_() on an optimizer that was {stage} since the last update(): its gradients would be "
                "divided twice. Call update() first"
            )
        held = _gradients(optimizer)
        if any(ranks(grad) > 1 for grad in held):
            raise RuntimeError(
                "this version cannot share the overflow flag between the ranks of a DTensor mesh: some would skip the "
                "step and others not. Use bfloat16, which needs no scaler, or unscale and check the gradients yourself"
            )
        grads = [local(grad) for grad in held]
        inverse = self._scale.inverse(grads[0].device if grads else None)
        found = torch.zeros((), dtype=torch.float32, device=inverse.device)
        for device in dict.fromkeys(g.device for g in grads):
            here = torch.zeros((), dtype=torch.float32, device=device)
            unscale_([g for g in grads if g.device == device], inverse.to(device), here)
            found = torch.maximum(found, here.to(found.device))
        self._stage[optimizer] = _UNSCALED
        if grads:
            self._found[optimizer] = found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """optimizer.step(), left out if a gradient is Inf or NaN after unscaling. Returns whether it was (0-d bool).

        Arguments after the optimizer go to its step(); a closure is refused.
        halfstep's optimizers check, unscale and skip on the device; other optimizers cost one wait for the flag here.
        Gradients that became non-finite between unscale_() and step() count too (with halfstep's optimizers).

        Raises RuntimeError if called twice without update().
        """
        if not self._enabled:
            optimizer.step(*args, **kwargs)
            return optimizer.skipped if isinstance(optimizer, FusedAdam) else torch.tensor(False)
        if kwargs.get("closure", args[0] if args else None) is not None:
            raise RuntimeError(
                "step() with a closure is not possible under a scaler: a skipped step cannot be retried inside it"
            )
        if self._stage.get(optimizer) == _STEPPED:
            raise RuntimeError(
                "step() was already called on this optimizer since the last update(); call update() first"
            )
        if isinstance(optimizer, FusedAdam):
            skipped = self._step_fused(optimizer, *args, **kwargs)
        else:
            skipped = self._step_foreign(optimizer, *args, **kwargs)
        self._record(optimizer, skipped)
        return skipped

    def _record(self, optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
        self._stage[optimizer] = _STEPPED
        if _gradients(optimizer):  # without any, nothing was learned about the scale
            self._found[optimizer] = skipped.float()

    def _step_fused(self, optimizer: FusedAdam, *args: Any, **kwargs: Any) -> Tensor:
        unscaled = self._stage.get(optimizer) == _UNSCALED
        optimizer.grad_scale = None if unscaled else self._scale.tensor()
        optimizer.found_inf = self._found.get(optimizer) if unscaled else None
        try:
            optimizer.step(*args, **kwargs)
        except Warning:  # a filter made an error of the report that ends a step: the step itself is complete
            self._record(optimizer, optimizer.skipped)
            raise
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        return optimizer.skipped

    def _step_foreign(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        if self._stage.get(optimizer) != _UNSCALED:
            self.unscale_(optimizer)
        skipped = self._found[optimizer] > 0 if optimizer in self._found else torch.tensor(False)
        if not skipped.item():  # the one wait
            optimizer.step(*args, **kwargs)
        return skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The next scale, after every optimizer had its step(), without waiting; or `new_scale`, within the bounds.

        Raises RuntimeError if no optimizer was stepped or unscaled since the last update, ValueError for a NaN.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.set(float(new_scale))
        else:
            if not self._found:
                raise RuntimeError(
                    "update() before a step() or unscale_() that saw gradients: there is nothing to learn from yet. "
                    "Call backward() on the scaled loss first"
                )
            scale = self._scale.tensor()
            shrink = self._scale.learn(torch.stack([f.to(scale.device) for f in self._found.values()]).max() > 0)
            if scale.device.type == "cpu":
                self._warn_at_floor(bool(shrink), float(scale))
        self._forget()

    def _warn_at_floor(self, shrink: bool, scale: float) -> None:
        if scale > self._scale.min_scale:
            self._warned_at_floor = False
        elif shrink and not self._warned_at_floor and self._scale.pace.backoff_factor < 1.0:
            self._warned_at_floor = True
            warn(
                f"halfstep: the loss scale is at its minimum, {scale:g}, and gradients still overflow: they are "
                "too large for their dtype or the loss is not finite. The optimizer's warning names the "
                "parameter",
                RuntimeWarning,
            )

    # ---- queries and state -----------------------------------------------------------------------------------------
    def get_scale(self) -> float:
        """The current scale (waits for the device); 1.0 if disabled."""
        return self._scale.value() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._scale.pace.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._scale.pace = self._scale.pace._replace(growth_factor=new_factor).checked()

    def get_backoff_factor(self) -> float:
        return self._scale.pace.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._scale.pace = self._scale.pace._replace(backoff_factor=new_factor).checked()

    def get_growth_interval(self) -> int:
        return self._scale.pace.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._scale.pace = self._scale.pace._replace(growth_interval=new_interval).checked()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys plus the hysteresis; at any time, also before the first scale(). Empty if disabled."""
        return self._scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of LossScaler or GradScaler; its scale is brought within this scaler's bounds.

        Raises RuntimeError if it is empty (saved while disabled), ValueError for missing keys or numbers out of range.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the scaler's state is empty: it was saved from a disabled scaler")
        self._scale.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._stage:
            raise RuntimeError("a scaler can be pickled or copied only after update() and before the next step()")
        return {k: v for k, v in self.__dict__.items() if k not in ("_stage", "_found")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
