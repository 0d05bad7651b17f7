"""docs/kernels.md, from the budgets: what the compilers made of each kernel, and what that lets one expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled.gpus import AMD_GPUS, GPUS, occupancy
from compiled.machine_code import ROOT
from compiled.rules import BUDGET, read_budget, target_name

DOCUMENT = ROOT / "docs" / "kernels.md"
TRITON_BUDGET = Path(__file__).with_name("triton_budget.json")
ATTENTION_BUDGET = Path(__file__).with_name("attention_budget.json")
BANDWIDTH = 4.8e12  # bytes a second, NVIDIA's data sheet of the H200
ELEMENTS = 1e9
CUDA_TARGETS: list[int | str] = [*GPUS]
TRITON_TARGETS: list[int | str] = [*(arch for arch in GPUS if arch != 75), *AMD_GPUS]

HEAD = f"""# Kernels, as compiled

Made by `make gate` from [tests/compiled/budget.json](../tests/compiled/budget.json) and
[triton_budget.json](../tests/compiled/triton_budget.json). **Nothing on this page was measured on a GPU.**

Registers of a thread, and the share of an SM's warps (AMD: of a compute unit's waves) that registers, shared memory and
block size leave room for. No kernel spills to memory, has a stack, or uses local memory.

Bytes are those read and written for each element, from what the kernel must touch. The time is a **prediction, not a
measurement**: these bytes for 10^9 elements at {BANDWIDTH / 1e12:.1f} TB/s (the H200's data sheet), with nothing lost.
Work that does not depend on the number of elements has none.
"""
TRITON = """
Threads are those of NVIDIA's GPUs. Of the update's modes, which multiply to hundreds, these are the usual and the
heaviest ones. Another version of Triton gives other numbers.
"""
ATTENTION = """
Of head dims and options, which multiply to hundreds, these are what the kernels differ by; causal or not is one kernel.
A tile is queries x keys, and loads in flight. Instructions are those of one warp in one round of the loop over whole
blocks, which masks nothing, and among them the matrix instructions: the exact ones of the dtype. Tiles of head dims 64
and 128 were chosen for few instructions a score, then for several blocks on an SM, among those that spill nothing;
others for spilling nothing. Nothing here was timed.

| kernel | target | tile | threads | registers | shared KiB | instructions | matrix instructions |
|---|---|---|---|---|---|---|---|
"""
TRAFFIC = """
| kernel | elements | bytes per element | predicted ms, 10^9 elements |
|---|---|---|---|
"""


def markdown(cuda: dict[str, Any], triton: dict[str, Any], attention: dict[str, Any]) -> str:
    return (
        HEAD
        + f"\n## CUDA kernels, {cuda['compiler']}\n\n"
        + _registers(cuda["kernels"], CUDA_TARGETS)
        + _traffic(cuda["kernels"])
        + f"\n## Triton kernels, {triton['compiler']}\n{TRITON}\n"
        + _registers(triton["kernels"], TRITON_TARGETS)
        + _traffic(triton["kernels"])
        + f"\n## Attention, {attention['compiler']}\n{ATTENTION}"
        + _attention(attention["kernels"])
    )


def write() -> None:
    DOCUMENT.parent.mkdir(exist_ok=True)
    budgets = map(read_budget, (BUDGET, TRITON_BUDGET, ATTENTION_BUDGET))
    DOCUMENT.write_text(markdown(*budgets), encoding="utf-8")


def _registers(kernels: dict[str, Any], targets: list[int | str]) -> str:
    rows = [["kernel", "threads", *map(target_name, targets)], ["---"] * (2 + len(targets))]
    rows += [
        [f"`{name}`", str(entry["threads"]), *(_cell(entry, target) for target in targets)]
        for name, entry in kernels.items()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(entry: dict[str, Any], target: int | str) -> str:
    registers = entry["registers"].get(str(target))
    if registers is None:
        return "-"
    return f"{registers}, {occupancy(target, registers, entry['threads'], entry['shared'][str(target)]):.0%}"


def _attention(kernels: dict[str, Any]) -> str:
    rows = []
    for name, entry in kernels.items():
        for target, registers in entry["registers"].items():
            loop, matrix = (entry.get(of, {}).get(target) or "-" for of in ("loop", "matrix"))
            size = entry["tile"][target], entry["threads"][target]
            shared = f"{entry['shared'][target] / 1024:.0f}"
            rows.append([f"`{name}`", target, *size, registers, shared, loop, matrix])
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _traffic(kernels: dict[str, Any]) -> str:
    return TRAFFIC + "".join(
        f"| `{name}` | {elements} | {size} | {size * ELEMENTS / BANDWIDTH * 1e3:.2f} |\n"
        for name, entry in kernels.items()
        for elements, size in entry["bytes_per_element"].items()
    )
