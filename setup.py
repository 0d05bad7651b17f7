"""Builds the native modules with CMake. Everything declarative is in pyproject.toml.

What can go wrong on a user's machine must not stop the install: without a compiler halfstep is installed as pure
Python, says so in one sentence, and `halfstep doctor` repeats why. The CUDA module is built where there is an nvcc, and
what fails in it leaves the CPU module alone. Where the native modules are a must (tests, CI, release wheels) the option
`--require-native` turns a missing CPU module, and a CUDA module that an nvcc did not make, into an error:

    pip install . -C--global-option=--require-native
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import ClassVar

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, OptionError

ROOT = Path(__file__).resolve().parent
MODULES = ["_cpu", "_cuda"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
# Per interpreter, as the modules are: one source tree may serve several Pythons in editable installs.
BUILD_INFO = f"_build_info.{sys.implementation.cache_tag}.json"
AGAIN = "repeat your pip command with --force-reinstall --no-deps --no-cache-dir"
MISSING_TOOL = f"Install a C++17 compiler (Debian, Ubuntu: apt install g++) and {AGAIN}."
BROKEN_BUILD = (
    f"The compiler's own words are above (pip shows them with -v): please report them, or {AGAIN} once fixed."
)
BROKEN_CUDA = (
    "nvcc's own words are above (pip shows them with -v); CUDACXX names another nvcc, CUDAHOSTCXX another g++ for it, "
    f"CUDAARCHS the GPUs to build for: {AGAIN} once fixed."
)
NO_NVCC = f"For NVIDIA GPUs install the CUDA toolkit (12.1 or newer, with nvcc) and {AGAIN}."
# What CMake and the compilers read: another value means another build.
BUILD_VARIABLES = ("CXX", "CXXFLAGS", "LDFLAGS")
CUDA_VARIABLES = ("CUDACXX", "CUDAFLAGS", "CUDAHOSTCXX", "CUDAARCHS", "CUDA_HOME", "CUDA_PATH")


class NativeBuildError(Exception):
    """The native modules could not be built; the text is the reason in one line, the remedy a sentence."""

    def __init__(self, reason: str, remedy: str = MISSING_TOOL) -> None:
        super().__init__(reason)
        self.remedy = remedy


class HalfstepDistribution(Distribution):
    """Adds `--require-native`, which pip reaches through `-C--global-option=--require-native`."""

    global_options: ClassVar[list] = [
        *Distribution.global_options,
        ("require-native", None, "fail if the native modules cannot be built, instead of installing pure Python"),
    ]

    def __init__(self, attrs: dict | None = None) -> None:
        self.require_native = False
        super().__init__(attrs)


class BuildPython(build_py):
    """build_py into an emptied folder: setuptools would ship files of an earlier build that the source lost since."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "halfstep", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """build_ext that runs CMake once for all native modules."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = (ROOT / "python" if in_place else Path(self.build_lib).resolve()) / "halfstep"
        package.mkdir(parents=True, exist_ok=True)
        facts: dict = {"modules": [], "reason": None, "remedy": None, "python": platform.python_version()}
        for left in package.glob(".built-*"):  # by a build that was killed; builds of a tree wait for each other
            shutil.rmtree(left, ignore_errors=True)
        # On the same disk, so that a finished module takes its name in one step: a process that has the old one mapped
        # keeps it, and no other process meets half a file.
        with tempfile.TemporaryDirectory(prefix=".built-", dir=package) as folder:
            try:
                facts.update(build_with_cmake(Path(folder)))
            except NativeBuildError as error:
                facts.update(reason=str(error), remedy=error.remedy)
                facts["cuda"] = {"found": False, "reason": "the CPU module comes first", "remedy": error.remedy}
            for module in MODULES:
                if module in facts["modules"]:
                    os.replace(Path(folder) / "halfstep" / f"{module}{SUFFIX}", package / f"{module}{SUFFIX}")
                else:  # a failed build must not leave the previous one behind as if it were current
                    (package / f"{module}{SUFFIX}").unlink(missing_ok=True)
        (package / BUILD_INFO).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        self.refuse_or_warn(facts)

    def refuse_or_warn(self, facts: dict) -> None:
        cuda = facts["cuda"]
        if facts["reason"]:
            what, slow, failed = "native CPU kernels", " and will be slow", facts
        elif cuda["found"] and cuda["reason"]:
            what, slow, failed = "CUDA kernels", "", cuda
        else:
            return
        if self.distribution.require_native:
            raise CompileError(f"--require-native was given and the {what} were not built: {failed['reason']}")
        message = f"halfstep is installed without its {what}{slow}: {failed['reason']}. {failed['remedy']}"
        print(f"warning: {message}", file=sys.stderr, flush=True)

    # setuptools asks these to list files per extension; CMake's install step has put them where they belong.
    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class CMake:
    """The tools and the build folder they share. Raises NativeBuildError if a tool is missing."""

    def __init__(self) -> None:
        try:
            import pybind11
        except ImportError:
            reason = "pybind11 is not installed (it comes by itself without --no-build-isolation)"
            raise NativeBuildError(reason) from None
        self.jobs = parallel_jobs()
        self.cmake, ninja = find_tool("cmake"), find_tool("ninja")
        self.build = fresh_build_dir({
            "cmake": self.cmake,
            "ninja": ninja,
            "python": sys.executable,
            "pybind11": pybind11.get_cmake_dir(),
            **{name: os.environ.get(name, "") for name in BUILD_VARIABLES + CUDA_VARIABLES},
        })  # fmt: skip
        self.command = [
            self.cmake, "-S", str(ROOT), "-B", str(self.build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]  # fmt: skip
        self.pybind11 = pybind11.__version__

    def configure(self) -> dict:
        """The facts CMake found out about compilers and targets. A broken nvcc is one of them, not an error."""
        broken = None
        try:
            run_tool([*self.command, "-DHALFSTEP_CUDA=ON"], "nvcc does not work", BROKEN_CUDA)
        except NativeBuildError as error:  # whose fault it was shows without the CUDA part
            broken = error
            run_tool([*self.command, "-DHALFSTEP_CUDA=OFF"], "CMake could not configure the build")
        facts = json.loads((self.build / "build_facts.json").read_text(encoding="utf-8"))
        if broken:
            facts["cuda"].update(found=True, reason=str(broken))
        return {**facts, "pybind11": self.pybind11}

    def make(self, module: str, remedy: str, install_to: Path) -> None:
        build = [self.cmake, "--build", str(self.build), "--target", module, *self.jobs]
        run_tool(build, "the compiler failed", remedy)
        install = [self.cmake, "--install", str(self.build), "--component", module, "--prefix", str(install_to)]
        run_tool(install, "CMake could not copy the module", remedy)


def build_with_cmake(install_to: Path) -> dict:
    """Configures, builds, installs; returns the facts. Raises NativeBuildError if there is no CPU module in the end."""
    tools = CMake()
    facts = tools.configure()
    tools.make("_cpu", BROKEN_BUILD, install_to)
    facts["modules"] = ["_cpu"]
    cuda = facts["cuda"]
    if not cuda["reason"]:
        try:
            tools.make("_cuda", BROKEN_CUDA, install_to)
            facts["modules"].append("_cuda")
        except NativeBuildError as error:
            cuda["reason"] = str(error)
    if cuda["reason"]:
        cuda["remedy"] = BROKEN_CUDA if cuda["found"] else NO_NVCC
    return facts


def find_tool(name: str) -> str:
    """Path of cmake or ninja: the one of the build environment's wheel first, PATH second."""
    try:
        wheel = importlib.import_module(name)
        folder = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name]
        path = shutil.which(name, path=getattr(wheel, folder, None))
    except ImportError:
        path = None
    path = path or shutil.which(name)
    if not path:
        raise NativeBuildError(f"{name} was not found (it comes by itself without --no-build-isolation)")
    return path


