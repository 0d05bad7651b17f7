"""README's first screen is true: its code runs, its bytes are those of real states, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep as hs

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    *examples, _flat = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the last: interpreted/test_flat.py
    assert len(examples) == 6
    script = tmp_path / "example.py"
    script.write_text("".join(examples), encoding="utf-8")
    result = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    norm, skipped, *plan = result.stdout.split()
    assert "kept" in plan
    assert float(norm) > 0
    assert skipped == "False"


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("`hs.AdamW(params)`", {}),
        ('`master="split"`:', {"master": "split"}),
        ('`master="split", state_dtype=', {"master": "split", "state_dtype": torch.bfloat16}),
        ("`master=None, stochastic_rounding=True` ", {"master": None, "stochastic_rounding": True}),
        (
            "`master=None, stochastic_rounding=True, state_dtype=",
            {"master": None, "stochastic_rounding": True, "state_dtype": torch.bfloat16},
        ),
    ],
)
def test_bytes_per_parameter(label: str, options: dict) -> None:
    weight = torch.nn.Parameter(torch.ones(1024, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = hs.AdamW([weight], **options)
    optimizer.step()
    tensors = [weight, weight.grad, *(v for k, v in optimizer.state[weight].items() if k != "step")]
    measured = sum(t.numel() * t.element_size() for t in tensors) / weight.numel()
    (row,) = [line for line in README.splitlines() if line.startswith("| ") and label in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert float(cells[-1]) == measured
    parts = [part for cell in cells[1:-1] for part in cell.split("+") if part.strip() != "-"]
    assert sum(map(float, parts)) == measured


def test_commands_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for verb in re.findall(r"make ([a-z]+)\b", README.split("##")[0]):
        assert verb in targets, verb
    assert {"train", "test", "lint", "bench", "gate", "gpu", "versions", "clean"} <= set(targets)
    assert (ROOT / "examples" / "train_gpt.py").exists()
