"""The `halfstep` command: what it says, its exit codes, and that 80 columns are enough."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep import __version__, cli, doctor

WIDTH = 80
UNBUILT = {"built": False, "modules": [], "reason": "no C++ compiler", "remedy": "Install one."}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def healthy() -> doctor.Facts:
    """A machine whose facts need the most room."""
    return doctor.Facts(
        halfstep=__version__,
        location="/home/somebody/a/rather/long/way/to/a/virtual/environment/lib/python3.11/site-packages/halfstep",
        python="3.11.7",
        platform="Linux x86_64",
        packages={"torch": "2.13.0+cpu", "triton": None, "numpy": "2.4.6"},
        cpu={"model": "A CPU [with brackets]", "cores": 1, "threads": 1, "openmp_runtimes": ["libgomp-98b3a4e9.so.1"]},
        native_cpu={"modules": ["_cpu"], "built": True, "isa": "avx2", "isas": ["baseline", "avx2"],
                    "compiled_isas": ["baseline", "avx2", "avx512"], "compiler": "GNU 12.2.0", "openmp": True},
        native_cuda={"built": True, "nvcc": "13.0.88", "unused": "not used: there is no NVIDIA driver",
                     "code_for": [f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)] + ["compute_120 (PTX)"]},
        triton={"installed": True, "used": False, "why": "for GPUs that have no native kernels; no device here"},
        gpu="None in use: torch is a build for CPUs.",
        operators={name: {"cpu": ("native", "C++ kernels for avx2"), "cuda": ("reference", "no GPU kernels, " * 9)}
                   for name in ("grad_stats", "adam_", "unscale_", "cast_", "clip_grad_norm_")},
    )  # fmt: skip


def test_doctor_on_this_machine(run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in (__version__, "torch", "CPU kernels", "CUDA kernels", "Triton", "threads", "GPU", "adam_", "cast_"):
        assert word in result.output
    assert max(map(len, result.output.splitlines())) <= WIDTH
    assert "…" not in result.output, "something was cut off"


def test_doctor_json_holds_the_same_facts(run) -> None:
    result = run("doctor", "--json")
    facts = json.loads(result.stdout)
    assert facts["halfstep"] == __version__
    assert facts["problems"] == []
    assert set(facts["operators"]) >= {"grad_stats", "adam_", "cast_"}
    assert facts["native_cpu"]["built"] == ("_cpu" in facts["native_cpu"]["modules"])
    assert facts["native_cuda"]["built"] == ("_cuda" in facts["native_cpu"]["modules"])


def test_one_openmp_runtime_in_the_process() -> None:
    """Case of the kind: a module that links its own libgomp starts a second thread pool."""
    code = (
        "import torch, halfstep; from halfstep import doctor\n"
        "p = torch.nn.Parameter(torch.ones(100)); p.grad = torch.ones(100); halfstep.AdamW([p]).step()\n"
        "print(doctor.collect().cpu['openmp_runtimes'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(json.loads(shown.replace("'", '"'))) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "avx2 in use; built by GNU 12.2.0: baseline, avx2, avx512; this CPU cannot run avx512"),
        (UNBUILT, "not built: no C++ compiler"),
        (UNBUILT, "CPU kernels: Install one."),
        ({"openmp": False}, "one thread only, because OpenMP needs GCC"),
    ],
)
def test_doctor_says_what_is_built(run, monkeypatch: pytest.MonkeyPatch, change: dict, text: str) -> None:
    facts = healthy()
    monkeypatch.setattr(doctor, "collect", lambda: replace(facts, native_cpu={**facts.native_cpu, **change}))
    result = run("doctor")
    assert result.exit_code == 0
    assert text in " ".join(result.output.split())
    assert "[with brackets]" in result.output, "rich takes brackets for markup unless they are escaped"
    assert max(map(len, result.output.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "CUDA kernels not used: there is no NVIDIA driver; built by nvcc 13.0.88: sm_75, sm_80, sm_86"),
        ({"unused": None}, "CUDA kernels in use; built by nvcc 13.0.88: sm_75"),
        ({"built": False, "unused": "not built: no nvcc. Get it."}, "CUDA kernels not built: no nvcc. Get it. Triton"),
    ],
)
def test_doctor_says_what_cuda_is_built(run, monkeypatch: pytest.MonkeyPatch, change: dict, text: str) -> None:
    facts = healthy()
    monkeypatch.setattr(doctor, "collect", lambda: replace(facts, native_cuda={**facts.native_cuda, **change}))
    result = run("doctor")
    assert result.exit_code == 0
    assert text in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= WIDTH


def test_two_openmp_runtimes_are_a_warning(run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = healthy()
    facts.cpu["openmp_runtimes"] = ["libgomp.so.1", "libiomp5.so"]
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert "two OpenMP runtimes" in run("doctor").output


def test_a_broken_installation_exits_with_1(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.ops import backend

    def broken() -> dict:
        raise OSError("cannot read")

    monkeypatch.setattr(backend, "report", broken)
    result = run("doctor")
    assert result.exit_code == 1
    assert "halfstep cannot be used: OSError: cannot read" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_module_that_does_not_load_exits_with_1(name: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.ops import backend

    report = {f"native_{name}": {"built": False, "error": "undefined symbol: planted"}, "operators": {}}
    monkeypatch.setattr(backend, "report", lambda: report)
    monkeypatch.setattr(doctor, "build_info", lambda: {"modules": [f"_{name}"], "cuda": {}})
    result = run("doctor")
    assert result.exit_code == 1
    shown = " ".join(result.output.split())
    assert f"halfstep._{name} was built but does not load: undefined symbol: planted" in shown


def test_bench_lists_and_refuses_by_name(run) -> None:
    names = run("bench", "--list").stdout.split()
    assert "optimizer" in names
    result = run("bench", "nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.output
    assert "optimizer" in result.output


@pytest.mark.parametrize(
    "arguments", [["optimizer", "--help"], ["optimizer", "--quick", "--only", "x"], ["--quick"], []]
)
def test_bench_passes_arguments_on(run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    seen = []
    for each in cli.benchmark_names():
        module = importlib.import_module(f"halfstep.bench.{each}")
        monkeypatch.setattr(module, "main", lambda each=each: seen.append((each, sys.argv[1:])))
    result = run("bench", *arguments)
    assert result.exit_code == 0, result.output
    name, options = (arguments[0], arguments[1:]) if arguments[:1] == ["optimizer"] else (None, arguments)
    names = [name] if name else cli.benchmark_names()
    assert seen == [(each, options) for each in names]


def test_a_benchmark_runs_as_a_subcommand() -> None:
    command = [sys.executable, "-m", "halfstep", "bench", "optimizer", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: halfstep bench optimizer" in done.stdout


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfstep", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["halfstep"] == __version__
