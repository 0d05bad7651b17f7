"""The training example, imported from its folder, and tiny runs of it."""

from __future__ import annotations

import io
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from gpt import data  # noqa: E402
from gpt.config import Config  # noqa: E402
from gpt.run import Run  # noqa: E402

real_load = lru_cache(maxsize=1)(data.load)  # 12 MB, once for all tests

TINY: dict[str, Any] = dict(
    width=32, layers=1, heads=2, context=32, batch=4, accumulate=1, steps=6, lr=3e-3, warmup=2, matmul="upcast"
)


def tiny(**changes: Any) -> Config:
    """A model of 20,000 parameters that steps in milliseconds. `upcast`, so that no test depends on a CPU's matmuls."""
    return Config(**{**TINY, **changes})


def trained(run: Run, text: data.Text | None = None, saved: Path = Path("none"), save_every: int = 0) -> str:
    """Trains to the end and returns what was printed."""
    text = text or real_load()
    out = io.StringIO()
    windows = text.validation_windows(16, run.config.context)
    train_gpt.train(run, text, windows, Console(file=out, width=120), saved, save_every)
    return out.getvalue()


def command(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The script as typed, in this process, on little data: its JSON and its output."""
    app = typer.Typer()
    app.command()(train_gpt.main)
    little = ("--batch", "2", "--context", "32", "--validation", "512", "--matmul", "upcast", "--device", "cpu")
    places = ("--out", str(folder), "--json", str(folder / "metrics.json"))
    done = CliRunner().invoke(app, [*little, *places, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads((folder / "metrics.json").read_text()), done.output


def same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    """Nested dicts, lists and tensors are equal, tensors bit for bit."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same_bits(a, b, f"{where}[{number}]")
    elif isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(a, b), where
    else:
        assert ours == theirs, where
