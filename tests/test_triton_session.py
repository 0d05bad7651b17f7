"""Compiled and interpreted Triton kernels are tested in processes of their own, and each session names its Triton.

Guards: interpreted tests that nobody runs, or that run in the other session; another Triton than a session says; a
session that fails unseen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_session
from test_project import executable, make

FOLDER = triton_session.FOLDER


def collected(root: Path, *arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


def test_an_interpreted_session_collects_its_folder_alone(root: Path) -> None:
    done = collected(root, "tests", interpret=True)
    assert done.returncode == 0, done.stdout[-2000:]
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 50
    assert all(line.startswith("tests/interpreted/") for line in tests)


def test_without_the_variable_the_folder_says_what_it_needs(root: Path) -> None:
    done = collected(root, "tests/interpreted")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tests/interpreted runs in Triton's interpreter" in done.stderr
    assert "set TRITON_INTERPRET=1 in the environment" in done.stderr


@pytest.mark.parametrize("interpret", [False, True])
def test_what_is_left_out(interpret: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders above it are entered in both sessions."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
    inside, beside = FOLDER / "test_x.py", FOLDER.parent / "test_x.py"
    for arguments in ([], ["tests"], ["tests", str(FOLDER.parent / "gpu")]):
        found = [triton_session.left_out(path, arguments) for path in (FOLDER.parent, beside, FOLDER, inside)]
        assert found == ([False, True, False, False] if interpret else [False, False, True, True])
    for named, path in (
        (FOLDER, inside),
        (f"{inside}::test_y", inside),
        (FOLDER.parent / "gpu", FOLDER.parent / "gpu/x.py"),
    ):
        assert not triton_session.left_out(path, [str(named)])


def test_another_triton_than_the_one_named_is_refused(root: Path) -> None:
    done = collected(root, "--triton", "0.1", "tests/test_cli.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected triton 0.1, got " in done.stderr
    assert "put a folder with the right one first in PYTHONPATH" in done.stderr


# ---- make test -------------------------------------------------------------------------------------------------------
SESSIONS = [
    ("TRITON_INTERPRET=0", "PYTHONPATH=", "tests"),
    ("TRITON_INTERPRET=1", "PYTHONPATH=", "tests/interpreted"),
    ("TRITON_INTERPRET=1", "PYTHONPATH={venv}/triton-3.6.0", "--triton 3.6.0 -m not newest tests/interpreted"),
    (
        "TRITON_INTERPRET=0",
        "PYTHONPATH={venv}/triton-3.6.0",
        "--triton 3.6.0 -m not newest tests/compiled/test_triton_machine_code.py "
        "tests/compiled/test_triton_planted_faults.py tests/compiled/test_attention_machine_code.py",
    ),
]


def made_test(root: Path, folder: Path, fails: str, wheels: bool = True) -> tuple[int, list[str]]:
    """(status, the pytest sessions) of `make test` in an environment that is there and whose Python only notes them."""
    venv, log = folder / "venv", folder / "log"
    old = venv / "triton-3.6.0"
    for made in (venv / "bin", old / "triton" if wheels else old):
        made.mkdir(parents=True)
    note = f'case "$2" in pytest) echo "TRITON_INTERPRET=$TRITON_INTERPRET PYTHONPATH=$PYTHONPATH $*" >> {log};; esac'
    executable(venv / "bin" / "python", f'{note}\ncase "$*" in *{fails}) exit 1;; esac')
    for stamp in (".deps", ".native", "triton-3.6.0/.installed"):
        (venv / stamp).touch()
    done = make(root, "test", f"VENV={venv}")
    assert "-m pip" not in done.stdout
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "fails", ["nothing", "=0 tests", "=0 tests/interpreted", "newest tests/interpreted", "attention_machine_code.py"]
)
def test_make_test_runs_every_session_and_fails_with_any(
    fails: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    status, sessions = made_test(root, tmp_path, fails)
    assert (status != 0) == (fails != "nothing")
    assert len(sessions) == len(SESSIONS)
    for session, (interpret, path, rest) in zip(sessions, SESSIONS, strict=True):
        assert session.startswith(f"{interpret} {path.format(venv=tmp_path / 'venv')} ")
        assert session.endswith(f"--max-worker-restart=0 {rest}")


def test_where_the_old_triton_has_no_wheels_it_is_left_out(root: Path, tmp_path: Path) -> None:
    status, sessions = made_test(root, tmp_path, "nothing", wheels=False)
    assert (status, len(sessions)) == (0, 2)
