"""What nvcc makes of the CUDA kernels, read without a GPU: registers, stack, spills, access widths, and their PTX.

One compile per source file and architecture, with the flags of the build (csrc/cuda/nvcc_flags.txt). What was read is
kept in build/compiled/ under a hash of everything that could change it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = [line for line in (CSRC / "cuda" / "nvcc_flags.txt").read_text("utf-8").splitlines() if line.startswith("-")]
CACHE = ROOT / "build" / "compiled"


@dataclass(frozen=True)
class Kernel:
    """One kernel instance in one cubin."""

    registers: int
    stack: int  # bytes a thread
    local: int  # bytes a thread
    shared: int  # bytes a block, static
    spills: int  # bytes stored and loaded
    threads: int  # of the largest block, from __launch_bounds__; 0 = not stated
    loads: dict[str, int]  # width in bits -> instructions that load from global memory
    stores: dict[str, int]


class ToolError(RuntimeError):
    """A tool is missing or refused; the text is what it said."""


# ---- tools -----------------------------------------------------------------------------------------------------------
@functools.cache
def nvcc() -> str | None:
    """Path of nvcc, found where the build looks for it; None if there is none."""
    named = os.environ.get("CUDACXX")
    if named:
        return shutil.which(named)
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [f"{home}/bin" for home in homes if home] + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


@functools.cache
def binary_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm: of the CUDA toolkit, of PATH, or the one Triton brings."""
    compiler = nvcc()
    folders = [str(Path(compiler).resolve().parent)] if compiler else []
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise ToolError(f"{name} was not found in the CUDA toolkit, PATH or Triton: install triton, which brings it")
    return path


@functools.cache
def nvcc_version() -> str:
    """Major and minor: 13.0."""
    found = re.search(r"release (\d+\.\d+)", _output(str(nvcc()), "--version"))
    assert found, "nvcc --version names no release"
    return found[1]


@functools.cache
def known_archs() -> frozenset[int]:
    """Architectures that this nvcc compiles for."""
    return frozenset(map(int, re.findall(r"sm_(\d+)\b", _output(str(nvcc()), "--list-gpu-code"))))


def _output(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, input=stdin)
    if done.returncode:
        raise ToolError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


# ---- kernels ---------------------------------------------------------------------------------------------------------
def sources() -> list[Path]:
    return sorted((CSRC / "cuda").glob("*.cu"))


def kernels(source: Path, arch: int, flags: list[str] | None = None) -> dict[str, Kernel]:
    """Every kernel of a source file, compiled for sm_`arch`; `flags` instead of the build's.

    Raises:
        ToolError: it does not compile (warnings are errors), or a tool is missing.
    """
    stored = _stored("kernels", source, arch, flags or FLAGS)
    if stored.is_file():
        return {name: Kernel(**facts) for name, facts in json.loads(stored.read_text("utf-8")).items()}
    found = _compile_and_read(source, arch, flags or FLAGS)
    _store(stored, {name: asdict(kernel) for name, kernel in found.items()})
    return found


