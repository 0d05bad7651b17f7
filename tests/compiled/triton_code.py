"""What Triton makes of a launch for a GPU that is not here: the facts of its machine code, and the texts it came from.

Triton keeps what it compiles, here in build/compiled/triton/, under hashes of the kernel's source, the launch, the
target and its own version.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from compiled.machine_code import CACHE, Kernel, read_cubin, sass
from compiled.triton_launches import TARGETS, Launch
from triton.compiler import ASTSource

VERSION: str = triton.__version__


@dataclass(frozen=True)
class Compiled:
    kernel: Kernel
    conversions: int  # of layouts within loops over whole tiles: through shared memory, or by shuffles
    ptx: str  # of NVIDIA's targets
    llvm: str  # LLVM IR after its passes, of AMD's
    assembly: str  # likewise; SASS of NVIDIA's


def compiled(launch: Launch, target: str) -> Compiled:
    """Raises what Triton raises if the launch does not compile; warnings too are for the caller to judge."""
    return compiled_function(getattr(importlib.import_module(launch.module), launch.kernel), launch, target)


def compiled_function(function: Any, launch: Launch, target: str) -> Compiled:
    source = ASTSource(function, launch.signature, launch.constants, launch.attributes)
    with _cache():
        made = triton.compile(source, target=TARGETS[target], options=launch.options)
    shared, conversions = made.metadata.shared, conversions_in(str(made.asm["ttgir"]), _tile(launch))
    threads = launch.options["num_warps"] * TARGETS[target].warp_size
    if "cubin" in made.asm:
        ptx = str(made.asm["ptx"])
        kernel, code = _of_nvidia(made.asm["cubin"], ptx, shared)
        return Compiled(kernel, conversions, ptx, "", code)
    llvm, assembly = str(made.asm["llir"]), str(made.asm["amdgcn"])
    return Compiled(_of_amd(llvm, assembly, shared, threads), conversions, "", llvm, assembly)


@contextmanager
def _cache() -> Iterator[None]:
    knob = triton.knobs.cache
    before = knob.dir
    knob.dir = str(CACHE / "triton")
    try:
        yield
    finally:
        knob.dir = before


def _tile(launch: Launch) -> int:
    """Elements of a whole tile; 0 if the kernel has no such loop."""
    return launch.constant("BLOCK") if "REST" in launch.signature else 0


# ---- machine code ----------------------------------------------------------------------------------------------------
def _of_nvidia(cubin: Any, ptx: str, shared: int) -> tuple[Kernel, str]:
    """And its SASS."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        code = sass(path)
        (kernel,) = read_cubin(path, code).values()
    loads, stores = vectors("ld", ptx), vectors("st", ptx)
    return replace(kernel, shared=kernel.shared + shared, loads=loads, stores=stores), "".join(code.values())


def vectors(operation: str, ptx: str) -> dict[str, int]:
    """Bits -> number of vector accesses to global memory. Scalars are left out: every table is read by them."""
    found = re.findall(rf"\b{operation}\.global[\w.:]*\.v(\d)\.[a-z](\d+)", ptx)
    widths = Counter(str(int(count) * int(bits)) for count, bits in found)
    if operation == "ld":  # what goes to shared memory without a register
        widths["128"] += len(re.findall(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* [^;]*, 0x10\b", ptx))
    return dict(sorted((+widths).items()))


def _of_amd(llvm: str, assembly: str, shared: int, threads: int) -> Kernel:
    def counted(name: str) -> int:
        (number,) = re.findall(rf"^\s+\.{name}:\s*(\d+)$", assembly, re.MULTILINE)
        return int(number)

    return Kernel(
        registers=counted("vgpr_count"),
        stack=counted("private_segment_fixed_size"),
        local=0,  # AMD has no other memory of a lane than the stack
        shared=counted("group_segment_fixed_size") + shared,
        spills=counted("vgpr_spill_count"),
        threads=threads if counted("max_flat_workgroup_size") == threads else 0,
        loads=aligned_vectors("load", llvm),
        stores=aligned_vectors("store", llvm),
    )


_BITS = {"float": 32, "double": 64, "half": 16, "bfloat": 16}


def aligned_vectors(operation: str, llvm: str) -> dict[str, int]:
    """As `vectors`, from LLVM IR; a vector that is not aligned as a whole would be split."""
    found = re.findall(rf"\b{operation} <([2-9]|\d\d+) x (\w+)>.* addrspace\(1\) .*align (\d+)", llvm)
    wide = [(int(count) * (_BITS.get(kind) or int(kind[1:])), int(align)) for count, kind, align in found]
    widths = Counter(str(bits) for bits, align in wide if align * 8 >= bits)
    for count, bits in re.findall(rf"\braw\.ptr\.buffer\.{operation}\.v(\d)[if](\d+)\(", llvm):
        widths[str(int(count) * int(bits))] += 1
    return dict(sorted(widths.items()))


# ---- layouts ---------------------------------------------------------------------------------------------------------
def conversions_in(ttgir: str, tile: int) -> int:
    """Conversions of layouts in those loops of Triton's GPU IR that handle tensors of `tile` elements."""
    if not tile:
        return 0
    loops = re.finditer(r"^( +)(?:%[\w:, ]+ = )?scf\.for .*?^\1}", ttgir, re.DOTALL | re.MULTILINE)
    whole = [loop[0] for loop in loops if f"tensor<{tile}x" in loop[0]]
    assert whole, f"no loop over tiles of {tile} elements: is this still the kernel that is read here?"
    return sum(loop.count("ttg.convert_layout") for loop in whole)
