"""The benches of a GPU where there is none: jobs on CPU tensors, a clock with a torch.cuda that does nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, fake_profile
from torch import Tensor

from halfstep.bench import (
    attention,
    backends,
    cases,
    clocks,
    command,
    gpu_clock,
    gradient_jobs,
    harness,
    jobs,
    machine,
    table,
)
from halfstep.ops import backend, native_cpu

pytest.importorskip("halfstep._cpu", reason="CPU tensors take the place of the GPU's here")
CPU = torch.device("cpu")
NAMES = ["void halfstep::update_kernel<int>()", "Memcpy DtoH", "Memset", "Optimizer.step#AdamW.step", "other_kernel"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    fakes = fake_cuda(monkeypatch)
    module: Any = ModuleType("halfstep._cuda")
    module.archs, module.device_count = "90", lambda: 2
    monkeypatch.setattr(machine, "gpu", lambda: CPU)
    monkeypatch.setattr(backend, "native_cuda_module", lambda: (module, None))
    monkeypatch.setattr(gpu_clock, "profile", fake_profile(NAMES))
    monkeypatch.setattr(gpu_clock, "_PROBE_BYTES", 2**20)
    monkeypatch.setattr(backend, "_triton_for", lambda device: (native_cpu, None))
    backend._native_for_cuda.cache_clear()
    yield fakes
    backend._native_for_cuda.cache_clear()  # what it says of the devices here is not true elsewhere


@pytest.mark.parametrize(
    ("name", "comparisons"), [("optimizer", jobs.comparisons), ("cast", gradient_jobs.comparisons)]
)
def test_a_quick_run(
    name: str, comparisons: command.Comparisons, cuda: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run_bench(name, "", comparisons, ["--device", "cuda", "--quick", "--rounds", "1", "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / f"{name}-gpu.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        assert row["skipped"] is None
        assert (row["device"], row["gpu"], row["archs"], row["capability"]) == ("cuda", "Fake", "90", "9.0")
        assert {"driver", "cuda", "commit", "date", "command", "versions"} <= row.keys()
        assert row["median_ms"] == row["device_ms"] == 1.0
        assert row["host_us"] > 0
        assert row["host_busy_us"] > 0
        probe = row["provider"] == harness.PROBE
        assert row["launches"] == (None if probe else 2), "kernels alone are counted"
        assert not probe or row["gb_per_s"] == pytest.approx(2 * 2**20 / 1e-3 / 1e9)
    if name == "optimizer":
        providers = {row["provider"] for row in rows if row["what"] == "bf16 phase"}
        assert {"halfstep", "halfstep, split master", "torch", "torch, expert", "torch, foreach"} <= providers
        assert {"halfstep, Triton", "halfstep, Triton, split master", "halfstep, Triton, kernels alone"} <= providers
    else:
        assert {"halfstep", "halfstep, Triton"} <= {row["provider"] for row in rows if row["what"] == "unscale_ f32"}
    shown = capsys.readouterr().out
    assert "Fake, driver" in shown
    assert "kernels" in shown
    assert "GPU ms" in shown
    assert "Llama-7B-shaped" in table.markdown(rows)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_a_quick_run_of_attention(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)  # minutes, on CPU tensors
    options = ["--device", "cuda", "--quick", "--rounds", "1", "--out", str(tmp_path), "--only", "length 64"]
    attention.main(options)
    rows = table.read(tmp_path / "attention-gpu.jsonl")
    directions = [f"{job}, {way}" for job in ("causal", "all visible") for way in ("forward", "backward")]
    assert list(dict.fromkeys(row["what"] for row in rows)) == directions
    missing = {row["provider"]: row["skipped"] for row in rows if row["skipped"]}
    assert {*missing} == {"torch SDPA, efficient", "torch SDPA, cudnn", "FlexAttention", "flash-attn"}, "on a CPU"
    for row in rows:
        if not row["skipped"]:
            products = 2 * 2 * 64 * 64 * 64 * (1 if "causal" in row["what"] else 2)
            assert row["tflops"] == pytest.approx(2 * products * (2.5 if "back" in row["what"] else 1) / 1e-3 / 1e12)
            assert row["extra_bytes"] == 2000
            assert row["error"] <= 1
    shown = capsys.readouterr().out
    assert "TFLOP/s" in shown
    assert "extra MiB" in shown


@pytest.mark.parametrize(("missing", "left"), [("_triton_for", "halfstep"), ("_native_for", "halfstep, Triton")])
def test_a_backend_that_is_not_there_is_skipped_and_says_so(
    missing: str, left: str, cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The other one's figures are not its figures, and the run is no failure."""
    monkeypatch.setattr(backend, missing, lambda device: (None, "it is not there"))
    options = ["--device", "cuda", "--quick", "--rounds", "1", "--out", str(tmp_path), "--only", "100 tensors"]
    command.run_bench("cast", "", gradient_jobs.comparisons, options)
    rows = [
        row for row in table.read(tmp_path / "cast-gpu.jsonl") if row["provider"] in ("halfstep", "halfstep, Triton")
    ]
    assert {row["provider"] for row in rows} == {"halfstep", "halfstep, Triton"}
    for row in rows:
        assert (row["skipped"] is None) == (row["provider"] == left)
    (gone,) = {row["provider"] for row in rows if row["skipped"]}
    assert rows[0]["missing"] == {"native": None, "triton": None} | {
        "native" if missing == "_native_for" else "triton": "it is not there"
    }
    assert f"{gone} was skipped: it is not there" in capsys.readouterr().out
    assert f"{gone} was skipped: it is not there." in table.markdown(table.read(tmp_path / "cast-gpu.jsonl"))


