"""Checkpoints of the training example: a killed and resumed run ends with the bits of one that ran through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import EXAMPLES, Run, real_load, same_bits, tiny, train_gpt, trained
from gpt import checkpoint, matmul

TIMES = ("seconds", "phases")  # all that may differ between two equal runs


def saved(path: Path) -> dict[str, Any]:
    state = torch.load(path, weights_only=True)
    state["history"] = {key: value for key, value in state["history"].items() if key not in TIMES}
    return state


def script(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """60 updates in a process of their own, a checkpoint every 10; overflows and a growing scale on the way."""
    options = (
        "--precision fp16 --steps 60 --batch 1 --context 32 --accumulate 2 --checkpoint-every 10 --compare-steps 0 "
        "--validation 512 --init-scale 16777216 --growth-interval 8 --matmul upcast --device cpu"
    )
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *options.split(), "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def test_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    victim = script(killed)
    while not (killed / "checkpoint.pt").exists():
        assert victim.poll() is None, victim.communicate()[1].decode()
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert saved(killed / "checkpoint.pt")["history"]["updates"] < 60  # it was in mid-run

    finish(script(through))
    finish(script(killed, "--resume"))
    expected = saved(through / "checkpoint.pt")
    assert expected["history"]["updates"] == 60
    assert expected["history"]["skipped"] > 0
    assert expected["history"]["grown"] > 0
    same_bits(saved(killed / "checkpoint.pt"), expected)


@pytest.mark.parametrize(
    "settings",
    [
        dict(precision="bf16"),
        dict(precision="bf16", master="split"),
        dict(precision="fp32"),
        dict(precision="amp-fp16", growth_interval=2),
        dict(precision="bf16", optimizer="torch"),
        dict(precision="fp16", optimizer="torch", growth_interval=2),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_resumed_from_the_middle_ends_with_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tiny(**settings))
    for _ in range(3):
        assert train_gpt.train_step(run, real_load())
    torch.rand(5)  # what a dropout would have drawn
    run.save(tmp_path / "middle.pt")
    trained(run)
    run.save(tmp_path / "through.pt")

    torch.manual_seed(99)  # the random state is the checkpoint's, not this process's
    resumed = Run.resume(tmp_path / "middle.pt", tiny(**settings))
    assert resumed.history.updates == 3
    trained(resumed)
    resumed.save(tmp_path / "resumed.pt")
    same_bits(saved(tmp_path / "resumed.pt"), saved(tmp_path / "through.pt"))


def test_a_resumed_run_multiplies_as_the_first_part_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the CPU may fall out otherwise the second time."""
    config, speeds = tiny(precision="bf16", matmul="auto"), {torch.float32: 40.0, torch.bfloat16: 80.0}
    monkeypatch.setattr(matmul, "_gflops", speeds.__getitem__)
    Run(config).save(tmp_path / "checkpoint.pt")
    speeds[torch.bfloat16] = 1.0
    assert Run(config).matmul.kind == "upcast"
    assert Run.resume(tmp_path / "checkpoint.pt", config).matmul.kind == "native"


def test_a_write_that_dies_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny())
    run.save(tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def torn(_state: Any, file: Any) -> None:
        file.write(before[:100])
        raise OSError("no space left on device")

    trained(run)
    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space"):
        run.save(tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert Run.resume(tmp_path / "checkpoint.pt", run.config).history.updates == 0


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda source, target: (events.append("replace"), rename(source, target)))
    checkpoint.save(tmp_path / "checkpoint.pt", {})
    assert events == ["fsync", "replace", "fsync"]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_other_settings_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(FileNotFoundError, match=r"expected a checkpoint to resume from at .*; run without --resume"):
        Run.resume(path, tiny())
    Run(tiny()).save(path)
    changes = r"steps=6 \(now 7\), lr=0.003 \(now 0.1\)"
    with pytest.raises(
        ValueError, match=rf"expected the settings .* was written with: {changes}; or use another --out"
    ):
        Run.resume(path, replace(tiny(), steps=7, lr=0.1))
