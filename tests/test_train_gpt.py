"""examples/train_gpt.py as a user runs it: every precision with both optimizers, what it prints, writes and refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_runs import Run, command, data, real_load, tiny, train_gpt, trained
from gpt import matmul
from matplotlib import image
from typer.testing import CliRunner

PRECISIONS = ["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", real_load)


@pytest.mark.parametrize("optimizer", ["halfstep", "torch"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_with_both_optimizers(precision: str, optimizer: str) -> None:
    run = Run(tiny(precision=precision, optimizer=optimizer))
    before = [p.detach().clone() for p in run.model.parameters()]
    trained(run)
    weights = list(run.model.parameters())
    assert {p.dtype for p in weights} == {p.grad.dtype for p in weights} == {DTYPES.get(precision, torch.float32)}
    assert not any(torch.equal(p, old) for p, old in zip(weights, before, strict=True) if p.ndim > 1)
    assert len(run.history.losses) == run.config.steps
    assert run.history.losses[-1] < run.history.losses[0]


@pytest.mark.parametrize(("attention", "named"), [("halfstep", "hs.attention"), ("sdpa", "torch's scaled_dot_product")])
def test_the_attention_is_the_one_asked_for(
    attention: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    ours = matmul.hs.attention
    monkeypatch.setattr(
        matmul.hs, "attention", lambda *qkv, causal: (calls.append(causal), ours(*qkv, causal=causal))[1]
    )
    metrics, output = command(tmp_path, "--steps", "2", "--compare-steps", "1", "--attention", attention)
    assert metrics["attention"] == metrics["config"]["attention"] == attention
    assert f"attention  {named}" in output
    assert calls == [True] * len(calls)
    assert bool(calls) == (attention == "halfstep")


def test_autocast_multiplies_in_16_bits() -> None:
    run = Run(tiny(precision="amp-bf16"))
    inputs, _ = real_load().batch(0, 0, 2, 32)
    with run.autocast():
        assert run.model(inputs).dtype == torch.bfloat16


def test_json_holds_the_run(tmp_path: Path) -> None:
    metrics, _ = command(tmp_path, "--steps", "3", "--compare-steps", "2", "--precision", "bf16", "--seed", "7")
    assert metrics["val_loss"] == metrics["validation"][-1][1]
    assert len(metrics["losses"]) == metrics["steps"] == 3
    assert all(math.isfinite(loss) for loss in metrics["losses"])
    assert set(metrics["seconds_per_step"]) == {"forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in metrics["seconds_per_step"].values())
    assert sum(metrics["seconds_per_step"].values()) <= metrics["seconds"]
    assert metrics["baselines"]["trigram"] < metrics["baselines"]["bigram"]
    assert (metrics["skipped"], metrics["grown"], metrics["loss_scale"]) == (0, 0, None)
    assert metrics["config"]["precision"] == "bf16"
    assert metrics["config"]["seed"] == 7
    assert metrics["matmul"]["kind"] == "upcast"
    assert metrics["versions"]["torch"] == torch.__version__
    assert metrics["comparison"].keys() == {"halfstep", "torch.optim"}


def test_bytes_per_parameter_are_the_tensors_own(tmp_path: Path) -> None:
    metrics, output = command(tmp_path, "--steps", "2", "--compare-steps", "1", "--master", "split")
    half, full = {"weights": 2.0, "gradients": 2.0}, {"exp_avg": 4.0, "exp_avg_sq": 4.0}
    assert metrics["bytes_per_parameter"] == {**half, "master": 2.0, **full}
    by_hand = metrics["comparison"]["torch.optim"]["bytes_per_parameter"]
    assert by_hand == {**half, "master": 4.0, "float32 gradients": 4.0, **full}
    for expected in ("validation loss", "forward", "backward", "optimizer", "14.00", "20.00"):
        assert expected in output


def test_both_optimizers_see_the_same_data() -> None:
    """Up to rounding their first losses agree: a comparison over other batches or another schedule would not."""
    text = real_load()
    windows = text.validation_windows(8, 32)
    ours, theirs = train_gpt.compare(tiny(precision="fp32"), 4, text, windows).values()
    assert ours["steps"] == theirs["steps"] == 4
    # Adam's first updates are lr * sign(g): rounding moves a loss by far less than one update does
    lr = tiny().lr
    assert abs(ours["val_loss"] - theirs["val_loss"]) < lr


def test_the_picture_shows_a_curve(tmp_path: Path) -> None:
    command(tmp_path, "--steps", "3", "--compare-steps", "0")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(tmp_path / "loss.png")
    blue = (pixels[..., 2] > pixels[..., 0] + 0.2).sum()
    assert blue > pixels.shape[1] / 2  # curves right across the picture; axes, grid and text are black or gray


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    _, output = command(tmp_path, "--steps", "1", "--compare-steps", "0")
    assert "needs matplotlib" in output
    assert not (tmp_path / "loss.png").exists()


def test_it_prints_progress_with_speed_and_time_left(tmp_path: Path) -> None:
    _, output = command(tmp_path, "--steps", "9", "--compare-steps", "0")
    lines = [line for line in output.splitlines() if "ETA" in line]
    assert len(lines) == 9
    assert all("tokens/s" in line and "validation" in line for line in lines)
    for expected in ("to beat", "bigram", "matmul     upcast: as asked for", "9/9"):
        assert expected in output


def test_overflow_retries_the_same_batch_or_drops_it() -> None:
    """2^24 overflows float16 a few times. Retrying then does what a run from a fitting scale does from the start."""
    retried = Run(tiny(precision="fp16", init_scale=2.0**24))
    with pytest.warns(RuntimeWarning, match="skipped"):
        trained(retried)
    assert retried.history.skipped > 0
    assert retried.history.batches == retried.history.updates == 6

    fitting = Run(tiny(precision="fp16", init_scale=2.0**24 / 2**retried.history.skipped))
    trained(fitting)
    assert fitting.history.skipped == 0
    assert fitting.history.losses == retried.history.losses

    dropped = Run(tiny(precision="fp16", init_scale=2.0**24, on_overflow="skip"))
    with pytest.warns(RuntimeWarning, match="skipped"):
        trained(dropped)
    assert dropped.history.updates == 6
    assert dropped.history.batches == 6 + dropped.history.skipped > 6
    assert dropped.history.losses[0] != fitting.history.losses[0]


def test_the_schedule_does_not_advance_on_a_skip() -> None:
    run = Run(tiny(precision="fp16", init_scale=2.0**30))
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert not train_gpt.train_step(run, real_load())
    assert (run.history.updates, run.history.skipped) == (0, 1)
    with pytest.warns(RuntimeWarning, match="skipped"):
        train_gpt.train_step(run, real_load())
    assert run.optimizer.param_groups[0]["lr"] == run.config.learning_rate(0) < run.config.learning_rate(1)


@pytest.mark.filterwarnings("ignore:halfstep:RuntimeWarning")
def test_a_broken_model_stops_with_the_reason() -> None:
    run = Run(tiny(precision="fp16"))
    with torch.no_grad():
        run.model.embedding.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"expected finite gradients, got 32 overflows in a row after update 0"):
        trained(run)
    run = Run(tiny(precision="bf16"))
    with torch.no_grad():
        run.model.embedding.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"expected a finite loss, got nan at update 1; lower --lr"):
        trained(run)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="--master split is halfstep's; use"):
        tiny(optimizer="torch", master="split")
    with pytest.raises(ValueError, match="torch's GradScaler refuses float16 gradients without a float32 master"):
        tiny(optimizer="torch", master="none", precision="fp16")
    with pytest.raises(ValueError, match="expected a width of heads x an even number, got 30 over 4 heads"):
        tiny(width=30, heads=4)


def test_unknown_precision_names_the_known_ones() -> None:
    app = train_gpt.typer.Typer()
    app.command()(train_gpt.main)
    done = CliRunner().invoke(app, ["--precision", "fp8"])
    assert done.exit_code == 2
    assert "amp-bf16" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--resume", "--out", "{folder}"], "expected a checkpoint to resume from"),
        (["--optimizer", "torch", "--master", "split"], "--master split is halfstep's"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_no_traceback(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    done = subprocess.run([sys.executable, str(SCRIPT), *given], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