def fresh_build_dir(tools: dict[str, str]) -> Path:
    """The persistent build folder, emptied if it was made with other tools.

    pip's isolated builds put cmake and ninja into a folder that vanishes afterwards; a CMake cache that remembers
    them fails the next build. The same tools mean an incremental build.
    """
    build = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stamp = build / "tools.json"
    text = json.dumps({**tools, "source": str(ROOT)}, indent=1)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != text:
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        stamp.write_text(text, encoding="utf-8")
    return build


def parallel_jobs() -> list[str]:
    """`--parallel N` from MAX_JOBS, the variable that torch's own extension builds use; Ninja decides without it."""
    jobs = os.environ.get("MAX_JOBS", "").strip()
    if not jobs:
        return []
    if not jobs.isdigit() or int(jobs) < 1:
        raise OptionError(
            f"MAX_JOBS must be a positive integer, got {jobs!r}; set it to the number of compilers to run"
        )
    return ["--parallel", jobs]


def run_tool(command: list[str], what: str, remedy: str = MISSING_TOOL) -> None:
    """Run a tool with its output shown; a failure carries the line that tells most."""
    print("+", " ".join(command), flush=True)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise NativeBuildError(f"{what}: {error}", remedy) from error
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.strip())
    if process.wait() != 0:
        raise NativeBuildError(f"{what}: {telling_line(lines)}", remedy)


def telling_line(lines: list[str]) -> str:
    """The first line with `error:` or `fatal:`, else the text under CMake's first `CMake Error`, else the last line."""
    for line in lines:
        if re.search(r"\b(error|fatal) *:", line):  # "nvcc fatal   : ..."
            return line
    for index, line in enumerate(lines):
        if line.startswith("CMake Error"):
            text = []
            for below in lines[index + 1 :]:
                if not below and text:
                    break
                text.append(below)
            return " ".join(filter(None, text)) or line
    return next((line for line in reversed(lines) if line), "no output")


def one_build_at_a_time() -> None:
    """Builds of one source tree wait for each other: setuptools' build/ and egg-info are shared between them.

    The lock ends with the process, so a killed build leaves nothing to clean up. Builds of two clones do not meet.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no native modules there, and pip builds one at a time
        return
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        global _lock_file
        _lock_file = open(ROOT / "build" / ".lock", "w")  # noqa: SIM115 (open until the process ends)
        fcntl.lockf(_lock_file, fcntl.LOCK_EX)
    except OSError:  # a read-only source tree: nothing is written that could collide
        pass


one_build_at_a_time()
setup(
    distclass=HalfstepDistribution,
    ext_modules=[Extension(f"halfstep.{module}", sources=[]) for module in MODULES],
    cmdclass={"build_py": BuildPython, "build_ext": BuildNative},
)
