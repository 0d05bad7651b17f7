"""Installs halfstep in the ways that break packages like it.

Two builds of two trees and a second build of one of them run at once; the tests look at what came out. Guards: a module
that only imports on the machine that built it, a second OpenMP runtime, code of one ISA leaking into another, a missing
compiler that stops the install or goes unsaid, files that exist in the source tree only. test_install_cuda.py has the
CUDA module; here nvcc is hidden.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
from installs import (
    FIRST_USE,
    ROOT,
    STRICT,
    build_wheel,
    contents,
    copy_tree,
    finish,
    install,
    pip,
    run_python,
    wheel_in,
)
from kernel_objects import complaints

CPU_MODULE = f"halfstep/_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
# One worker: the tests share the builds.
pytestmark = [pytest.mark.install, pytest.mark.xdist_group("install"), pytest.mark.timeout(900)]


@dataclass
class Builds:
    tree: Path  # built without isolation, twice at once; its build folder is kept
    sdist: Path
    wheel: Path  # of `tree`
    isolated: Path  # wheel of the sdist, with pip's build isolation
    isolated_log: str


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Three builds at the same time; the folder's name has a space."""
    base = tmp_path_factory.mktemp("a path with spaces")
    tree = copy_tree(base / "tree")
    make_sdist = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", make_sdist], cwd=tree, check=True, capture_output=True)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    # Unpacked, because pip keeps the wheel of an archive in its cache under the archive's path, and finds it there the
    # next time a test run happens to use that path.
    (base / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", sdist, "-C", base / "unpacked"], check=True)
    (unpacked,) = (base / "unpacked").iterdir()
    running = [
        build_wheel(tree, base / "first", STRICT),
        build_wheel(tree, base / "second", STRICT),
        pip("wheel", "--verbose", "--no-deps", STRICT, "-w", base / "isolated", unpacked),
    ]
    *_, isolated_log = [finish(process) for process in running]
    first, second = wheel_in(base / "first"), wheel_in(base / "second")
    assert contents(first).keys() == contents(second).keys()
    return Builds(tree, sdist, first, wheel_in(base / "isolated"), isolated_log)


def test_wheel_holds_what_the_package_needs(builds: Builds) -> None:
    files = contents(builds.wheel)
    assert CPU_MODULE in files
    assert not [name for name in files if "/_cuda." in name]
    for folder in ("triton_kernels", "bench"):  # links in the source tree, real files in a wheel
        for path in (ROOT / folder).rglob("*.py"):
            assert files[f"halfstep/{folder}/{path.relative_to(ROOT / folder)}"] == path.read_bytes()
    assert "halfstep/py.typed" in files
    metadata = files[next(name for name in files if name.endswith("/METADATA"))].decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in files)
    strangers = [name for name in files if not name.startswith(("halfstep/", "halfstep-"))]
    assert not strangers, "a wheel that installs tests/ or triton_kernels/ collides with other projects"


