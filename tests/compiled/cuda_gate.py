"""The CUDA part of `make gate`: every kernel for every architecture, then the budget and its table."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from compiled import kernel_table
from compiled.machine_code import Kernel, ToolError, kernels, nvcc, nvcc_version, ptx, sources
from compiled.rules import (
    archs,
    contract_complaints,
    machine_complaints,
    nvcc_name,
    read_budget,
    updated_budget,
    write_budget,
)


def kernels_for(arch: int) -> dict[str, Kernel]:
    return {name: kernel for source in sources() for name, kernel in kernels(source, arch).items()}


def ptx_complaints_for(arch: int) -> list[str]:
    bodies = {name: body for source in sources() for name, body in ptx(source, arch).items()}
    return [f"compute_{arch}: {text}" for name, body in bodies.items() for text in contract_complaints(name, body)]


def check() -> bool:
    """Prints a line per architecture; brings the budget and docs/kernels.md up to date. False if a rule is broken."""
    if nvcc() is None:
        print("CUDA     -         not checked: no nvcc")
        return True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = {arch: pool.submit(kernels_for, arch) for arch in archs()}
        reading = {arch: pool.submit(ptx_complaints_for, arch) for arch in archs()}
    try:
        found = {arch: future.result() for arch, future in compiling.items()}
        wrong = {arch: future.result() for arch, future in reading.items()}
    except ToolError as error:
        print(f"CUDA: {error}")
        return False
    budget = read_budget()
    recorded = budget["compiler"] in ("", nvcc_name())
    if recorded:
        budget = updated_budget(budget, found, nvcc_name())
        write_budget(budget)
        kernel_table.write()
    for arch, of_arch in found.items():
        for name, kernel in of_arch.items():
            wrong[arch] += machine_complaints(name, kernel, arch, budget, nvcc_name())
        verdict = "WRONG" if wrong[arch] else "ok"
        print(f"CUDA     sm_{arch:<6} nvcc {nvcc_version():7} {verdict}", *wrong[arch], sep="\n    ")
    if not recorded:
        print(f'registers not compared: the budget is of {budget["compiler"]}; "" in its place records this one')
    return not any(wrong.values())
