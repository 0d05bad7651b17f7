"""accelerate's Accelerator with halfstep's optimizer: accumulation, clipping, checkpoints, skipped steps.

prepare() loads the optimizer's own state into it, the wrapper is an Optimizer but not of our class, and step() is only
called where gradients are complete. Guards: masters lost in prepare(), a scheduler out of step, a resumed run that
starts its states again.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from loops import assert_same_tree, loss_of, tiny_model
from optimizer_runs import assert_same, held
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import halfstep as hs

STEPS, CLIP = 10, 0.25
pytestmark = pytest.mark.usefixtures("offline", "fresh_accelerate")


class Run:
    """The tiny model with everything prepared."""

    def __init__(self, dtype: torch.dtype, precision: str = "no", accumulate: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
        model = tiny_model(dtype)
        self.optimizer = hs.AdamW(model.parameters(), lr=1e-2, **options)
        schedule = OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=STEPS)
        self.model, self.wrapper, self.schedule = self.accelerator.prepare(model, self.optimizer, schedule)
        assert type(self.wrapper) is AcceleratedOptimizer

    def train(self, start: int, end: int) -> None:
        """Micro-batches start .. end - 1."""
        for t in range(start, end):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, t))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.wrapper.step()
                assert not self.wrapper.step_was_skipped
                self.schedule.step()
                self.wrapper.zero_grad()

    def outcome(self) -> dict[str, Any]:
        inner = self.accelerator.unwrap_model(self.model)
        return {
            "model": inner.state_dict(),
            "optimizer": self.wrapper.state_dict(),
            "schedule": self.schedule.state_dict(),
        }


MODES: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "float32": (FLOAT32, "no", {}),
    "autocast": (FLOAT32, "bf16", {}),
    "bfloat16": (BFLOAT16, "no", {}),
    "split": (BFLOAT16, "no", {"master": "split"}),
    "no master": (BFLOAT16, "no", {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16}),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_as_a_plain_loop(mode: str, accumulate: int) -> None:
    dtype, precision, options = MODES[mode]
    run = Run(dtype, precision, accumulate, **options)
    run.train(0, STEPS * accumulate)

    model = tiny_model(dtype)
    optimizer = hs.AdamW(model.parameters(), lr=1e-2, **options)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    norms = []
    for t in range(STEPS):
        for micro in range(t * accumulate, (t + 1) * accumulate):
            with torch.autocast("cpu", BFLOAT16, enabled=precision == "bf16"):
                loss = loss_of(model, micro)
            (loss / accumulate).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert max(norms) > CLIP
    expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same_tree({key: run.outcome()[key] for key in expected}, expected)
    assert run.schedule.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_the_run(mode: str, tmp_path: Path) -> None:
    dtype, precision, options = MODES[mode]
    through, resumed = Run(dtype, precision, **options), Run(dtype, precision, **options)
    through.train(0, STEPS // 2)
    through.accelerator.save_state(str(tmp_path))
    through.train(STEPS // 2, STEPS)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(STEPS // 2, STEPS)
    assert_same_tree(resumed.outcome(), through.outcome())


@pytest.mark.parametrize("mode", ["bfloat16", "split", "no master"])
def test_prepare_in_mid_run_leaves_no_trace(mode: str) -> None:
    """It exports the optimizer's state and loads it again: every bit comes back, nothing is warned about."""
    dtype, _, options = MODES[mode]
    model = tiny_model(dtype)
    optimizer = hs.AdamW(model.parameters(), lr=1e-2, **options)
    loss_of(model, 0).backward()
    optimizer.step()
    before = held(optimizer)
    Accelerator(cpu=True).prepare(optimizer)
    assert_same(held(optimizer), before)


# ---- loss scaling ----------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:halfstep.*skipped:RuntimeWarning")
@pytest.mark.parametrize("scaler", [hs.LossScaler, torch.amp.GradScaler])
def test_a_step_that_is_skipped_inside_accelerates_scaler(scaler: Any) -> None:
    """accelerate takes a step for skipped if step() was not called; ours is, so the optimizer itself must be asked."""
    model = tiny_model()
    optimizer, scaler = hs.AdamW(model.parameters()), scaler("cpu", init_scale=2.0**16)
    Accelerator(cpu=True)
    wrapper = AcceleratedOptimizer(optimizer, scaler=scaler)
    for t, bad in enumerate([False, True, False]):
        before = copy.deepcopy(model.state_dict())
        loss = loss_of(model, t) * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        wrapper.step()
        assert bool(wrapper.optimizer.skipped) is bad
        assert not wrapper.step_was_skipped
        assert all(torch.equal(p, before[key]) is bad for key, p in model.state_dict().items())
        wrapper.zero_grad()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.filterwarnings("ignore:halfstep.*skipped:RuntimeWarning")
def test_our_scaler_with_the_optimizer_inside() -> None:
    """float16 weights, gradients of two micro-batches: the bits of a plain loop."""
    pace = {"init_scale": 2.0**20, "growth_interval": 2}
    run, scaler = Run(FLOAT16, accumulate=2), hs.LossScaler(**pace)
    model, plain = tiny_model(FLOAT16), hs.LossScaler(**pace)
    optimizer = hs.AdamW(model.parameters(), lr=1e-2)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    skips = 0
    for t in range(2 * STEPS):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(scaler.scale(loss_of(run.model, t)))
            if run.accelerator.sync_gradients:
                skipped = scaler.step(run.wrapper.optimizer)
                scaler.update()
                skips += int(skipped)
                if not skipped:
                    run.schedule.step()
                run.wrapper.zero_grad()
        (plain.scale(loss_of(model, t)) / 2).backward()
        if t % 2:
            if not plain.step(optimizer):
                schedule.step()
            plain.update()
            optimizer.zero_grad()
    assert 0 < skips < STEPS - 2
    assert scaler.state_dict() == plain.state_dict()
    expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same_tree({key: run.outcome()[key] for key in expected}, expected)


def test_a_registered_scaler_is_saved_with_the_run(tmp_path: Path) -> None:
    run, scaler = Run(FLOAT16), hs.LossScaler(init_scale=256.0, growth_interval=1)
    run.accelerator.register_for_checkpointing(scaler)
    scaler.scale(loss_of(run.model, 0)).backward()
    scaler.step(run.optimizer)
    scaler.update()
    run.accelerator.save_state(str(tmp_path))
    again, fresh = Run(FLOAT16), hs.LossScaler(growth_interval=1)
    again.accelerator.register_for_checkpointing(fresh)
    again.accelerator.load_state(str(tmp_path))
    assert fresh.get_scale() == 512.0
    assert fresh.state_dict() == scaler.state_dict()
