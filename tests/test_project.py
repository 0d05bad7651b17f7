"""What is declared and recorded beside the code: dependencies, the Makefile's order, CI, versions, the README's table.

Guards: a pinned triton that fights a CUDA build of torch, a torch that is replaced or comes second, a CI run without an
end, a table whose figures no bench gave.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from halfstep.bench import table

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings this one
    import tomli as tomllib

VERBS = ["train", "test", "lint", "bench", "gate", "gpu", "versions"]


@pytest.fixture(scope="module")
def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# ---- pyproject.toml --------------------------------------------------------------------------------------------------
def test_torch_and_triton_are_lower_bounds_and_not_needed_to_build(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = {r.name: r for listed in lists for r in map(Requirement, listed) if r.name in ("torch", "triton")}
    assert {name: [s.operator for s in r.specifier] for name, r in found.items()} == {"torch": [">="], "triton": [">="]}
    assert found["torch"].marker is None
    assert found["triton"].marker is not None
    for system, machine, wanted in [("Linux", "x86_64", True), ("Darwin", "arm64", False), ("Windows", "AMD64", False)]:
        here = {**default_environment(), "platform_system": system, "platform_machine": machine}
        here["sys_platform"] = system.lower()
        assert found["triton"].marker.evaluate(here) is wanted, system
    assert not {"torch", "triton"} & {Requirement(r).name for r in pyproject["build-system"]["requires"]}


def test_python_and_the_command(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["requires-python"] == ">=3.10"
    assert pyproject["project"]["scripts"] == {"halfstep": "halfstep.cli:main"}


def test_the_trainers_are_there_wherever_their_tests_run(pyproject: dict[str, Any], root: Path) -> None:
    """`make test` installs them with lower bounds; `make versions` leaves them and their tests out."""
    extras = pyproject["project"]["optional-dependencies"]
    trainers = {Requirement(r).name: [s.operator for s in Requirement(r).specifier] for r in extras["integrations"]}
    assert trainers == {name: [">="] for name in ("accelerate", "lightning", "transformers")}
    importing = {path.name for path in (root / "tests").glob("test_*.py") if imports_any(path, {*trainers})}
    assert importing
    kinds = ("test_trainer_*.py", "test_integration_*.py")
    assert importing == {path.name for kind in kinds for path in (root / "tests").glob(kind)}
    assert "--editable '.[test]'" in (root / "Makefile").read_text(encoding="utf-8")
    assert everything_in("test", extras) > {*trainers, "pytest"}
    versions = (root / "tests" / "versions.py").read_text(encoding="utf-8")
    assert all(f'"{kind}"' in versions for kind in kinds)
    assert "[test-core]" in versions
    assert not everything_in("test-core", extras) & {*trainers}


def everything_in(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """Names of the packages that halfstep[extra] brings, through extras that it names."""
    found = set()
    for requirement in map(Requirement, extras[extra]):
        for inner in requirement.extras if requirement.name == "halfstep" else ():
            found |= everything_in(inner, extras)
        found.add(requirement.name)
    return found - {"halfstep"}


def imports_any(path: Path, packages: set[str]) -> bool:
    return bool(
        re.search(rf"^(?:from|import) (?:{'|'.join(packages)})\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


# ---- Makefile --------------------------------------------------------------------------------------------------------
def make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """GNU make as from a fresh shell: not as a part of the `make test` that may run this, nor with its variables."""
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "TORCH", "PYTHON", "NATIVE")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(["make", *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("option", "torch"), [([], "torch==2.13.0"), (["TORCH=torch==2.14.1"], "torch==2.14.1")])
def test_every_verb_makes_the_environment_with_torch_first(
    verb: str, option: list[str], torch: str, root: Path, tmp_path: Path
) -> None:
    python = executable(tmp_path / "python", "exit 0")
    planned = make(root, "-n", verb, f"VENV={tmp_path}/venv", f"PYTHON={python}", *option)
    assert planned.returncode == 0, planned.stderr
    lines = planned.stdout.splitlines()
    (creates,) = [i for i, line in enumerate(lines) if f"{python} -m venv " in line and line.endswith("/venv")]
    installs = [i for i, line in enumerate(lines) if re.search(r"-m pip .*\binstall\b", line)]
    assert creates < installs[0]
    first = f"{tmp_path}/venv/bin/python -c 'import torch' 2>/dev/null || {tmp_path}/venv/bin/python -m pip "
    assert lines[installs[0]].startswith(first), "a torch that is there is kept"
    assert lines[installs[0]].endswith(f" install '{torch}'")
    assert not any("torch==" in lines[i] for i in installs[1:])
    assert len(installs) > 1
    assert lines[installs[0] + 1].endswith("tests/torch_version.py"), "what is there is checked before it is built on"


@pytest.mark.parametrize("usable", [True, False])
def test_a_base_interpreter_lends_its_torch_if_it_has_a_usable_one(usable: bool, root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer = f'case "$1" in tests/torch_version.py) exit {0 if usable else 1};; esac'
    python = executable(tmp_path / "python", f'echo "$@" >> {log}\n{answer}')
    done = make(root, f"{tmp_path}/venv/bin/python", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode == 0, done.stderr
    ran = log.read_text(encoding="utf-8").splitlines()
    assert f"-m venv {'--system-site-packages ' if usable else ''}{tmp_path}/venv" in ran
    assert (f"tests/lend_packages.py {tmp_path}/venv" in ran) == usable


def test_a_virtual_environment_lends_its_packages(root: Path, tmp_path: Path) -> None:
    """The option of the venv module does not: it reaches the interpreter below both."""
    first, second = tmp_path / "first", tmp_path / "second"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(first)], check=True)
    (site,) = first.glob("lib/python*/site-packages")
    (site / "lent_by_a_test.py").write_text("", encoding="utf-8")
    create = [str(first / "bin/python"), "-m", "venv", "--without-pip", "--system-site-packages", str(second)]
    finds = [str(second / "bin/python"), "-c", "import lent_by_a_test"]
    subprocess.run(create, check=True)
    assert subprocess.run(finds, capture_output=True).returncode == 1
    subprocess.run([str(first / "bin/python"), str(root / "tests/lend_packages.py"), str(second)], check=True)
    subprocess.run(finds, check=True)


def test_an_old_python_is_refused_in_words(root: Path, tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "exit 1")
    done = make(root, f"{tmp_path}/venv/bin/python", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode != 0
    assert "halfstep needs Python 3.10 or newer; name one with make PYTHON=python3.12" in done.stderr


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        *((version, True) for version in ("2.10.0", "2.10.0a0+git1", "2.13.0+cpu", "2.14.1", "3.0.0")),
        *((version, False) for version in ("2.9.1", "2.9.1+cu128", "1.13.1")),
    ],
)
def test_which_torch_is_taken(version: str, accepted: bool, root: Path, tmp_path: Path) -> None:
    info = tmp_path / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n", encoding="utf-8")
    done = torch_version(root, tmp_path)
    if accepted:
        assert (done.returncode, done.stdout) == (0, f"torch {version}\n")
    else:
        message = f"torch {version} is installed, halfstep needs 2.10 or newer: upgrade it yourself\n"
        assert (done.returncode, done.stderr) == (1, message)


def test_no_torch_is_said(root: Path, tmp_path: Path) -> None:
    done = torch_version(root, tmp_path)
    assert (done.returncode, done.stderr) == (1, "torch is not installed\n")


def torch_version(root: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    """The script where `packages` is all that is installed (-S: no site-packages)."""
    command = [sys.executable, "-S", str(root / "tests" / "torch_version.py")]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


# ---- .ci/run ---------------------------------------------------------------------------------------------------------
def ci(root: Path, folder: Path, make_script: str, budget: str = "25 * 60") -> tuple[int, list[str], str]:
    """(status, what make was asked for, errors) of CI's script with a make of our own, and its budget in seconds."""
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    text = (root / ".ci" / "run").read_text(encoding="utf-8")
    assert text.count("25 * 60") == 1
    script = executable(folder / ".ci" / "run", "")
    script.write_text(text.replace("25 * 60", budget), encoding="utf-8")
    log = folder / "log"
    log.touch()
    executable(folder / "bin" / "make", f'echo "make $*" >> {log}\n{make_script}')
    for present in ("g++", "python3"):
        executable(folder / "bin" / present, "exit 0")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, log.read_text(encoding="utf-8").splitlines(), done.stderr


