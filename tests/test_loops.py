"""A plain training loop: torch's schedulers with halfstep's optimizer, stopped in mid-run and resumed from a file.

Guards: a scheduler whose writes (lr, with OneCycleLR also the betas) do not arrive, a resumed run that restarts the
schedule, the moments or the masters.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from loops import assert_same_tree, loss_of, tiny_model
from optimizer_runs import assert_as_good_as
from torch.optim import lr_scheduler

import halfstep as hs

STEPS, LR = 24, 2.0**-7
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=STEPS),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(o, T_max=STEPS - 8)],
        milestones=[8],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
}
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {}),
    "bfloat16": (BFLOAT16, {"max_grad_norm": 0.5}),
    "split": (BFLOAT16, {"master": "split"}),
    "no master": (BFLOAT16, {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16, "seed": 3}),
}


class Run:
    """One model, its optimizer and scheduler; `used` are the learning rates and betas of every step."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], schedule: str, dtype: torch.dtype, **options):
        self.model = tiny_model(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=LR, **options)
        self.scheduler = SCHEDULES[schedule](self.optimizer)
        self.used: list[tuple[float, tuple[float, float]]] = []

    def train(self, start: int, end: int) -> None:
        (group,) = self.optimizer.param_groups
        for t in range(start, end):
            loss = loss_of(self.model, t)
            loss.backward()
            self.used.append((group["lr"], tuple(group["betas"])))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(round(loss.item(), 1))  # coarse: rounding errors must not decide what a plateau is
            else:
                self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def saved(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rates_and_the_weights_are_torchs(schedule: str) -> None:
    """Gradients come from each run's own weights here; float32 errs as torch's float32 does, against float64."""
    ours = Run(hs.AdamW, schedule, FLOAT32)
    naive, exact = (Run(torch.optim.AdamW, schedule, dtype, foreach=False) for dtype in (FLOAT32, torch.float64))
    for run in (ours, naive, exact):
        run.train(0, STEPS)
    assert ours.used == naive.used == exact.used
    assert len(set(ours.used)) > 2
    assert_as_good_as(*(list(run.model.parameters()) for run in (ours, naive, exact)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_is_the_run(schedule: str, mode: str) -> None:
    dtype, options = MODES[mode]
    through, stopped, resumed = (Run(hs.AdamW, schedule, dtype, **options) for _ in range(3))
    through.train(0, STEPS)
    stopped.train(0, STEPS // 2)
    resumed.load(stopped.saved())
    resumed.train(STEPS // 2, STEPS)
    assert resumed.used == through.used[STEPS // 2 :]
    assert_same_tree(resumed.saved(), through.saved())


@pytest.mark.filterwarnings("ignore:halfstep.*skipped:RuntimeWarning")
def test_a_resumed_float16_run_with_a_scaler_is_the_run() -> None:
    """Overflows on both sides of the stop; the scheduler advances only where the optimizer did."""

    def fresh() -> tuple[Run, hs.LossScaler]:
        return Run(hs.AdamW, "OneCycleLR", FLOAT16), hs.LossScaler(init_scale=2.0**24, growth_interval=2)

    def train(run: Run, scaler: hs.LossScaler, start: int, end: int) -> int:
        skips = 0
        for t in range(start, end):
            scaler.scale(loss_of(run.model, t)).backward()
            skipped = scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            skips += bool(skipped)
            if not skipped:
                run.scheduler.step()
        return skips

    (through, scaler), (stopped, other), (resumed, third) = (fresh() for _ in range(3))
    skips = train(through, scaler, 0, STEPS)
    before = train(stopped, other, 0, STEPS // 2)
    resumed.load(stopped.saved())
    third.load_state_dict(other.state_dict())
    after = train(resumed, third, STEPS // 2, STEPS)
    assert before > 2
    assert after > 0
    assert before + after == skips
    assert third.state_dict() == scaler.state_dict()
    assert through.scheduler.state_dict()["last_epoch"] == STEPS - skips
    assert_same_tree(resumed.saved(), through.saved())