def test_each_provider_calls_its_own_kernels(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"native": Counting(), "triton": Counting()}
    monkeypatch.setattr(backends, "kernels_of", lambda name, device: (chosen[name], None))
    (comparison,) = backends.with_each(gradient_jobs.comparisons(cases.on_gpu(CPU, 0, quick=True)[-1:], "unscale_"))
    before = backend._override
    for provider in comparison.providers:
        counts = [one.calls for one in chosen.values()]
        provider.make()()
        made = [one.calls - count for one, count in zip(chosen.values(), counts, strict=True)]
        assert made == {"halfstep": [1, 0], "halfstep, Triton": [0, 1], "torch": [0, 0]}[provider.name]
        assert backend._override is before


class Counting:
    """The CPU's kernels, counting what they are asked for."""

    name, calls = "native", 0

    def __getattr__(self, name: str) -> Any:
        if name == "read_list":
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return getattr(native_cpu, name)(*args, **options)

        return call


def test_each_call_is_timed_idle_and_behind_a_pause(cuda: Any) -> None:
    calls: list[str] = []

    class Job(clocks.Runner):
        def __call__(self) -> None:
            calls.append("job")

        def prepare(self) -> None:
            calls.append("prepare")

        def results(self) -> dict[str, list[Tensor]]:
            return {}

    cuda["_sleep"].side_effect = lambda cycles: calls.append("pause")
    cuda["synchronize"].side_effect = lambda device: calls.append("wait")
    cuda["Event"].return_value.record.side_effect = lambda: calls.append("event")
    sample = gpu_clock.CudaClock(CPU).time(Job())
    timed = ["event", "job", "event", "wait"]
    assert calls == ["prepare", "wait", *timed, "prepare", "wait", "pause", *timed]
    assert (sample.wall, sample.device) == (1e-3, 1e-3)


def test_what_fails_is_left_out_and_said_at_the_end(cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One provider must not cost the figures of the others; the exit status tells."""
    check = harness.check

    def fails(comparison: Any, provider: Any, runner: Any) -> float:
        if provider.name == "torch":
            raise harness.WrongResultError("torch gives weight[0] = 1")
        if provider.name == "torch, expert":
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return check(comparison, provider, runner)

    monkeypatch.setattr(harness, "check", fails)
    options = [
        "--device",
        "cuda",
        "--quick",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
        "--only",
        "tensors of 64-4,096: bf16",
    ]
    with pytest.raises(SystemExit, match=r"not timed because of failures: .*bf16 phase: torch;.*: torch, expert$"):
        command.run_bench("optimizer", "", jobs.comparisons, options)
    rows = {row["provider"]: row for row in table.read(tmp_path / "optimizer-gpu.jsonl")}
    assert rows["torch"]["skipped"] == "FAILED: torch gives weight[0] = 1"
    assert rows["torch, expert"]["skipped"] == "FAILED: CUDA out of memory."
    assert rows["halfstep"]["median_ms"] == 1.0


def test_without_a_gpu_the_bench_says_so() -> None:
    with pytest.raises(SystemExit, match="torch finds no CUDA device here"):
        command.run_bench("cast", "", gradient_jobs.comparisons, ["--device", "cuda", "--quick"])


def test_without_kernels_for_it_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    monkeypatch.setattr(backend, "_native_for", lambda device: (None, "halfstep._cuda is not built"))
    monkeypatch.setattr(backend, "_triton_for", lambda device: (None, "Triton is not installed"))
    reason = r"no kernels for this GPU .native: halfstep._cuda is not built; triton: Triton is not installed.*doctor"
    with pytest.raises(SystemExit, match=reason):
        command.run_bench("cast", "", gradient_jobs.comparisons, ["--device", "cuda", "--quick"])


def test_the_cases_fit_the_memory() -> None:
    assert cases.llama(32).elements == 6_738_415_616, "the published size of Llama-7B"
    for memory in (2**33, 2**37, 2**38):
        chosen = cases.on_gpu(CPU, memory, quick=False)
        largest = max(case.elements for case in chosen)
        assert largest * 100 <= max(memory, 125e6 * 100)
        assert [case.name for case in chosen if "Llama" in case.name or memory == 2**33]
        assert {case.gpu for case in chosen} == {True}
