"""LossScaler: static or dynamic loss scaling with torch.amp.GradScaler's interface.

With halfstep's optimizers nothing waits for the device: unscaling, the overflow check and the skip are part of step().
What does wait: gradients of one optimizer on several devices, a scale that lives elsewhere than the loss (device="cpu"
for a model on a GPU, or the reverse), and what says so below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from .fused_adam import FusedAdam
from .gradients import unscale_and_find_
from .loss_scale import LossScale, Pace
from .ops import devices
from .outcomes import StepOutcome, first_of_all
from .reports import FloorReports, StepReports, parameter_names
from .shards import local, ranks


class LossScaler:
    """Multiplies the loss so that small float16 gradients survive, and undoes it in the optimizer step.

    After `growth_interval` clean steps the scale grows by `growth_factor`; a step with Inf or NaN gradients is skipped
    (weights, states and counters keep every bit) and the scale shrinks by `backoff_factor`. The usual ways:

        hs.LossScaler()                                                          # twice as large every 2,000 steps
        hs.LossScaler(growth_factor=1.05, growth_interval=1)                     # 5 % larger every step
        hs.LossScaler(init_scale=1024.0, growth_factor=1.0, backoff_factor=1.0)  # static

    Args:
        device: where the scale lives; None: the first loss's device.
        init_scale: between min_scale and max_scale.
        growth_factor: >= 1. backoff_factor: in (0, 1]. growth_interval: >= 1 clean steps.
        enabled: False makes every method pass through, as with GradScaler.
        hysteresis: the scale shrinks from this many overflows on, counted since it last grew; >= 1.
        min_scale, max_scale: the scale never leaves these bounds, so it is never 0, Inf or NaN. Normal float32 numbers.

    In a CUDA graph, with halfstep's optimizers: call scale() once before the capture. Replays move the scale if
    step() and update() are both in it; advance() and warnings know nothing of replays.

    torch.compile takes scale() into its graphs; step(), unscale_(), update() and advance() run between two of them.

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
        self._start_run()

    def _start_run(self) -> None:
        """What belongs to this run and is in no checkpoint or copy."""
        self._floor = FloorReports(self._scale.min_scale)
        self._reports: WeakKeyDictionary[Optimizer, StepReports] = WeakKeyDictionary()  # foreign optimizers'
        self._last: WeakKeyDictionary[Optimizer, StepOutcome] = WeakKeyDictionary()
        self._advanced: WeakKeyDictionary[Any, StepOutcome] = WeakKeyDictionary()  # by scheduler: up to which step
        self._start_iteration()

    def _start_iteration(self) -> None:
        self._unscaled: WeakKeyDictionary[Optimizer, StepOutcome] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._seen: list[StepOutcome] = []  # what update() learns from

    # ---- the training loop -----------------------------------------------------------------------------------------
    def scale(self, outputs: Any) -> Any:
        """The loss (a tensor, or an iterable of them) times the scale, differentiable."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            scale = self._scale.tensor(outputs.device)
            # one number of the host goes along as it is; its copy to the device would wait
            return outputs * (scale if devices.is_host(scale.device) else scale.to(outputs.device))
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping)):
            scaled = [self.scale(output) for output in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        raise TypeError(f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, for code that wants to look at them or clip them.

        Not needed before step(). float16 gradients are allowed. Clip afterwards: a norm taken before is that of the
        scaled gradients, and limiting it to max_norm leaves gradients of norm max_norm / scale.

        Raises RuntimeError if called twice between updates, or after step().
        """
        if torch.compiler.is_dynamo_compiling():
            _between_graphs(self.unscale_, optimizer)
            return
        if not self._enabled:
            return
        if optimizer in self._unscaled or optimizer in self._stepped:
            stage = "stepped" if optimizer in self._stepped else "unscaled"
            raise RuntimeError(
                f"unscale_() on an optimizer that was {stage} since the last update(): its gradients would be "
                "divided twice. Call update() first"
            )
        grads = {i: p.grad for i, p in enumerate(_parameters(optimizer)) if p.grad is not None}
        if any(ranks(grad) > 1 for grad in grads.values()):
            raise RuntimeError(
                "this version cannot share the overflow flag between the ranks of a DTensor mesh: some would skip the "
                "step and others not. Use bfloat16, which needs no scaler, or unscale and check the gradients yourself"
            )
        if not grads:  # nothing is divided yet
            return
        first_bad = self._unscale([local(grad) for grad in grads.values()])
        groups, active = optimizer.param_groups, list(grads)
        outcome = StepOutcome(first_bad >= 0, first_bad, lambda index: parameter_names(groups)[active[index]])
        self._unscaled[optimizer] = outcome
        self._seen.append(outcome)

    def _unscale(self, grads: list[Tensor]) -> Tensor:
        """Index of the first gradient that is not finite afterwards, or -1."""
        inverse = self._scale.inverse(grads[0].device)
        places: dict[torch.device, list[int]] = {}
        for i, grad in enumerate(grads):
            places.setdefault(grad.device, []).append(i)
        firsts = [
            unscale_and_find_(
                [grads[i] for i in place], devices.scalar_on(inverse, device, torch.float32, "1 / the loss scale")
            )
            for device, place in places.items()
        ]
        return first_of_all(firsts, list(places.values()))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """optimizer.step(), left out if a gradient is Inf or NaN after unscaling. Returns whether it was (0-d bool).

        Arguments after the optimizer go to its step(); a closure is refused.
        halfstep's optimizers check, unscale and skip on the device; other optimizers cost one wait for the flag here.
        Gradients that became non-finite between unscale_() and step() count too (with halfstep's optimizers). Skips of
        any optimizer are told at the 1st, 2nd, 4th, 8th ... in a row, with the first bad parameter's name.

        Raises RuntimeError if called twice without update().
        """
        if torch.compiler.is_dynamo_compiling():
            return _between_graphs(self.step, optimizer, *args, **kwargs)
        if kwargs.get("closure", args[0] if args else None) is not None and self._enabled:
            raise RuntimeError(
                "step() with a closure is not possible under a scaler: a skipped step cannot be retried inside it"
            )
        if optimizer in self._stepped:
            raise RuntimeError(
                "step() was already called on this optimizer since the last update(); call update() first"
            )
        if isinstance(optimizer, FusedAdam):
            return self._step_fused(optimizer, *args, **kwargs)
        return self._step_foreign(optimizer, *args, **kwargs)

    def _step_fused(self, optimizer: FusedAdam, *args: Any, **kwargs: Any) -> Tensor:
        before, unscaled = optimizer.outcome, self._unscaled.get(optimizer)
        learns = any(p.grad is not None for p in _parameters(optimizer))
        if self._enabled:
            near = next((p.device for p in _parameters(optimizer)), None)
            optimizer.grad_scale = self._scale.tensor(near) if unscaled is None else None
            optimizer.found_inf = None if unscaled is None else unscaled.skipped.float()
        try:
            optimizer.step(*args, **kwargs)
        finally:
            if self._enabled:
                del optimizer.grad_scale, optimizer.found_inf
            if optimizer.outcome is not before:  # complete, even if a filter made an error of the report that ends it
                self._record(optimizer, optimizer.outcome, learns=learns)
        return optimizer.skipped

    def _step_foreign(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        if self._enabled and optimizer not in self._unscaled:
            self.unscale_(optimizer)
        outcome = self._unscaled.get(optimizer) or StepOutcome(torch.tensor(False, device="cpu"))
        if outcome.captured:
            raise RuntimeError(
                f"whether {type(optimizer).__name__} skips a step is decided on the host, which a CUDA graph cannot "
                "replay; capture one of halfstep's optimizers, which decide on the device"
            )
        if not outcome.was_skipped():  # the one wait
            optimizer.step(*args, **kwargs)
        self._record(optimizer, outcome, learns=False)  # unscale_() did
        self._reports.setdefault(optimizer, StepReports()).add(outcome)
        return outcome.skipped

    def _record(self, optimizer: Optimizer, outcome: StepOutcome, *, learns: bool) -> None:
        self._last[optimizer] = outcome
        if self._enabled:
            self._stepped.add(optimizer)
            self._seen += [outcome] * learns

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The next scale, after every optimizer had its step(), without waiting; or `new_scale`, within the bounds.

        Raises RuntimeError if no optimizer was stepped or unscaled since the last update, ValueError for a NaN. A
        `new_scale` on a device is not read: a NaN there leaves the scale as it is.
        """
        if torch.compiler.is_dynamo_compiling():
            _between_graphs(self.update, new_scale)
            return
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.set(new_scale)
            self._start_iteration()
            return
        if not self._seen:
            raise RuntimeError(
                "update() before a step() or unscale_() that saw gradients: there is nothing to learn from yet. "
                "Call backward() on the scaled loss first"
            )
        seen, scale = self._seen, self._scale.tensor()
        floor = self._scale.learn(torch.stack([_flag(outcome, scale.device) for outcome in seen]).any())
        self._start_iteration()
        told = not devices.is_capturing(scale.device) and not any(outcome.captured for outcome in seen)
        if told and self._scale.pace.backoff_factor < 1:  # a static scale has no floor
            self._floor.add(floor, seen)

    def advance(self, scheduler: Any, *args: Any) -> bool:
        """scheduler.step(*args), if its optimizer's last step() under this scaler was not skipped. Returns whether.

        At most once for each step(), however often it is asked. It waits for that step's answer alone: asked between
        the next backward() and the next step(), as below, the device has work meanwhile, and the learning rates are
        those of a loop that asks at once. Ask before a checkpoint too. Works with enabled=False.

        Raises TypeError if the scheduler has no optimizer, RuntimeError if the step was captured in a CUDA graph: the
        host has no answer for each replay.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
            >>> optimizer, scaler = hs.AdamW([weight], lr=1.0), hs.LossScaler(init_scale=1024.0)
            >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
            >>> for _ in range(3):
            ...     scaler.scale(weight.float().sum()).backward()
            ...     _ = scaler.advance(schedule)  # for the step before this one
            ...     _ = scaler.step(optimizer)
            ...     scaler.update()
            ...     optimizer.zero_grad()
            >>> scaler.advance(schedule), schedule.get_last_lr()
            (True, [0.125])
        """
        if torch.compiler.is_dynamo_compiling():
            return _between_graphs(self.advance, scheduler, *args)
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            raise TypeError(
                f"advance() takes a learning-rate scheduler, whose .optimizer it asks; got {type(scheduler).__name__}"
            )
        outcome = self._last.get(optimizer)
        if outcome is None or self._advanced.get(scheduler) is outcome:
            return False
        skipped = outcome.was_skipped()
        self._advanced[scheduler] = outcome
        if skipped:
            return False
        scheduler.step(*args)
        return True

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
        """GradScaler's keys plus the hysteresis; at any time, also before the first scale(). Empty if disabled.

        Waits for the device.
        """
        self._floor.flush()
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
        if self._unscaled or self._stepped:
            raise RuntimeError("a scaler can be pickled or copied only after update() and before the next step()")
        return {"_enabled": self._enabled, "_scale": self._scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_run()


def _between_graphs(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Under torch.compile: the graph ends, the method runs in Python, and a new graph begins behind it."""
    from .untraced import call

    return call(method, *args, **kwargs)


def _flag(outcome: StepOutcome, device: torch.device) -> Tensor:
    return devices.scalar_on(outcome.skipped, device, torch.bool, "whether the step was skipped")


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