def ptx(source: Path, arch: int, flags: list[str] | None = None) -> dict[str, str]:
    """Name of each kernel, and of each function that was not inlined -> its PTX for compute_`arch`."""
    stored = _stored("ptx", source, arch, flags or FLAGS)
    if not stored.is_file():
        with tempfile.TemporaryDirectory() as folder:
            text = _nvcc(source, flags or FLAGS, folder, "-ptx", f"-arch=compute_{arch}")[0].read_text("utf-8")
        # name(parameters) directives { body }; a declaration ends with a semicolon instead
        pattern = r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?(\w+)\s*\([^()]*\)[^;{]*\{(.*?)\n}"
        bodies = dict(re.findall(pattern, text, re.DOTALL))
        names = demangled(list(bodies))
        _store(stored, {names[mangled]: body for mangled, body in bodies.items()})
    return json.loads(stored.read_text("utf-8"))


def _compile_and_read(source: Path, arch: int, flags: list[str]) -> dict[str, Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin, said = _nvcc(source, flags, folder, "-cubin", f"-arch=sm_{arch}", "-Xptxas=-v")
        read = read_cubin(cubin)
    spills = {
        name: int(stored) + int(loaded)
        for name, stored, loaded in re.findall(
            r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", said
        )
    }
    names = demangled(list(read))
    return {names[mangled]: replace(kernel, spills=spills[mangled]) for mangled, kernel in read.items()}


def sass(cubin: Path) -> dict[str, str]:
    """The code of every kernel of a cubin, by its mangled name."""
    code = _output(binary_tool("nvdisasm"), "-c", str(cubin))
    return dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", code, re.DOTALL | re.MULTILINE))


def read_cubin(cubin: Path, code: dict[str, str] | None = None) -> dict[str, Kernel]:
    """Every kernel of a cubin, by its mangled name; of spills only whether there are any (bytes: of one access).

    Args:
        code: its `sass`, if that is known.
    """
    usage = _output(binary_tool("cuobjdump"), "-res-usage", str(cubin))
    elf = _output(binary_tool("cuobjdump"), "-elf", str(cubin))
    bodies = code or sass(cubin)
    used = re.findall(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    return {
        mangled: Kernel(
            registers=int(registers),
            stack=int(stack),
            local=int(local),
            shared=int(shared),
            spills=len(re.findall(r"\b(?:LDL|STL)\b", bodies[mangled])),
            threads=_threads(elf, mangled),
            loads=widths("LD", bodies[mangled]),
            stores=widths("ST", bodies[mangled]),
        )
        for mangled, registers, stack, shared, local in used
    }


# nvcc states the largest block, Triton the only one
_BLOCK_SIZE = r"EIATTR_(?:MAX_THREADS|REQNTID)\n.*\n\s*Value:\s*(0x\w+) (0x\w+) (0x\w+)"


def _threads(elf: str, mangled: str) -> int:
    section = re.search(rf"^\.nv\.info\.{mangled}\n(.*?)(?=^\.|\Z)", elf, re.DOTALL | re.MULTILINE)
    bound = re.search(_BLOCK_SIZE, section[1] if section else "")
    return math.prod(int(each, 16) for each in bound.groups()) if bound else 0


def widths(kind: str, code: str) -> dict[str, int]:
    """Bits -> number of instructions that load ("LD") or store ("ST") global memory, by their opcodes in SASS."""
    count: Counter[str] = Counter()
    for modifiers in re.findall(rf"\b{kind}G?\.E((?:\.\w+)*)", code):
        parts = modifiers.split(".")
        width = next((part for part in parts if part in ("64", "128", "256")), None)
        narrow = next((part[1:] for part in parts if re.fullmatch(r"[US](8|16)", part)), None)
        count[width or narrow or "32"] += 1
    return dict(sorted(count.items()))


def demangled(names: list[str]) -> dict[str, str]:
    """Mangled -> template name and arguments, without namespaces and parameters."""
    if not names:
        return {}
    plain = _output("c++filt", stdin="\n".join(names)).splitlines()
    return {mangled: short_name(full) for mangled, full in zip(names, plain, strict=True)}


def short_name(full: str) -> str:
    """`void halfstep::(anonymous namespace)::f<(halfstep::Dtype)1>(int*)` -> `f<(Dtype)1>`."""
    text = re.sub(r"\(anonymous namespace\)::|\b_(GLOBAL__N__|INTERNAL_)\w+::|\bhalfstep::", "", full)
    depth = begin = 0
    for index, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter == " ":  # what stands before is the type of the result
            begin = index + 1
        if depth == 0 and letter == "(":
            return text[begin:index]
    return text[begin:]


def _nvcc(source: Path, flags: list[str], folder: str, *options: str) -> tuple[Path, str]:
    """The file made and what the compiler said."""
    compiler = nvcc()
    if compiler is None:
        raise ToolError("nvcc was not found")
    made = Path(folder) / "made"
    macros = ['-DHALFSTEP_MODULE="halfstep._cuda"', '-DHALFSTEP_ARCHS=""']  # texts of messages
    command = [compiler, *flags, *macros, f"-I{CSRC}", "-Werror=all-warnings", *options, str(source), "-o", str(made)]
    return made, _output(*command)


# ---- cache -----------------------------------------------------------------------------------------------------------
def _stored(what: str, source: Path, arch: int, flags: list[str]) -> Path:
    """Where the facts are kept: another file once a source, a header, the tools or this file change."""
    state = hashlib.sha256(json.dumps([what, arch, flags, _output(str(nvcc()), "--version")]).encode())
    headers = [path for pattern in ("*.h", "cuda/*.h", "cuda/*.cuh") for path in sorted(CSRC.glob(pattern))]
    for path in [source, *headers, Path(__file__)]:
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return CACHE / f"{source.stem}-{arch}-{what}-{state.hexdigest()[:16]}.json"


def _store(path: Path, facts: dict) -> None:
    """Written beside and renamed: several test processes may look."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        json.dump(facts, file)
    os.replace(file.name, path)
