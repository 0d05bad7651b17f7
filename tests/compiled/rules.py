"""What the kernels' machine code and PTX must be, each rule as a list of complaints.

budget.json beside this file holds, for each CUDA kernel, what people decide (how many accesses of which width one pass
over the elements takes at least, bytes per element) and what `make gate` fills in (registers and shared memory per
architecture, threads); triton_budget.json holds the same of the Triton kernels, where the first follows from the mode
(triton_modes.py). Register counts belong to one compiler; under another they are not compared.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from compiled.gpus import occupancy, shared_limit
from compiled.machine_code import CSRC, Kernel, known_archs, nvcc_version

BUDGET = Path(__file__).with_name("budget.json")

# The contract in PTX: every operation is rounded on its own (an add or mul without .rn is one that ptxas may fuse),
# division and square root are IEEE's, denormals are kept.
FORBIDDEN = {
    "fused multiply-add": r"\bfma\.[\w.]+|\bmad\.[\w.]*f(?:16|32|64)\w*",
    "an operation that ptxas may fuse": r"\b(?:add|sub|mul)\.(?:f16|f32|f64|bf16)\w*",
    "denormals flushed": r"\b[a-z0-9]+\.[\w.]*ftz[\w.]*",
    "an approximation": r"\b[a-z0-9]+\.[\w.]*(?:approx|full)\.[\w.]*",
    "a division or root that is not IEEE's": r"\b(?:div|sqrt|rcp|rsqrt)\.(?!rn\.)[\w.]*f(?:32|64)",
}
# What the rules above are about; a kernel without it is not the one they were written for.
EXPECTED = {
    "update_kernel": ("add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"),
    "finish_stats_kernel": ("add.rn.f64",),
    "prologue_kernel": ("add.rn.f64", "mul.rn.f64", "div.rn.f64", "sqrt.rn.f64"),
    "grad_stats_kernel": ("add.rn.f32", "mul.rn.f32", "add.rn.f64"),
    "scale_kernel": ("mul.rn.f32",),
    "accumulate_kernel": ("add.rn.f32",),
    "flat_adam_kernel": ("add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "div.rn.f64", "sqrt.rn.f64"),
    "flat_chunks_kernel": ("add.rn.f32", "mul.rn.f32", "add.rn.f64"),
    "flat_scale_kernel": ("mul.rn.f32",),
    "flat_total_kernel": ("add.rn.f64",),
}


def archs() -> list[int]:
    """Those the module is built for by default (csrc/cuda/build.cmake), as far as this nvcc knows them."""
    listed = re.search(r"foreach\(arch ([\d ]+)\)", (CSRC / "cuda" / "build.cmake").read_text("utf-8"))
    assert listed, "build.cmake lists no architectures"
    return [arch for arch in map(int, listed[1].split()) if arch in known_archs()]


def nvcc_name() -> str:
    """As a budget names it."""
    return f"nvcc {nvcc_version()}"


def read_budget(path: Path = BUDGET) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def contract_complaints(name: str, ptx: str) -> list[str]:
    """What a kernel's PTX has that the arithmetic contract forbids, and what it lacks."""
    found = []
    for what, pattern in FORBIDDEN.items():
        hits = sorted(set(re.findall(pattern, ptx)))
        if hits:
            found.append(f"{name}: {what}: {', '.join(hits)}")
    missing = [each for each in EXPECTED.get(name.partition("<")[0], ()) if each not in ptx]
    return found + ([f"{name}: no {', '.join(missing)}: are the rules still about this kernel?"] if missing else [])


def machine_complaints(
    name: str, kernel: Kernel, target: int | str, budget: dict[str, Any], compiler: str
) -> list[str]:  # fmt: skip
    """What one kernel instance in one cubin has or lacks, by the budget and the architecture's limits.

    Args:
        target: the number after sm_, or AMD's name. compiler: name and version, as the budget has it.
    """
    entry = budget["kernels"].get(name)
    if entry is None:
        return [f"{name}: no entry in the budget: add its loads, stores and bytes_per_element, then run `make gate`"]
    found = []
    for what, size in (("stack", kernel.stack), ("local memory", kernel.local), ("spilled", kernel.spills)):
        if size:
            found.append(f"{size} bytes {what}")
    if not kernel.threads:
        found.append("no __launch_bounds__")
    elif not occupancy(target, kernel.registers, kernel.threads, 0):
        found.append(f"{kernel.registers} registers for {kernel.threads} threads: it cannot be launched")
    if kernel.shared > shared_limit(target):
        found.append(f"{kernel.shared} bytes of shared memory, a block has {shared_limit(target)}")
    for what, has, expected in (("load", kernel.loads, entry["loads"]), ("store", kernel.stores, entry["stores"])):
        for width, count in expected.items():
            if has.get(width, 0) < count:
                found.append(f"{has.get(width, 0)} {what}s of {width} bits, expected {count} or more")
    if budget["compiler"] == compiler:
        found += _growth(kernel, entry, str(target))
    return [f"{name}, {target_name(target)}: {text}" for text in found]


def target_name(target: int | str) -> str:
    return target if isinstance(target, str) else f"sm_{target}"


def _growth(kernel: Kernel, entry: dict[str, Any], arch: str) -> list[str]:
    if arch not in entry.get("registers", {}):
        return ["no budget: run `make gate`"]
    found = []
    for what in ("registers", "shared"):
        has, most = getattr(kernel, what), entry[what][arch]
        if has > most:
            found.append(f"{what} grew from {most} to {has}; if that is meant, delete this number and run `make gate`")
    if arch.isdigit() and kernel.threads != entry["threads"]:  # AMD's warps are wider
        found.append(f"blocks of {kernel.threads} threads, the budget says {entry['threads']}: run `make gate`")
    return found


def updated_budget(
    budget: dict[str, Any], found: dict[Any, dict[str, Kernel]], compiler: str
) -> dict[str, Any]:  # fmt: skip
    """The budget with what was found where nothing was recorded or less is needed now; without kernels that are gone.

    Args:
        found: target -> kernel's name -> kernel; all kernels of all sources.
    """
    kernels = {}
    for name in sorted({name for of_target in found.values() for name in of_target} & set(budget["kernels"])):
        entry = dict(budget["kernels"][name])
        for what in ("registers", "shared"):
            old = entry.get(what, {})
            has = {str(target): getattr(of_target[name], what) for target, of_target in found.items()}
            entry[what] = {target: min(number, old.get(target, number)) for target, number in has.items()}
        entry["threads"] = max(of[name].threads for target, of in found.items() if isinstance(target, int))
        kernels[name] = entry
    return {"compiler": compiler, "kernels": kernels}


def write_budget(budget: dict[str, Any], path: Path = BUDGET) -> None:
    """One line per fact, so that a change shows which."""
    lines = [f' "compiler": {json.dumps(budget["compiler"])},', ' "kernels": {']
    for name, entry in budget["kernels"].items():
        facts = ",\n".join(f"   {json.dumps(what)}: {json.dumps(value)}" for what, value in entry.items())
        lines.append(f"  {json.dumps(name)}: {{\n{facts}\n  }},")
    lines[-1] = lines[-1].removesuffix(",")
    path.write_text("{\n" + "\n".join(lines) + "\n }\n}\n", encoding="utf-8")
