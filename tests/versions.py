"""`make versions`: the core suite on other versions of torch, triton and Python, each in its own environment.

Slow and hungry for downloads, so it is not part of CI. Prints a table; what this machine does not have is said in
it and does not fail the run. A case's environment (some GB) is deleted when it passes; logs stay in build/versions.

    python tests/versions.py                 everything
    python tests/versions.py torch-2.14      what starts with that name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "versions"
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
TORCH = "torch==2.13.0"
BUILD_TOOLS = ["setuptools>=77", "wheel", "pybind11>=2.13", "cmake>=3.22", "ninja"]
# What depends on a version is the arithmetic, the operators, the optimizers, the import. Training, installing from many
# sides, machine code and the source tree itself (which these environments do not run from) are the same everywhere. The
# trainers want versions of torch and numpy of their own and are not installed there.
LEFT_OUT = [
    "test_install*.py", "compiled/*", "test_train_gpt*.py", "test_layers.py", "test_bench*.py", "test_readme.py",
    "test_project.py", "test_trainer_*.py", "test_integration_*.py", "test_triton_session.py",
]  # fmt: skip


@dataclass
class Case:
    name: str
    python: str  # "3.12"
    packages: list[str]  # installed before halfstep


CASES = [
    Case("torch-2.14.1", THIS, ["torch==2.14.1"]),
    # numpy: the interpreter of triton 3.6, which halfstep takes there or gets here, needs an older one
    Case("torch-2.10.0", THIS, ["torch==2.10.0", "triton==3.6.0", "numpy<2.4"]),
    Case("triton-3.6.0", THIS, [TORCH, "triton==3.6.0", "numpy<2.4"]),
    *(Case(f"python-{python}", python, []) for python in ("3.10", "3.11", "3.12", "3.13") if python != THIS),
]


def interpreter(python: str) -> str | None:
    """A Python of that version that runs: on PATH, or installed by pyenv without being selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python"))]
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {python!r})"
    for candidate in filter(None, candidates):  # a pyenv shim exists for versions that are not there
        if subprocess.run([str(candidate), "-c", check], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def run(case: Case) -> str:
    """Result of one case in words: what was tested and pytest's last line, or what is missing."""
    base = interpreter(case.python)
    if base is None:
        return f"NOT AVAILABLE: no Python {case.python} on this machine"
    folder = ENVIRONMENTS / case.name
    python = str(folder / "bin" / "python")
    log_path = ENVIRONMENTS / f"{case.name}.log"
    if not Path(python).exists():
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    with log_path.open("w") as log:
        for packages in (case.packages or [TORCH], BUILD_TOOLS):
            if subprocess.run([*pip, *packages], stdout=log, stderr=log).returncode:
                return f"NOT AVAILABLE: {' '.join(packages)} cannot be installed (see {log_path.relative_to(ROOT)})"
        # A wheel, not an editable install: the source tree's modules belong to the main environment.
        strict = "--config-settings=--global-option=--require-native"
        halfstep = [*pip, "--no-build-isolation", strict, f"{ROOT}[test-core]"]
        if subprocess.run(halfstep, stdout=log, stderr=log).returncode:
            return f"FAILED to install (see {log_path.relative_to(ROOT)})"
    left_out = [f"--ignore-glob=tests/{name}" for name in LEFT_OUT]
    sessions = session(python, [*left_out, "tests"], log_path), session(python, ["tests/interpreted"], log_path, "1")
    passed = all(ok for ok, _ in sessions)
    verdict = "ok" if passed else f"FAILED (see {log_path.relative_to(ROOT)})"
    result = f"{verdict}: {installed(python)}: {sessions[0][1]}; interpreted {sessions[1][1]}"
    if passed:
        shutil.rmtree(folder)
    return result


def session(python: str, arguments: list[str], log_path: Path, interpret: str = "0") -> tuple[bool, str]:
    """Whether pytest passes, and its last line."""
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--maxprocesses=8"]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([*pytest, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    with log_path.open("a") as log:
        log.write(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else "no output"
    return done.returncode == 0, last


def installed(python: str) -> str:
    """Versions that decide, as the environment really has them."""
    code = (
        "import sys; from importlib.metadata import version, PackageNotFoundError\n"
        "NAMES = ('torch', 'triton', 'numpy')\n"
        "def v(name):\n"
        "    try: return version(name)\n"
        "    except PackageNotFoundError: return 'none'\n"
        "print('Python %d.%d.%d' % sys.version_info[:3], *(f'{n} {v(n)}' for n in NAMES), sep=', ')"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main() -> int:
    wanted = [case for case in CASES if not sys.argv[1:] or case.name.startswith(tuple(sys.argv[1:]))]
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    results = {}
    for case in wanted:
        started = time.monotonic()
        results[case.name] = run(case)
        print(f"{case.name:14} {time.monotonic() - started:5.0f} s  {results[case.name]}", flush=True)
    print("\n| case | result |\n|---|---|")
    for name, result in results.items():
        print(f"| {name} | {result} |")
    return 1 if not results or any(result.startswith("FAILED") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
