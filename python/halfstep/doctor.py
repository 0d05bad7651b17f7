"""What `halfstep doctor` knows: facts about this installation and machine, without any rendering.

`collect()` never raises: what cannot be found out becomes a sentence in `problems`, and only those make the command
exit with 1. A machine without a compiler or a GPU is not a problem, it is a fact.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from halfstep._version import __version__

PACKAGE = Path(__file__).resolve().parent
# As setup.py names it: one file per interpreter beside the native modules.
BUILD_INFO = PACKAGE / f"_build_info.{sys.implementation.cache_tag}.json"


@dataclass
class Facts:
    """One installation on one machine; every field can go into JSON."""

    halfstep: str
    location: str
    python: str
    platform: str
    packages: dict[str, str | None]  # name -> version, None = not installed
    cpu: dict[str, Any]  # model, cores this process may use, torch threads, OpenMP runtimes loaded
    native_cpu: dict[str, Any]  # backend.report()'s, with the build's compiler, reason and remedy
    native_cuda: dict[str, Any]  # likewise, with the nvcc; `unused` says why the kernels do not run here and what to do
    triton: dict[str, Any]
    gpu: str  # one sentence
    operators: dict[str, dict[str, tuple[str, str]]]  # operator -> device -> (backend, why not a faster one)
    problems: list[str] = field(default_factory=list)  # halfstep itself is broken


def collect() -> Facts:
    """Looks at the installation and the machine; runs no kernel and changes nothing."""
    problems: list[str] = []
    report = _backend_report(problems)
    info = build_info()
    native = {**{key: value for key, value in info.items() if key != "cuda"}, **report.get("native_cpu", {})}
    cuda = {**info.get("cuda", {}), **report.get("native_cuda", {})}
    cuda["unused"] = why_no_cuda(cuda, _nvidia_driver())
    for name, facts in (("_cpu", native), ("_cuda", cuda)):
        if name in info.get("modules", []) and not facts.get("built"):
            problems.append(f"halfstep.{name} was built but does not load: {facts.get('error')}")
    return Facts(
        halfstep=__version__,
        location=str(PACKAGE),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: _installed(name) for name in ("torch", "triton", "numpy")},
        cpu=_cpu_facts(),
        native_cpu=native,
        native_cuda=cuda,
        triton=report.get("triton", {}),
        gpu=gpu_sentence(),
        operators=report.get("operators", {}),
        problems=problems,
    )


def build_info() -> dict[str, Any]:
    """What setup.py recorded: modules, reason and remedy if there are none, compiler, ISAs, OpenMP."""
    try:
        return json.loads(BUILD_INFO.read_text(encoding="utf-8"))
    except OSError:
        return {
            "modules": [],
            "reason": "this source tree was never built",
            "remedy": "Run `pip install .` in it, or `make test`.",
        }


def why_no_cuda(cuda: dict[str, Any], driver: str | None) -> str | None:
    """Why the CUDA kernels run on no device here, and what to do, in one sentence; None if they run on all of them.

    Args:
        cuda: `native_cuda` of the backend's report over what setup.py recorded.
        driver: version of the NVIDIA driver, None = there is none.
    """
    if not cuda.get("built"):
        reason = cuda.get("reason") or cuda.get("error") or "this source tree was never built"
        return f"not built: {reason}. {cuda.get('remedy') or 'Run `pip install .` in it, or `make test`.'}"
    if cuda.get("devices"):
        numbered = [f"device {i}: {why}" for i, why in enumerate(cuda["devices"]) if why]
        return "; ".join(numbered) or None
    import torch

    if torch.version.hip is not None:
        return f"not used: torch is built for ROCm {torch.version.hip}, the kernels are for NVIDIA GPUs"
    if driver is None:
        return "not used: there is no NVIDIA driver; with an NVIDIA GPU, install one"
    if torch.version.cuda is None:
        return f"not used: torch {torch.__version__} is a build for CPUs; install a CUDA build of torch"
    return (
        "not used: torch finds no device; see what `nvidia-smi` lists, whether CUDA_VISIBLE_DEVICES hides it, and "
        f"whether driver {driver} is new enough for CUDA {torch.version.cuda}"
    )


def gpu_sentence() -> str:
    """The state of GPU, driver and torch build, in one sentence."""
    try:
        import torch
    except ImportError as error:
        return f"Unknown: torch cannot be imported ({error})."
    driver = _nvidia_driver()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        more = torch.cuda.device_count() - 1
        others = f" and {more} more" if more else ""
        arch = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
        gib = properties.total_memory / 2**30
        with_driver = f", driver {driver}" if driver else ""
        return f"{properties.name}{others}, {arch}, {gib:.0f} GiB, torch for {kind}{with_driver}."
    seen = f"an NVIDIA driver ({driver}) is there" if driver else "no NVIDIA driver is there"
    if torch.version.cuda is None and torch.version.hip is None:
        advice = "; install a CUDA build of torch to use the GPU" if driver else ""
        return f"None in use: torch {torch.__version__} is a build for CPUs, and {seen}{advice}."
    if torch.version.hip is not None:
        return f"None in use: torch is built for ROCm {torch.version.hip} but finds no AMD GPU or driver."
    return f"None in use: torch is built for CUDA {torch.version.cuda} but finds no usable device; {seen}."


def _backend_report(problems: list[str]) -> dict[str, Any]:
    try:
        from halfstep.ops import backend

        return backend.report()
    except Exception as error:  # whatever it is, the doctor has to tell it instead of dying of it
        problems.append(f"halfstep cannot be used: {type(error).__name__}: {error}")
        return {}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_facts() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"model": _cpu_model(), "cores": cores, "threads": None}
    try:
        import torch

        facts["threads"] = torch.get_num_threads()
    except ImportError:
        pass
    facts["openmp_runtimes"] = _openmp_runtimes()
    return facts


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _openmp_runtimes() -> list[str]:
    """File names of the OpenMP runtimes in this process. Two of them mean two thread pools that fight for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    names = {Path(line.split(maxsplit=5)[-1]).name for line in lines if "/" in line}
    return sorted(name for name in names if name.startswith(("libgomp", "libiomp5", "libomp")))


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, asked without torch so that a CPU build of torch does not hide it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None
