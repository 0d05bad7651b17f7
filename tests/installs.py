"""Copies of the source tree, pip, and a look at what it made; for the tests that build and install halfstep itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRICT = "--config-settings=--global-option=--require-native"
UNTRACKED = shutil.ignore_patterns(
    *(".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so", "_build_info.*", ".*_cache"),
    *(".hypothesis",),
)

# One step on each public path that a user meets first, and what ran it; printed as JSON.
FIRST_USE = """
import json, torch, halfstep
from halfstep.ops import backend
p = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
p.grad = torch.full_like(p, 0.5)
halfstep.AdamW([p], lr=0.1, weight_decay=0.0).step()
assert p.isfinite().all() and (p < 1).all(), p
report = backend.report()["native_cpu"]
print(json.dumps({"weight": p[0].item(), "built": report["built"], "file": halfstep.__file__}))
"""


def copy_tree(to: Path) -> Path:
    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=UNTRACKED))


def pip(*arguments: str | Path, **variables: str) -> subprocess.Popen:
    """Starts pip; without nvcc unless CUDACXX says otherwise."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    environment = {**os.environ, "CUDACXX": "/nowhere/nvcc", **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen) -> str:
    """Output of a process that must succeed."""
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    return output


def wheel_in(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path


def build_wheel(tree: Path, to: Path, *options: str, **variables: str) -> subprocess.Popen:
    """Starts a build with this environment's tools."""
    return pip("wheel", "--verbose", "--no-build-isolation", "--no-deps", *options, "-w", to, tree, **variables)


def run_python(packages: Path, code: str) -> str:
    """Runs code with `packages` as a site folder (.pth files count) before everything else."""
    start = f"import site, sys; site.addsitedir({str(packages)!r}); sys.path.insert(0, sys.path.pop());"
    command = [sys.executable, "-W", "error", "-c", f"{start}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=packages, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(wheel: Path, to: Path) -> Path:
    finish(pip("install", "--quiet", "--no-deps", "--target", to, wheel))
    return to


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
