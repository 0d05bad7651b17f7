"""The comparisons of the optimizer bench."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.bench import accuracy, phases
from halfstep.bench.cases import Case, Flat
from halfstep.bench.harness import Comparison, Expected, Provider
from halfstep.bench.phases import LOSS_SCALE, MAX_NORM

# Bytes per element that a job cannot avoid: gradient, weight, master, m, v. With clipping the gradient is read twice.
_FP32_STEP = 4 + 2 * 4 + 2 * (4 + 4)
_FP32_MASTER_PHASE = 2 * 2 + 2 + 2 * (4 + 4 + 4)
_SPLIT_MASTER_PHASE = 2 * 2 + 2 * (2 + 2) + 2 * (4 + 4)


def bf16_phase(case: Case) -> Comparison:
    w, g = phases.narrow(case, torch.bfloat16)
    clip = dict(max_grad_norm=MAX_NORM, skip_nonfinite=True)
    exact, torchs = _expected(w, g, 1.0)
    providers = [
        Provider("halfstep", lambda: phases.Halfstep(phases.clones(w), g, **clip), _FP32_MASTER_PHASE),
        Provider(
            "halfstep, split master",
            lambda: phases.Halfstep(phases.clones(w), g, master="split", **clip),
            _SPLIT_MASTER_PHASE,
        ),
        Provider("torch", lambda: phases.TorchPhase(phases.clones(w), g), _FP32_MASTER_PHASE, torchs),
        Provider("torch, expert", lambda: phases.TorchExpert(phases.clones(w), g), _FP32_MASTER_PHASE, torchs),
    ]
    if case.gpu:
        foreach = Provider(
            "torch, foreach",
            lambda: phases.TorchPhase(phases.clones(w), g, foreach=True),
            _FP32_MASTER_PHASE,
            torchs,
        )
        providers.append(foreach)
    if case.host_bound:
        alone = Provider(
            "halfstep, kernels alone",
            lambda: phases.KernelsAlone(phases.clones(w), g, phase=True),
            _FP32_MASTER_PHASE,
        )
        providers.insert(2, alone)
    return Comparison(case, "bf16 phase", "torch", providers, exact, accuracy.STEPS_CHECKED)


def fp16_phase(case: Case) -> Comparison:
    w, g = phases.narrow(case, torch.float16, LOSS_SCALE)
    exact, torchs = _expected(w, g, LOSS_SCALE)
    providers = [
        Provider(
            "halfstep",
            lambda: phases.HalfstepScaled(phases.clones(w), g, max_grad_norm=MAX_NORM),
            _FP32_MASTER_PHASE,
        ),
        Provider("torch", lambda: phases.TorchScaled(phases.clones(w), g), _FP32_MASTER_PHASE, torchs),
    ]
    if case.gpu:
        foreach = Provider(
            "torch, foreach",
            lambda: phases.TorchScaled(phases.clones(w), g, foreach=True),
            _FP32_MASTER_PHASE,
            torchs,
        )
        providers.append(foreach)
    return Comparison(case, "fp16 phase, loss scaler", "torch", providers, exact, accuracy.STEPS_CHECKED)


def fp32_step(case: Case) -> Comparison:
    w, g = case.weights(), case.gradients()
    providers = [
        Provider("halfstep", lambda: phases.Halfstep(phases.clones(w), g), _FP32_STEP),
        Provider("torch, fused", lambda: phases.Torch(phases.clones(w), g, fused=True), _FP32_STEP),
        Provider("torch, foreach", lambda: phases.Torch(phases.clones(w), g, foreach=True), _FP32_STEP),
    ]
    if not case.gpu:
        providers += [
            Provider("torch, for-loop", lambda: phases.Torch(phases.clones(w), g, foreach=False), _FP32_STEP),
            Provider("DeepSpeed CPUAdam", lambda: phases.DeepSpeed(phases.clones(w), g), _FP32_STEP),
            Provider("bitsandbytes AdamW32bit", lambda: phases.Bitsandbytes(phases.clones(w), g), _FP32_STEP),
        ]
    if case.host_bound:
        alone = Provider(
            "halfstep, kernels alone",
            lambda: phases.KernelsAlone(phases.clones(w), g, phase=False),
            _FP32_STEP,
        )
        providers.insert(1, alone)
    expected = accuracy.expected_adamw(w, g)
    return Comparison(case, "fp32 step", "torch, fused", providers, expected, accuracy.STEPS_CHECKED)


def comparisons(cases: list[Case], only: str = "") -> Iterator[Comparison]:
    """Every job on every case whose "case: job" contains `only`; tensors are made when a comparison is asked for."""
    jobs = {"bf16 phase": bf16_phase, "fp16 phase": fp16_phase, "fp32 step": fp32_step}
    for case in cases:
        for name, job in jobs.items():
            if only.lower() in f"{case.name}: {name}".lower():
                yield job(case)


def _expected(weights: list[Tensor], grads: list[Tensor], scale: float) -> tuple[Expected, Expected]:
    """Of a phase that clips: with the true norm, and with the norm torch's float32 sum makes of it."""

    def with_norm(norm: float, slack: float) -> Expected:
        coefficient = min(1.0, MAX_NORM / (norm / scale + 1e-6))
        return accuracy.expected_adamw(weights, grads, factor=coefficient / scale, slack=slack)

    flat = Flat(grads)
    torchs = accuracy.float32_norm(grads).item()
    return with_norm(flat.norm(), 0.0), with_norm(torchs, accuracy.other_order(len(flat)))
