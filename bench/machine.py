"""Where and with what a bench ran: the facts every row of a results file carries."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from halfstep import doctor
from halfstep.bench import backends
from halfstep.ops import backend

HERE = Path(__file__).resolve().parent


class NothingToTimeError(RuntimeError):
    """This installation has no kernels of its own."""


def facts(device: str = "cpu") -> dict[str, Any]:
    """Device, threads, instruction set, versions, commit. Raises NothingToTimeError without native kernels."""
    return _host_facts() | (_gpu_facts() if device == "cuda" else {})


def gpu() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise NothingToTimeError(f"torch finds no CUDA device here. {doctor.gpu_sentence()}")
    missing = {name: backends.kernels_of(name, gpu())[1] for name in backends.NAMES}
    if all(missing.values()):
        reasons = "; ".join(f"{name}: {why_not}" for name, why_not in missing.items())
        raise NothingToTimeError(f"halfstep has no kernels for this GPU ({reasons}); `halfstep doctor` says more.")
    module, _ = backend.native_cuda_module()
    properties = torch.cuda.get_device_properties(gpu())
    return {
        "device": "cuda",
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory": properties.total_memory,
        "driver": doctor._nvidia_driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": module.archs if module else None,
        "missing": missing,  # why a backend's kernels do not run; null where they do
    }


def _host_facts() -> dict[str, Any]:
    found = doctor.collect()
    if not found.native_cpu.get("built"):
        raise NothingToTimeError(
            f"the native CPU kernels are not there ({found.native_cpu.get('error')}), and timing the plain-PyTorch "
            f"reference says nothing. {found.native_cpu.get('remedy') or 'Run `halfstep doctor`.'}"
        )
    commit, dirty = _commit()
    return {
        "device": "cpu",
        "cpu": found.cpu["model"],
        "cores": found.cpu["cores"],
        "threads": torch.get_num_threads(),
        "isa": found.native_cpu["isa"],
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "openmp": found.cpu["openmp_runtimes"],
        "compiler": found.native_cpu.get("compiler"),
        "platform": found.platform,
        "versions": {
            "halfstep": found.halfstep,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "deepspeed": _version("deepspeed"),
            "bitsandbytes": _version("bitsandbytes"),
        },
        "commit": commit,
        "dirty": dirty,
    }


def results_folder() -> Path:
    """bench/results of a source tree; from an installed package, a folder where the user is."""
    return HERE / "results" if (HERE.parent / "setup.py").is_file() else Path.cwd() / "bench-results"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    """The source tree's commit, and whether files differ from it (results aside: a bench itself appends to them)."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != HERE.parent:
            return None, None  # installed into somebody else's repository
        status = git("status", "--porcelain", "--", str(HERE.parent), f":(exclude){HERE / 'results'}")
        return git("rev-parse", "HEAD"), bool(status)
    except (OSError, subprocess.SubprocessError):
        return None, None
