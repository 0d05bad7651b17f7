"""The optimizer phase as its users write it: halfstep's way, torch's, and DeepSpeed's CPU kernel.

Everyone gets weights, gradients and hyper-parameters of the same case and does the same job:

    bf16 phase  bfloat16 weights and gradients, float32 masters: overflow check, clip to norm 1, AdamW, cast the weights
    fp16 phase  the same with float16 and a loss scaler: unscale first, and adapt the scale afterwards
    fp32 step   AdamW alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.bench import torch_lists
from halfstep.bench.cases import Case
from halfstep.bench.harness import Runner, UnavailableError
from halfstep.ops import backend
from halfstep.ops.optimizer import AdamGroup, AdamRow, StepInputs
from halfstep.reference.rounding import join_master

HYPER: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
MAX_NORM = 1.0
LOSS_SCALE = 1024.0
_NEVER = 10**9  # growth_interval: the scale stays, so that every call does the same


class Halfstep(Runner):
    """halfstep.AdamW through its public step()."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any):
        self.params = [nn.Parameter(w) for w in weights]
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer = hs.AdamW(self.params, **HYPER, **options)

    def __call__(self) -> None:
        self.optimizer.step()

    def results(self) -> dict[str, Sequence[Tensor]]:
        own = self.optimizer.own_states()  # through optimizer.state, later steps would look whether anyone changed them
        states = [own.own_state(p) for p in self.params]
        found: dict[str, Sequence[Tensor]] = {"weight": self.params}
        if "master" in states[0]:
            found["master"] = [s["master"] for s in states]
        if "remainder" in states[0]:
            found["master"] = [
                join_master(p.detach(), s["remainder"]) for p, s in zip(self.params, states, strict=True)
            ]
        return found | {key: [s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")}


class HalfstepScaled(Halfstep):
    """The same under halfstep.LossScaler."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any):
        super().__init__(weights, grads, **options)
        self.scaler = hs.LossScaler(weights[0].device, LOSS_SCALE, growth_interval=_NEVER)

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class KernelsAlone(Halfstep):
    """What Halfstep's step costs without the optimizer class around it: prepared table, two kernel calls."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], phase: bool):
        super().__init__(weights, grads)
        rows, device = [], weights[0].device
        for i, param in enumerate(self.params):
            master = {"master": param.detach().float()} if param.dtype != torch.float32 else {}
            moments = {key: torch.zeros_like(param, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
            state = {"step": torch.zeros((), dtype=torch.int64, device=device), **moments, **master}
            self.optimizer.state[param] = state
            kept = state["exp_avg"], state["exp_avg_sq"], None, state.get("master"), state["step"]
            rows.append(AdamRow(param.detach(), *kept, group=0, param_id=i, first_index=0))
        self._plan = backend.choose(device).AdamPlan(rows)
        self._plan.set_grads(grads)
        self._phase = phase
        beta1, beta2 = HYPER["betas"]
        self._groups = [AdamGroup(HYPER["lr"], beta1, beta2, HYPER["eps"], HYPER["weight_decay"], True, False)]

    def __call__(self) -> None:
        inputs = StepInputs()
        if self._phase:
            total, bad = self._plan.grad_stats(None)
            inputs = StepInputs(sum_squares=total, first_bad=bad, max_norm=MAX_NORM, skip_nonfinite=True)
        self._plan.update(self._groups, inputs)


class Torch(Runner):
    """torch.optim.AdamW on float32 weights."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any):
        self.params = [nn.Parameter(w) for w in weights]
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer = self.build(**options)

    def build(self, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.params, **HYPER, **options)

    def __call__(self) -> None:
        self.optimizer.step()

    def results(self) -> dict[str, Sequence[Tensor]]:
        states = [self.optimizer.state[p] for p in self.params]
        return {"weight": self.params, **{key: [s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")}}


class DeepSpeed(Torch):
    """DeepSpeedCPUAdam on float32 weights; compiles its kernel at the first use."""

    def build(self, **options: Any) -> torch.optim.Optimizer:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

            return DeepSpeedCPUAdam(self.params, **HYPER, adamw_mode=True)
        except (ImportError, OSError, RuntimeError) as error:  # not installed, no ninja, no compiler
            raise UnavailableError(f"{type(error).__name__}: {error}") from error


class Bitsandbytes(Torch):
    """bitsandbytes' AdamW with float32 states on float32 weights."""

    def build(self, **options: Any) -> torch.optim.Optimizer:
        try:
            from bitsandbytes.optim import AdamW32bit  # pyright: ignore[reportMissingImports]
        except (ImportError, OSError, RuntimeError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        return AdamW32bit(self.params, **HYPER)

    def results(self) -> dict[str, Sequence[Tensor]]:
        states = [self.optimizer.state[p] for p in self.params]
        moments = {"exp_avg": "state1", "exp_avg_sq": "state2"}
        return {"weight": self.params, **{ours: [s[theirs] for s in states] for ours, theirs in moments.items()}}


class TorchPhase(Torch):
    """What one writes around torch.optim for 16-bit weights, with every multi-tensor call torch has.

    Gradients up to float32, overflow check, clip, AdamW(fused=True) on the masters, weights down. Buffers are kept from
    step to step, so nothing is allocated here.
    """

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any):
        self.weights, self.narrow_grads = weights, grads
        super().__init__([w.float() for w in weights], [g.float() for g in grads], **(options or {"fused": True}))
        self.wide_grads = [p.grad for p in self.params if p.grad is not None]
        device = weights[0].device
        self.found_inf, self.one = torch.zeros(1, device=device), torch.ones(1, device=device)

    @torch.no_grad()
    def __call__(self) -> None:
        torch_lists.copy_(self.wide_grads, self.narrow_grads)
        self.found_inf.zero_()
        torch_lists.unscale_(self.wide_grads, self.found_inf, self.one)
        if self.found_inf.item():
            return
        nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.optimizer.step()
        torch_lists.copy_(self.weights, self.params)

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {**super().results(), "weight": self.weights, "master": self.params}


class TorchExpert(TorchPhase):
    """TorchPhase with everything folded that torch lets one fold.

    The norm is the overflow check, and clipping is the fused kernel's own grad_scale. The norm is taken after the copy:
    of bfloat16 gradients torch gives it in bfloat16, or in float32 at a fifth of the speed.
    """

    @torch.no_grad()
    def __call__(self) -> None:
        torch_lists.copy_(self.wide_grads, self.narrow_grads)
        norm = nn.utils.get_total_norm(self.wide_grads, foreach=True)
        if norm.device.type == "cpu" and not norm.isfinite().item():
            return
        optimizer: Any = self.optimizer
        optimizer.grad_scale = ((norm + 1e-6) / MAX_NORM).clamp(min=1.0)
        optimizer.found_inf = norm.isfinite().logical_not().float()  # on a GPU nobody waits for it
        optimizer.step()
        torch_lists.copy_(self.weights, self.params)


class TorchScaled(TorchPhase):
    """TorchPhase under torch.amp.GradScaler."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any):
        super().__init__(weights, grads, **options)
        self.scaler = torch.amp.GradScaler(weights[0].device.type, init_scale=LOSS_SCALE, growth_interval=_NEVER)
        self.scaler.scale(torch.ones(1, device=weights[0].device))  # makes the scale, which step() wants to find

    @torch.no_grad()
    def __call__(self) -> None:
        torch_lists.copy_(self.wide_grads, self.narrow_grads)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        torch_lists.copy_(self.weights, self.params)


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def narrow(case: Case, dtype: torch.dtype, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """The case's weights and its gradients times `scale`, in the dtype."""
    return [w.to(dtype) for w in case.weights()], [(g * scale).to(dtype) for g in case.gradients()]
