"""Builds and loads halfstep._cuda_emulated: the CUDA module's sources as host code (csrc/emulation).

Variants: `plain`; `address` with AddressSanitizer and UndefinedBehaviorSanitizer; `thread` with ThreadSanitizer. A
process can load the latter two only if it began with their libraries: see sanitized().
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import cmake
import ninja
import pybind11

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "emulated"
VARIANTS = ["plain", "address", "thread"]

selected = "plain"  # what load() takes in this process: conftest.py's option --emulated


@cache
def load() -> ModuleType:
    """The selected variant, built if it is not up to date."""
    name = "halfstep._cuda_emulated"
    spec = importlib.util.spec_from_file_location(name, built(selected) / "_cuda_emulated.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def built(target: str) -> Path:
    """The folder of a variant, or the program planted_<variant>."""
    BUILD.mkdir(parents=True, exist_ok=True)
    tool = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    with (BUILD.parent / "emulated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest processes build here; released when the process ends
        if not _configured():
            _run([
                tool, "-S", str(ROOT / "csrc" / "emulation"), "-B", str(BUILD), "-G", "Ninja",
                f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            ])  # fmt: skip
            _stamp().write_text(_tools())
        _run([tool, "--build", str(BUILD), "--target", target])
    return BUILD / target


def sanitized(variant: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
    """A command that can load the variant, and its environment."""
    library = {"address": "libasan.so", "thread": "libtsan.so"}[variant]
    # libstdc++ as well: the sanitizer looks for its exceptions' functions when it starts, before Python loads a module.
    found = [_output(os.environ.get("CXX", "g++"), f"-print-file-name={name}") for name in (library, "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(found),
        "PYTHONMALLOC": "malloc",  # Python's own pools would hide what lies beside a block
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks at its end
        "OMP_NUM_THREADS": "1",
    }
    # The sanitizers of GCC 12 and 13 do not know the places that more random bits lead to.
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    if bits.exists() and int(bits.read_text()) > 28:
        command = ["setarch", "--addr-no-randomize", *command]
    return command, environment


def _configured() -> bool:
    """Otherwise the folder is empty now: CMake's cache would go on with tools that are gone."""
    if _stamp().exists() and _stamp().read_text() == _tools():
        return True
    shutil.rmtree(BUILD)
    BUILD.mkdir()
    return False


def _stamp() -> Path:
    return BUILD / "configured_with.json"


def _tools() -> str:
    variables = {name: os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS")}
    return json.dumps([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, sys.executable, pybind11.get_cmake_dir(), variables])


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, f"building the emulated module failed: {' '.join(command)}\n{made.stdout}{made.stderr}"
