"""Loss parity of the training example: with masters, mixed precision learns what float32 learns; without, it does not.
hs.attention learns what torch's attention does.

123,000 parameters, 300 updates, 0.3 MB of text: every good run ends far under the bigram baseline, so the comparison is
between models that have learned. The learning rate falls to 2e-4, where an update is mostly smaller than half the
spacing of a bfloat16 weight: nearest rounding then gives back the old weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from example_runs import Config, Run, data, real_load, train_gpt

pytestmark = pytest.mark.xdist_group("parity")  # the runs are shared: keep them in one process
PARITY = 0.01
# 2^24 overflows float16 at once and comes down; 50 clean updates bring it up again
SETTINGS: dict[str, Any] = dict(
    width=64, layers=2, heads=2, context=64, batch=16, accumulate=1, steps=300, lr=2e-3, warmup=20,
    matmul="upcast", init_scale=2.0**24, growth_interval=50,
)  # fmt: skip


@lru_cache
def trained(**changes: Any) -> tuple[Run, float]:
    text = real_load()
    run = Run(Config(**SETTINGS, **changes))
    while run.history.updates < run.config.steps:
        train_gpt.train_step(run, text)
    return run, run.evaluate(text, text.validation_windows(1024, run.config.context))


def above_fp32(**changes: Any) -> float:
    return trained(**changes)[1] / trained(precision="fp32")[1] - 1


def test_fp32_learns() -> None:
    text = real_load()
    bigram = data.ngram_nats(text, text.validation_windows(1024, 64)[:, 1:])["bigram"]
    run, loss = trained(precision="fp32")
    assert loss < 0.95 * bigram
    assert loss < 0.6 * run.history.losses[0]


def test_bf16_with_masters_equals_fp32() -> None:
    assert abs(above_fp32(precision="bf16")) < PARITY


def test_bf16_with_split_masters_equals_fp32() -> None:
    assert abs(above_fp32(precision="bf16", master="split")) < PARITY


@pytest.mark.filterwarnings("ignore:halfstep:RuntimeWarning")  # the overflows that this run must have
def test_fp16_with_a_scaler_equals_fp32_through_skips_and_growth() -> None:
    assert abs(above_fp32(precision="fp16")) < PARITY
    history = trained(precision="fp16")[0].history
    assert history.skipped >= 1
    assert history.grown >= 1


@pytest.mark.filterwarnings("ignore:.*master=None and nearest rounding:UserWarning")
def test_bf16_without_masters_does_not() -> None:
    """The control: if this passed the bar, the bar would not be one."""
    assert above_fp32(precision="bf16", master="none") > PARITY


def test_the_curves_agree_too() -> None:
    """Not just the end: the mean training loss of every tenth of the run."""
    wide, narrow = (trained(precision=p)[0].history.losses for p in ("fp32", "bf16"))
    for start in range(0, len(wide), 30):
        ours, theirs = sum(narrow[start : start + 30]), sum(wide[start : start + 30])
        assert abs(ours / theirs - 1) < PARITY, f"updates {start} to {start + 30}"


@lru_cache
def first_losses(**changes: Any) -> torch.Tensor:
    """Of 40 updates."""
    run = Run(Config(**{**SETTINGS, "batch": 8, "steps": 40, "warmup": 10, **changes}))
    while run.history.updates < run.config.steps:
        train_gpt.train_step(run, real_load())
    return torch.tensor(run.history.losses, dtype=torch.float64)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_halfsteps_attention_trains_as_torchs_does(precision: str) -> None:
    """As closely as two runs with torch's, of which one adds each gradient up in two parts: what roundings do."""
    ours = first_losses(precision=precision, attention="halfstep")
    torchs = first_losses(precision=precision, attention="sdpa")
    in_parts = first_losses(precision=precision, attention="sdpa", batch=4, accumulate=2)
    distance, roundings = (ours - torchs).abs(), (in_parts - torchs).abs()
    assert roundings.max() > 0, "or there is nothing to compare with"
    assert distance.max() <= 2 * roundings.max()
    assert distance.mean() <= 2 * roundings.mean()
    assert ours[-1] < 0.7 * ours[0]
