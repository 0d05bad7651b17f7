"""The training example's flags about memory, 20 steps each: they change what is kept, and not a bit of the run.

Guards: dropped or doubled activations, a budget that is not kept, an offload that loses a tensor, batches of an
accumulated update that weigh wrongly or are summed up in 16 bits.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import Run, command, real_load, same_bits, tiny, trained
from gpt import memory
from gpt.memory import Memory
from typer import BadParameter

import halfstep as hs
from halfstep.activations.offload import ActivationOffload
from halfstep.transfers.host import HostTransfers

SIZES: dict[str, Any] = dict(layers=3, steps=20, precision="bf16")
BUDGET = 40_000  # between what "layer" and what "none" keeps here


def run(how: Memory, **changes: Any) -> Run:
    made = Run(tiny(**SIZES | changes), how)
    made.measure_activations(real_load())
    trained(made)
    return made


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(Memory())


def assert_same_run(ours: Run, theirs: Run) -> None:
    assert len(ours.history.losses) == 20
    assert ours.history.losses == theirs.history.losses
    same_bits(ours.model.state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize("recompute", ["layer", "selective", f"{BUDGET / 1000:g}kB"])
def test_recomputation_changes_what_is_kept_and_nothing_else(recompute: str, plain: Run) -> None:
    ours = run(Memory(recompute))
    assert_same_run(ours, plain)
    assert ours.activations.bytes < plain.activations.bytes


def test_a_budget_lies_between_and_is_kept(plain: Run) -> None:
    layer, budget = run(Memory("layer"), steps=1), run(Memory(f"{BUDGET}"), steps=1)
    assert layer.activations.bytes < budget.activations.bytes < plain.activations.bytes
    plan = budget.recomputation.plan
    assert plan.least < plan.bytes <= BUDGET
    assert budget.activations.bytes - layer.activations.bytes == plan.bytes - plan.least


def test_offloaded_activations_come_back(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two places in the host's memory, with copies that end at random times."""
    monkeypatch.setattr(memory, "MOVED_BYTES", 1)
    to_host = partial(hs.offload_activations, transfers=HostTransfers(seed=0))
    monkeypatch.setattr(memory.hs, "offload_activations", to_host)
    for recompute in ("none", "layer"):
        ours = run(Memory(recompute, offload=True))
        assert_same_run(ours, plain)
        moved = ours.around_forward
        assert isinstance(moved, ActivationOffload)
        assert moved.bytes > moved.fetched_bytes > 0  # the measured forward had no backward


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "amp-bf16"])
def test_four_batches_make_one_update(precision: Any) -> None:
    """The first one to the rounding of the gradients' dtype; the curve stays beside it."""
    whole = run(Memory(), precision=precision, batch=8, init_scale=256.0)
    parts = run(Memory("layer"), precision=precision, batch=2, accumulate=4, init_scale=256.0)
    assert isinstance(parts.accumulation, hs.Accumulator)
    assert parts.history.batches == 80
    dtype = whole.config.matmul_dtype
    bound = 8 * 32 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    assert math.isclose(parts.history.losses[0], whole.history.losses[0], rel_tol=bound)
    assert parts.history.losses[-1] < parts.history.losses[0] - 1
    sums = parts.result()["bytes_per_parameter"].get("float32 sums of gradients")
    assert sums == (4.0 if parts.config.weight_dtype != torch.float32 else None)


def test_what_the_command_says(tmp_path: Path) -> None:
    steps = ("--steps", "20", "--compare-steps", "0")
    metrics, output = command(tmp_path, *steps, "--recompute", "layer", "--accumulate", "2", "--offload-activations")
    assert metrics["recompute"] == "layer"
    assert f"activations  {metrics['activation_bytes'] / 1e3:.1f} kB kept" in output
    assert "recomputed: layer" in output
    assert "offload    nothing moved; stayed: on the host" in output


def test_a_resumed_run_may_keep_less(tmp_path: Path, plain: Run) -> None:
    half = Run(tiny(**SIZES))
    with pytest.raises(KeyboardInterrupt):
        _interrupted(half, tmp_path / "saved")
    ours = Run.resume(tmp_path / "saved", tiny(**SIZES), Memory("layer"))
    trained(ours)
    assert_same_run(ours, plain)


def _interrupted(run: Run, saved: Path) -> None:
    save = run.save

    def save_and_stop(path: Path) -> None:
        save(path)
        raise KeyboardInterrupt

    run.save = save_and_stop  # type: ignore[method-assign]
    trained(run, saved=saved, save_every=10)


@pytest.mark.parametrize(
    ("recompute", "sentence"),
    [("lots", "--recompute takes none, layer, selective or a number of bytes; .* got 'lots'"), ("9", "too small")],
)
def test_a_mistake_is_a_sentence(recompute: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=sentence):
        command_raising(tmp_path, recompute)


def command_raising(folder: Path, recompute: str) -> None:
    import train_gpt

    train_gpt.main(
        steps=1, batch=2, context=32, matmul="upcast", device="cpu", out=folder, compare_steps=0, recompute=recompute
    )
