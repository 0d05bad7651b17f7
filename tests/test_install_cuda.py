"""Builds and installs halfstep with its CUDA module, for one architecture.

Guards: a CUDA part that stops the install or takes the CPU module with it when it fails, a module that needs a driver
or the toolkit's libraries to import, flags that do not reach nvcc, a reason that goes unsaid.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from compiled import machine_code
from installs import FIRST_USE, STRICT, copy_tree, finish, pip, run_python

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
pytestmark = [
    pytest.mark.install,
    pytest.mark.xdist_group("install_cuda"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(machine_code.nvcc() is None, reason="no nvcc on this machine"),
]
DOCTOR = "from halfstep.cli import main; sys.argv = ['halfstep', 'doctor']; main()"


class Editable:
    """A copy of the tree, installed in place for one architecture."""

    def __init__(self, folder: Path) -> None:
        self.tree = copy_tree(folder / "tree")
        self.packages = folder / "site"
        self.package = self.tree / "python" / "halfstep"

    def install(self, *options: str) -> subprocess.Popen:
        where = ["--target", str(self.packages), "--upgrade", "-e", str(self.tree)]
        command = ["install", "--verbose", "--no-build-isolation", "--no-deps", *options, *where]
        return pip(*command, CUDACXX="", CUDAARCHS="90-real")

    def modules(self) -> list[str]:
        return [name for name in ("_cpu", "_cuda") if (self.package / f"{name}{SUFFIX}").is_file()]

    def info(self) -> dict:
        (path,) = self.package.glob("_build_info.*.json")
        return json.loads(path.read_text("utf-8"))

    def doctor(self) -> str:
        return " ".join(run_python(self.packages, DOCTOR).split())


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Editable:
    made = Editable(tmp_path_factory.mktemp("with cuda"))
    finish(made.install(STRICT))
    return made


def test_the_module_imports_without_a_driver_and_says_what_is_missing(editable: Editable) -> None:
    assert editable.modules() == editable.info()["modules"] == ["_cpu", "_cuda"]
    code = """
import halfstep._cuda as cuda
print(cuda.archs)
try:
    print(cuda.device_count() > 0)
except RuntimeError as error:
    print(error)
