"""`make gpu` and tests/gpu where there is no GPU: the tests hold under the emulator, the rest is not misspelt.

Guards: a test that would fail on a GPU because of itself, one part that hides the others, a run without an end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_run
import pytest
import torch
from fake_cuda import fake_cuda, fake_profile

from halfstep.bench import command
from halfstep.ops import backend, triton_gpu

sys.path.append(str(Path(__file__).parent / "gpu"))

import cuda_device  # pyright: ignore[reportMissingImports]

pytest.importorskip("halfstep._cpu", reason="the CPU's kernels are the judge of the others")
# Of the kernels' own tests a few: under the emulator they are run for themselves
CHOSEN = (
    "not kernels or (lists_kernels and (cast_of_lists or not_aligned or test_accumulate)) or "
    "(optimizer_kernels and (three_launches or rate_on_the_device or changes_no_bit))"
)


BENCHES = ("attention", "optimizer", "cast", "activations")
TRITON = {"TRITON_INTERPRET": "1"}
# Interpreted, a step takes about a second: few modes of what is about the device. tests/interpreted has the rest
INTERPRETED = (
    "a_learning_rate_on_the_device or gpu_attention and (test_launches or its_own_dropout "
    "or test_core and packed and bfloat16) "
    "or not kernels and not gpu_attention and not (gpu_steps and not (cast or under_the or misaligned)) "
    "and not amsgrad and not states and not dtype1 and not float64 "
    "and not Adam] and not 10- and not (layouts and (plain or transposed or gaps)) "
    "and not ((test_steps or replays_are or step_waits or step_runs or of_a_step) and not split)"
)


def pytest_of_gpu(root: Path, *options: str, **environment: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "--override-ini=addopts=-ra",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *options], cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "stand_in", [(CHOSEN, {}), (INTERPRETED, TRITON)], ids=["native, emulated", "Triton, interpreted"]
)
def test_the_gpus_tests_hold_where_there_is_none(root: Path, stand_in: tuple[str, dict[str, str]]) -> None:
    status, told = pytest_of_gpu(root, "--stand-in", "-k", stand_in[0], **stand_in[1])
    assert status == 0, told[-4000:]
    assert "skipped" not in told
    assert "xfailed" not in told


def test_without_a_gpu_all_are_skipped_for_one_reason(root: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, told = pytest_of_gpu(root)
    assert status == 0, told[-4000:]
    (reason,) = [line for line in told.splitlines() if line.startswith("SKIPPED")]
    assert "tests/gpu: torch finds no GPU here" in reason
    assert "passed" not in told


@pytest.mark.parametrize("environment", [{}, TRITON], ids=["native", "Triton"])
def test_the_sanitizers_have_something_to_do(root: Path, environment: dict[str, str]) -> None:
    status, told = pytest_of_gpu(root, "--stand-in", "--collect-only", "-k", gpu_run.SANITIZED, **environment)
    assert status == 0, told[-4000:]
    chosen = [line for line in told.splitlines() if "::" in line]
    assert 5 <= len(chosen) <= 12
    assert all(("[triton" if environment else "[native") in line for line in chosen)
    for part in ("test_accumulate", "test_statistics", "split", "no master"):
        assert any(part in line for line in chosen), part


def test_tests_of_one_backend_are_not_there_for_the_other(root: Path) -> None:
    collected = {}
    for name in ("native", "triton"):
        status, told = pytest_of_gpu(root, "--collect-only", "--backend", name)
        assert status == 0, told[-4000:]
        collected[name] = {line for line in told.splitlines() if "::" in line}
    assert not any("triton" in line for line in collected["native"])
    assert not any("[native" in line for line in collected["triton"])
    native, triton = collected["native"], {line.replace("[triton", "[native") for line in collected["triton"]}
    assert len(native & triton) > 200
    assert all("test_gpu_triton" in line or gpu_run.ATTENTION in line for line in triton - native)
    assert all("kernels.py" in line and ("launch" in line or "mixed" in line) for line in native - triton)


# ---- the device, with a torch.cuda that does nothing -----------------------------------------------------------------
@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return fake_cuda(monkeypatch)


def test_memory_streams_and_waits_of_a_device(cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = cuda_device.CudaDevice(torch.device("cuda", 0), "native")
    assert [device.index for device in gpu.others] == [1]
    with gpu.no_waits():
        cuda["set_sync_debug_mode"].assert_called_with("error")
    cuda["set_sync_debug_mode"].assert_called_with(0)
    with gpu.used(), gpu.side_stream():
        cuda["_sleep"].assert_called_once()
        cuda["stream"].assert_called_once_with(cuda["Stream"].return_value)
    assert cuda["Stream"].return_value.wait_stream.called
    cuda["current_stream"].return_value.wait_stream.assert_called_once_with(cuda["Stream"].return_value)
    assert gpu.allocated() == 1000
    assert gpu.peak_of(lambda: None) == 2000
    assert gpu.free_bytes() == 100 * 2**30
    done: list[int] = []
    replay = gpu.capture(lambda: done.append(1))
    assert done == [1]
    cuda["graph"].assert_called_once_with(cuda["CUDAGraph"].return_value)
    replay()
    cuda["CUDAGraph"].return_value.replay.assert_called_once_with()
    with gpu.unordered_stream():
        assert cuda["stream"].call_count == 2
    cuda["Stream"].return_value.synchronize.assert_called_once_with()
    monkeypatch.setattr(backend, "native_cuda_module", lambda: (object(), None))
    assert gpu.mirror().device == gpu.device


def test_the_device_with_tritons_kernels(cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found as on a machine that has no others."""
    gpu = cuda_device.CudaDevice(torch.device("cuda", 0), "triton")
    theirs = triton_gpu.TritonBackend(torch.device("cpu"))
    monkeypatch.setattr(triton_gpu, "why_not", lambda device: None)
    monkeypatch.setattr(triton_gpu, "of_device", lambda device: theirs)
    monkeypatch.setattr(backend, "_native_for_cuda", lambda device: ("native", None))
    assert backend.choose(gpu.device) == "native"
    with gpu.used():
        assert backend.choose(gpu.device) is theirs
        assert backend.choose(torch.device("cpu")).name == "native"
    assert gpu.mirror().backend is theirs