def test_sdist_is_complete(builds: Builds) -> None:
    """A wheel of the sdist equals a wheel of the tree, and the sdist carries tests and tools but nothing built."""
    assert contents(builds.isolated).keys() == contents(builds.wheel).keys()
    with tarfile.open(builds.sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    expected = ["CMakeLists.txt", "Makefile", "tests/test_install.py", "docs/kernels.md", "LICENSE", "README.md"]
    expected += [
        f"csrc/{name}" for name in ("adam_math.h", "cuda/update.cu", "cuda/build.cmake", "cuda/nvcc_flags.txt")
    ]
    assert set(expected) <= set(names)
    assert not [name for name in names if name.endswith(".so") or "_build_info" in name]


def test_isolated_build_does_not_fetch_torch(builds: Builds) -> None:
    installed = " ".join(re.findall(r"Successfully installed (.*)", builds.isolated_log)).split()
    assert any(name.startswith("pybind11-") for name in installed), builds.isolated_log
    assert not [name for name in installed if name.startswith(("torch", "triton", "nvidia"))]


def test_module_links_neither_torch_nor_an_openmp_runtime(builds: Builds, tmp_path: Path) -> None:
    (tmp_path / "_cpu.so").write_bytes(contents(builds.wheel)[CPU_MODULE])
    command = ["readelf", "--dynamic", str(tmp_path / "_cpu.so")]
    dynamic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(name.startswith("libstdc++") for name in needed), dynamic
    assert not [name for name in needed if re.match(r"lib(gomp|omp|iomp|torch|c10|python)", name)]
    assert "RUNPATH" not in dynamic, "the builder's folders have no business on the user's machine"
    assert "RPATH" not in dynamic


def test_no_code_of_one_isa_reaches_another(builds: Builds) -> None:
    (build,) = (builds.tree / "build").glob("cmake-*")
    isas = json.loads((build / "build_facts.json").read_text("utf-8"))["isas"]
    assert isas
    objects = build / "CMakeFiles"
    assert [text for isa in isas for text in complaints(objects / f"kernels_{isa}.dir", isa)] == []
    rules = (build / "build.ninja").read_text("utf-8")
    assert not re.search(r"-march=|-mtune=|-mcpu=|-ffast-math|-Ofast", rules)


def test_planted_faults_in_objects_are_seen(tmp_path: Path) -> None:
    """kernel_objects.complaints can fail: a template that the linker would share, and a fused multiply-add."""
    if sysconfig.get_platform() != "linux-x86_64":
        pytest.skip("the planted code is x86-64")
    source = tmp_path / "planted.cpp"
    source.write_text(
        "template <class T> T f(T a, T b, T c) { return a * b + c; }\n"
        "template float f(float, float, float);\n"
        "void add_avx2(float* a) { a[0] = f(a[0], a[1], a[2]); }\n"
        "void stray() {}\n"
    )
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-O2", "-mavx2", "-mfma", "-ffp-contract=fast", "-c", str(source), "-o", str(tmp_path / "p.o")]
    subprocess.run(command, check=True)
    found = "\n".join(complaints(tmp_path, "avx2"))
    assert "shared symbol (W) float f<float>" in found
    assert "without the ISA in its name: stray()" in found
    assert "fused multiply-add" in found
    assert "code of another ISA" in "\n".join(complaints(tmp_path, "baseline"))


def test_installed_wheel_runs_and_writes_nothing_into_site_packages(builds: Builds, tmp_path: Path) -> None:
    packages = install(builds.isolated, tmp_path / "site packages")
    before = {path: path.stat().st_mtime_ns for path in packages.rglob("*")}
    for path in before:  # root is not stopped by this; the comparison below sees what root writes
        path.chmod(0o555 if path.is_dir() else 0o444)
    used = json.loads(run_python(packages, FIRST_USE))
    assert used["built"]
    assert used["file"].startswith(str(packages))
    shown = run_python(packages, "from halfstep.cli import main; sys.argv = ['halfstep', 'doctor']; main()")
    assert "in use" in shown
    assert "GNU" in shown or "Clang" in shown
    listed = run_python(packages, "from halfstep.cli import main; sys.argv = ['halfstep', 'bench', '--list']; main()")
    assert "optimizer" in listed.split()
    assert {path: path.stat().st_mtime_ns for path in packages.rglob("*")} == before


def until_ended(process: subprocess.Popen) -> Iterator[None]:
    while process.poll() is None:
        yield
        time.sleep(0.01)


def test_editable_install_survives_vanished_build_tools(builds: Builds, tmp_path: Path) -> None:
    """The persistent build folder remembers tools; pip's isolated ones are gone at the next build."""
    (build,) = (builds.tree / "build").glob("cmake-*")
    stamp = json.loads((build / "tools.json").read_text("utf-8"))
    for name in ("tools.json", "CMakeCache.txt"):
        text = (build / name).read_text("utf-8")
        (build / name).write_text(text.replace(stamp["ninja"], "/gone/ninja").replace(stamp["cmake"], "/gone/cmake"))
    packages = tmp_path / "site"
    module = builds.tree / "python" / CPU_MODULE
    module.write_bytes(b"of an earlier build, mapped by a process that runs")
    building = pip("install", "--no-build-isolation", "--no-deps", STRICT, "--target", packages, "-e", builds.tree)
    seen = []
    watcher = Thread(target=lambda: seen.extend(module.is_file() for _ in until_ended(building)))
    with module.open("rb") as mapped:
        watcher.start()
        finish(building)
        watcher.join()
        assert mapped.read().startswith(b"of an earlier build"), "it was written over"
    assert seen
    assert all(seen), "another process would have found no kernels"
    assert module.read_bytes().startswith(b"\x7fELF")
    assert [path.name for path in module.parent.iterdir() if path.name.startswith(".")] == []
    used = json.loads(run_python(packages, FIRST_USE))
    assert used["built"]
    assert used["file"] == str(builds.tree / "python" / "halfstep" / "__init__.py")


def test_without_a_compiler_the_install_is_pure_python_and_says_so(builds: Builds, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    log = finish(build_wheel(tree, tmp_path / "wheel", CXX="/nowhere/c++"))
    (warning,) = [line.strip() for line in log.splitlines() if "without its native CPU kernels" in line]
    assert "no working C++ compiler was found" in warning
    assert "apt install g++" in warning
    wheel = wheel_in(tmp_path / "wheel")
    assert not [name for name in contents(wheel) if name.endswith(".so")]
    packages = install(wheel, tmp_path / "site")
    code = FIRST_USE.replace("halfstep.AdamW", "import warnings; warnings.simplefilter('default'); halfstep.AdamW")
    pure = json.loads(run_python(packages, code))
    assert not pure["built"]
    native = json.loads(run_python(install(builds.wheel, tmp_path / "native"), FIRST_USE))
    assert pure["weight"] == native["weight"]
    shown = run_python(packages, "from halfstep.cli import main; sys.argv = ['halfstep', 'doctor']; main()")
    assert "no working C++ compiler was found" in " ".join(shown.split())
    assert "apt install g++" in " ".join(shown.split())
    assert "reference" in shown


def test_require_native_turns_a_missing_compiler_into_an_error(tmp_path: Path) -> None:
    process = build_wheel(copy_tree(tmp_path / "tree"), tmp_path, STRICT, CXX="/nowhere/c++")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "--require-native was given and the native CPU kernels were not built" in output


def test_a_broken_compile_is_shown_and_recorded(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    with (tree / "csrc" / "cpu" / "isa.cpp").open("a") as file:
        file.write("int planted = not_declared;\n")
    log = finish(build_wheel(tree, tmp_path / "wheel", MAX_JOBS="1"))
    assert "isa.cpp" in next(line for line in log.splitlines() if "not_declared" in line)
    assert "report them" in next(line for line in log.splitlines() if "without its native CPU kernels" in line)
    files = contents(wheel_in(tmp_path / "wheel"))
    (info,) = [json.loads(text) for name, text in files.items() if "_build_info" in name]
    assert info["modules"] == []
    assert "not_declared" in info["reason"]


def test_max_jobs_must_be_a_number(tmp_path: Path) -> None:
    process = build_wheel(copy_tree(tmp_path / "tree"), tmp_path, MAX_JOBS="many")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "MAX_JOBS must be a positive integer, got 'many'" in output
