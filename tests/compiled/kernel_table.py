"""docs/kernels.md, from the budget: what the compiler made of each kernel, and what that lets one expect."""

from __future__ import annotations

from typing import Any

from compiled.gpus import GPUS, occupancy
from compiled.machine_code import ROOT

DOCUMENT = ROOT / "docs" / "kernels.md"
BANDWIDTH = 4.8e12  # bytes a second, NVIDIA's data sheet of the H200
ELEMENTS = 1e9

HEAD = """# CUDA kernels, as compiled

Made by `make gate` from [tests/compiled/budget.json](../tests/compiled/budget.json), with nvcc {nvcc}. **Nothing on
this page was measured on a GPU.**

## Registers and occupancy

Registers of a thread, and the share of an SM's warps that registers, shared memory and block size leave room for. No
kernel spills, has a stack, or uses local memory.

"""
TRAFFIC = """
## Memory traffic

Bytes read and written for each element, from what the kernel must touch. The last column is a **prediction, not a
measurement**: these bytes for 10^9 elements at {bandwidth:.1f} TB/s (the H200's data sheet), with nothing lost. The
prologue's work does not depend on the number of elements.

| kernel | elements | bytes per element | predicted ms, 10^9 elements |
|---|---|---|---|
"""


def markdown(budget: dict[str, Any]) -> str:
    kernels = budget["kernels"]
    rows = [["kernel", "threads", *(f"sm_{arch}" for arch in GPUS)], ["---"] * (2 + len(GPUS))]
    rows += [[f"`{name}`", str(entry["threads"]), *map(_cell(entry), GPUS)] for name, entry in kernels.items()]
    text = HEAD.format(nvcc=budget["nvcc"]) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text += TRAFFIC.format(bandwidth=BANDWIDTH / 1e12)
    for name, entry in kernels.items():
        for elements, size in entry["bytes_per_element"].items():
            text += f"| `{name}` | {elements} | {size} | {size * ELEMENTS / BANDWIDTH * 1e3:.2f} |\n"
    return text


def _cell(entry: dict[str, Any]):
    def cell(arch: int) -> str:
        registers = entry["registers"].get(str(arch))
        if registers is None:
            return "-"
        return f"{registers}, {occupancy(arch, registers, entry['threads'], entry['shared'][str(arch)]):.0%}"

    return cell