"""
    archs, devices = run_python(editable.packages, code).splitlines()
    assert archs == "90-real"
    assert devices == "True" or re.search(r"no NVIDIA driver|no CUDA device|NVIDIA driver supports", devices)
    assert json.loads(run_python(editable.packages, FIRST_USE))["built"]


def test_the_module_links_no_cuda_library(editable: Editable) -> None:
    command = ["readelf", "--dynamic", str(editable.package / f"_cuda{SUFFIX}")]
    dynamic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(name.startswith("libstdc++") for name in needed), dynamic
    assert not [name for name in needed if re.match(r"lib(cuda|cudart|nv|torch|c10|gomp|omp|python)", name)]
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic


def test_every_kernel_is_compiled_with_the_flags_of_the_contract(editable: Editable) -> None:
    (build,) = (editable.tree / "build").glob("cmake-*")
    rules = (build / "build.ninja").read_text("utf-8")
    flags = re.findall(r"^build \S+\.cu\.o: .*?\n  FLAGS = (.*?)$", rules, re.DOTALL | re.MULTILINE)
    assert len(flags) == len(machine_code.sources())
    assert {"--fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"} <= set(machine_code.FLAGS)
    for line in flags:
        words = line.replace('"', "").split()
        assert set(machine_code.FLAGS) <= set(words)
        assert [word for word in words if "code=" in word] == ["--generate-code=arch=compute_90,code=[sm_90]"]
        assert not [word for word in words if "fast" in word]


def test_the_doctor_tells_what_was_built(editable: Editable) -> None:
    cuda = editable.info()["cuda"]
    assert (cuda["reason"], cuda["archs"]) == ("", ["90-real"])
    assert cuda["nvcc"].startswith(machine_code.nvcc_version())
    assert f"built by nvcc {cuda['nvcc']}: sm_90" in editable.doctor()


def test_a_kernel_that_does_not_compile_leaves_the_cpu_module(tmp_path: Path, editable: Editable) -> None:
    source = editable.tree / "csrc" / "cuda" / "device.cu"
    good = source.read_text("utf-8")
    try:
        source.write_text(good + "int planted = not_declared;\n", "utf-8")
        log = finish(editable.install())
        (warning,) = [line for line in log.splitlines() if "installed without its CUDA kernels" in line]
        assert "not_declared" in warning
        assert "CUDAHOSTCXX" in warning
        assert editable.modules() == ["_cpu"], "the CUDA module of an earlier build is left"
        assert "not_declared" in editable.info()["cuda"]["reason"]
        assert re.search(r"not built: .*not_declared.* CUDAHOSTCXX", editable.doctor())
        assert json.loads(run_python(editable.packages, FIRST_USE))["built"]
        output, _ = editable.install(STRICT).communicate(timeout=800)
        assert re.search(r"--require-native was given and the CUDA kernels were not built: .*not_declared", output)
    finally:
        source.write_text(good, "utf-8")


# ---- what the configuration finds out --------------------------------------------------------------------------------
def configure(tree: Path, **variables: str) -> dict:
    """setup.py's facts about the CUDA part, without compiling anything."""
    code = (
        "import json, runpy, setuptools; setuptools.setup = lambda **_: None\n"
        "print(json.dumps(runpy.run_path('setup.py')['CMake']().configure()['cuda']))"
    )
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def imitation(path: Path, version: str, archs: str) -> str:
    """An nvcc of another version, as far as the configuration asks."""
    release = version.rsplit(".", 1)[0]
    path.write_text(
        f'#!/bin/sh\ncase "$*" in\n--version) echo "Cuda compilation tools, release {release}, V{version}" ;;\n'
        f'--list-gpu-code) echo {archs} ;;\n*) exec {machine_code.nvcc()} "$@" ;;\nesac\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("configured") / "tree")


def test_an_nvcc_that_is_too_old_is_left_alone(tree: Path, tmp_path: Path) -> None:
    cuda = configure(tree, CUDACXX=imitation(tmp_path / "nvcc", "12.0.140", "sm_80"), CUDAARCHS="")
    assert cuda["reason"] == "nvcc 12.0.140 is too old, the kernels need 12.1 or newer"
    assert not cuda["found"], "--require-native would fail where nothing is broken"


def test_the_architectures_follow_the_nvcc(tree: Path, tmp_path: Path) -> None:
    old = imitation(tmp_path / "nvcc", "12.4.131", "sm_50 sm_70 sm_75 sm_80 sm_86 sm_87 sm_89 sm_90")
    assert configure(tree, CUDACXX=old, CUDAARCHS="")["archs"] == ["75-real", "80-real", "86-real", "89-real", "90"]
    new = imitation(tmp_path / "nvcc", "12.8.61", "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_101 sm_120")
    archs = ["75-real", "80-real", "86-real", "89-real", "90-real", "100-real", "120"]
    assert configure(tree, CUDACXX=new, CUDAARCHS="")["archs"] == archs
    assert configure(tree, CUDACXX="", CUDAARCHS="86-real;90")["archs"] == ["86-real", "90"]


def test_another_nvcc_takes_over_a_folder(tree: Path, tmp_path: Path) -> None:
    """CMake alone goes on with the first: an upgraded toolkit would be said and not used."""
    path = os.environ["PATH"]
    for name, version in (("first", "12.4.131"), ("second", "12.6.20")):
        (tmp_path / name).mkdir()
        compiler = imitation(tmp_path / name / "nvcc", version, "sm_80 sm_90")
        cuda = configure(tree, CUDACXX="", CUDA_HOME="", CUDA_PATH="", CUDAARCHS="", PATH=f"{tmp_path / name}:{path}")
        assert cuda["nvcc"] == version
        (rules,) = (tree / "build").glob("cmake-*/CMakeFiles/rules.ninja")
        assert set(re.findall(r"/[^\s${}]+/nvcc(?= )", rules.read_text("utf-8"))) == {compiler}


def test_an_nvcc_that_does_not_work_is_quoted(tree: Path) -> None:
    cuda = configure(tree, CUDACXX="", CUDAARCHS="10")
    assert cuda["found"]
    assert re.search("nvcc does not work: .*nvcc fatal.*compute_10", cuda["reason"])
    cuda = configure(tree, CUDACXX="/bin/true", CUDAARCHS="")
    assert cuda["found"]
    assert "/bin/true --version does not answer as nvcc does" in cuda["reason"]


def test_no_nvcc_is_said(tree: Path) -> None:
    cuda = configure(tree, CUDACXX="/nowhere/nvcc", CUDAARCHS="")
    assert (cuda["found"], cuda["reason"]) == (False, "no nvcc was found (looked at CUDACXX=/nowhere/nvcc)")