def test_ci_runs_the_linters_and_the_readmes_test_command(root: Path, tmp_path: Path) -> None:
    assert os.access(root / ".ci" / "run", os.X_OK)
    block = re.search(r"```\n(make .*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    _, test_command = [line.split("#")[0].strip() for line in block.group(1).splitlines()]
    assert ci(root, tmp_path, "exit 0") == (0, ["make lint", test_command], "")


@pytest.mark.parametrize(("fails", "asked"), [("lint", ["make lint"]), ("test", ["make lint", "make test"])])
def test_ci_fails_as_what_it_runs(fails: str, asked: list[str], root: Path, tmp_path: Path) -> None:
    assert ci(root, tmp_path, f'[ "$1" != {fails} ] || exit 3') == (3, asked, "")


@pytest.mark.parametrize(("hangs", "asked"), [("lint", ["make lint"]), ("test", ["make lint", "make test"])])
def test_ci_ends_what_outgrows_the_budget(hangs: str, asked: list[str], root: Path, tmp_path: Path) -> None:
    status, made, error = ci(root, tmp_path, f'[ "$1" != {hangs} ] || sleep 100', budget="grace + 3")
    assert (status, made) == (124, asked)
    assert f"'make {hangs}' did not end within the 25 minutes of a CI run" in error


def test_ci_starts_nothing_when_no_time_is_left(root: Path, tmp_path: Path) -> None:
    """`timeout 0` would mean no limit."""
    status, made, error = ci(root, tmp_path, "exit 0", budget="grace")
    assert (status, made) == (124, [])
    assert "'make lint' did not end" in error


# ---- what was measured -----------------------------------------------------------------------------------------------
def test_the_changelog_records_the_versions_that_were_tried(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    _, header, rest = text.partition("| Python | torch | triton | result |\n|---|---|---|---|\n")
    assert header
    lines = takewhile(lambda line: line.startswith("|"), rest.splitlines())
    tried = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(re.search(r"\d+ passed", row[3]) for row in tried)
    assert any(row[1].startswith("2.14.1") for row in tried)
    assert any(row[2].startswith("3.6") for row in tried)
    assert len({row[0].rsplit(".", 1)[0] for row in tried}) > 1, "another Python"


def test_the_readmes_table_is_the_benchs(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- bench optimizer: begin -->\n", "\n<!-- bench optimizer: end -->"
    assert (text.count(begin), text.count(end)) == (1, 1)
    shown = text.split(begin)[1].split(end)[0]
    assert shown == table.markdown(table.read(root / "bench" / "results" / "optimizer.jsonl"))


def test_tests_of_one_group_run_in_one_process(tmp_path: Path) -> None:
    """What they share (builds, training runs) is else made once in each."""
    test = """
        import os, pytest
        @pytest.mark.xdist_group("one")
        @pytest.mark.parametrize("i", range(8))
        def test_where(i):
            open(os.environ["PYTEST_XDIST_WORKER"], "w").close()
    """
    (tmp_path / "test_group.py").write_text(textwrap.dedent(test), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "test_group.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    assert len(list(tmp_path.glob("gw*"))) == 1
