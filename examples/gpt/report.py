"""What a run leaves behind: the time of each phase, a table, a picture of its curves, one JSON object."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import halfstep

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")


class Clock:
    """Seconds of each phase, step by step. Waits for the device at both ends, so a phase pays for its own work."""

    def __init__(self, device: torch.device, steps: list[dict[str, float]]):
        self.device = device
        self.steps = steps
        self.current = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.current[phase] += time.perf_counter() - start

    def end_step(self) -> None:
        self.steps.append(self.current)
        self.current = dict.fromkeys(PHASES, 0.0)

    def medians(self) -> dict[str, float]:
        return {phase: statistics.median(step[phase] for step in self.steps) for phase in PHASES}

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One column for each run's `Run.result()`."""
    runs = list(results.values())
    shown = Table()
    shown.add_column("")
    for name, run in results.items():
        shown.add_column(f"{name}\n{run['steps']:,} updates", justify="right")

    def row(name: str, values: list[float | None], form: str) -> None:
        shown.add_row(name, *("-" if value is None else format(value, form) for value in values))

    row("validation loss, nats per byte", [run["val_loss"] for run in runs], ".4f")
    shown.add_section()
    shown.add_row("milliseconds per step (medians)")
    for phase in PHASES:
        row(f"  {phase}", [run["seconds_per_step"][phase] * 1e3 for run in runs], ".2f")
    row("  all", [sum(run["seconds_per_step"].values()) * 1e3 for run in runs], ".2f")
    shown.add_section()
    shown.add_row("bytes per parameter")
    for part in dict.fromkeys(part for run in runs for part in run["bytes_per_parameter"]):
        row(f"  {part}", [run["bytes_per_parameter"].get(part) for run in runs], ".2f")
    row("  all", [sum(run["bytes_per_parameter"].values()) for run in runs], ".2f")
    return shown


def metrics(run: Any, results: dict[str, dict[str, Any]], baselines: dict[str, float]) -> dict[str, Any]:
    """Everything about a finished run, for `--json`. Losses in nats per byte, times in seconds (medians per step)."""
    history, config = run.history, run.config
    this, *others = results.items()
    return {
        **this[1],
        "losses": history.losses,
        "validation": history.validation,
        "baselines": baselines,
        "skipped": history.skipped,
        "grown": history.grown,
        "loss_scale": run.scaler.get_scale() if config.scaled else None,
        "seconds": history.seconds,
        "tokens_per_second": config.tokens_per_step * history.updates / history.seconds,
        "parameters": run.parameters,
        "matmul": {"kind": run.matmul.kind, "reason": run.matmul.reason},
        "attention": run.matmul.attends,
        "recompute": run.memory.recompute,
        "activation_bytes": run.activations.bytes,
        "offload_activations": run.memory.offload,
        "comparison": dict(others),
        "config": vars(config),
        "versions": {
            "halfstep": halfstep.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        },
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")


def picture(path: Path, losses: list[float], validation: list[tuple[int, float]], baselines: dict[str, float]) -> None:
    """The loss curves as a PNG. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, so that training does not need it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
    steps, values = zip(*validation, strict=True)
    axes.plot(steps, values, color="tab:blue", marker="o", markersize=4, label="validation")
    for (name, loss), style in zip(baselines.items(), ("--", ":"), strict=True):
        axes.axhline(loss, color="gray", linestyle=style, label=f"{name} {loss:.2f}")
    # the first updates, far above the rest, would squeeze it
    axes.set(xlabel="update", ylabel="nats per byte", ylim=(None, 1.2 * max(*values, *baselines.values())))
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