def test_halfsteps_kernels_are_counted(cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["void halfstep::update<1>(int)", "update_kernel", "grad_stats_kernel", "prologue_kernel", "cast_kernel"]
    gpu = cuda_device.CudaDevice(torch.device("cpu"), "native")
    others = ["vectorized", "Memset", "void at::native::elementwise_kernel<1>()"]
    monkeypatch.setattr(cuda_device, "profile", fake_profile(ours + others))
    with gpu.launches() as made:
        pass
    assert made == ours


# ---- make gpu --------------------------------------------------------------------------------------------------------
def part(name: str, script: str, seconds: int = 60) -> gpu_run.Part:
    return gpu_run.Part(name, [sys.executable, "-c", script], seconds)


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = gpu_run.Part("d", ["env", "A=1", "echo", "Device not supported"], 60)
    chosen = [
        part("a", "import sys; print('said', flush=True); sys.exit(3)"),
        part("b", "import time; print('begun', flush=True); time.sleep(100)", seconds=6),
        part("c", "print('reached')"),
        refused,
    ]
    outcomes = gpu_run.run(chosen, tmp_path / "log.txt")
    results = [outcome.result for outcome in outcomes]
    assert results[:3] == ["failed with status 3", "ended after 6 s", "passed"]
    assert results[3].startswith("not possible: echo says")
    assert [outcome.failed for outcome in outcomes] == [True, True, False, False]
    shown = capsys.readouterr().out
    for words in ("said", "begun", "reached"):
        assert words in (tmp_path / "log.txt").read_text("utf-8").splitlines()
        assert words in shown.splitlines()


def test_all_parts_together_have_a_limit(tmp_path: Path) -> None:
    chosen = [part("long", "import time; time.sleep(100)"), part("late", "print(1)")]
    outcomes = gpu_run.run(chosen, tmp_path / "log.txt", budget=7)
    assert [outcome.result for outcome in outcomes] == ["ended after 7 s", "not run: no time was left"]
    assert outcomes[1].failed


@pytest.mark.parametrize("tool", ["/opt/compute-sanitizer", None])
@pytest.mark.parametrize("missing", [[], ["native"], ["triton"]], ids=str)
def test_the_parts(tool: str | None, missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests first, then the sanitizers if they are there, then the benches; their options exist."""
    monkeypatch.setattr(gpu_run.shutil, "which", lambda name: tool)
    monkeypatch.setattr(gpu_run, "why_not", lambda name: "not built" if name in missing else None)
    chosen, left_out = gpu_run.parts(tmp_path)
    there = [name for name in ("native", "triton") if name not in missing]
    checks = {"native": ["memcheck", "racecheck", "initcheck"], "triton": ["memcheck"]} if tool else {}
    expected = [test for name in there for test in (f"tests, {name}", *(["tests, attention"] * (name == "triton")))]
    expected += [f"{check}, {name}" for name in there for check in checks.get(name, [])]
    assert [p.name for p in chosen] == [*expected, *(f"bench {name}" for name in BENCHES)]
    assert [line for line in left_out if "not built" in line] == [
        f"the tests of the backend {name!r} were not run: not built" for name in missing
    ]
    assert any("compute-sanitizer" in line for line in left_out) == (tool is None)
    assert sum(p.seconds for p in chosen) <= gpu_run.BUDGET + 100, "each limit is above what the part takes"
    for p in chosen:
        if p.name.startswith("tests, "):
            of_attention = p.name == "tests, attention"
            backend_of = "triton" if of_attention else p.name.removeprefix("tests, ")
            assert p.command[p.command.index("--backend") + 1] == backend_of
            assert (p.command[-1] == gpu_run.ATTENTION) == of_attention, "each test in one of the parts"
            assert p.command[-1].removeprefix("not ") == gpu_run.ATTENTION
    for p in chosen[-len(BENCHES) :]:
        options = p.command[p.command.index("bench") + 2 :]
        given = command._parser("x", "").parse_args(options)
        assert (given.device, given.out, given.quick) == ("cuda", tmp_path, False)


def test_a_failed_part_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "run": "1", "provider": "halfstep", "skipped": None, "case": "GPT-2-like", "what": "bf16 phase",
        "median_ms": 1.25, "of_probe": 0.5, "speedup": 2.0, "host_us": 80.4, "launches": 3,
    }  # fmt: skip
    rows = [{**row, "run": "0", "median_ms": 9.0}, row, {**row, "provider": "halfstep, split", "of_probe": None}]
    rows.append({**row, "provider": "halfstep, Triton", "skipped": "Triton is not installed"})
    (tmp_path / "optimizer-gpu.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    monkeypatch.setattr(gpu_run.gpu_state, "main", lambda: 0)
    for script, status in (("pass", 0), ("exit(1)", 1)):
        chosen = [part("only", script)]
        monkeypatch.setattr(gpu_run, "parts", lambda folder, chosen=chosen: (chosen, ["something was left out"]))
        assert gpu_run.main([str(tmp_path)]) == status
        shown = capsys.readouterr().out.splitlines()
        assert shown[-1] == "something was left out"
        assert shown[-2].split()[0] == "only"
        assert "1.250 ms" in shown[-5]
        assert "2.00x" in shown[-5]
        assert "split" in shown[-4]
        assert not any("9.000" in line for line in shown)
        assert shown[-6] == "optimizer-gpu: halfstep, Triton was skipped: Triton is not installed"


def test_without_a_gpu_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run.gpu_state, "main", lambda: 1)
    monkeypatch.setattr(gpu_run, "run", lambda *_: pytest.fail("something was run"))
    assert gpu_run.main([str(tmp_path)]) == 1
