"""The Triton part of `make gate`: every mode for every target, then the budget and its table.

Other versions of Triton than the budget's are held to the same rules, registers apart.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from compiled import amd_rules, kernel_table
from compiled.machine_code import Kernel
from compiled.rules import contract_complaints, machine_complaints, read_budget, updated_budget, write_budget
from compiled.triton_code import VERSION, Compiled, compiled
from compiled.triton_launches import TARGETS, Launch
from compiled.triton_modes import recorded, traffic

BUDGET = kernel_table.TRITON_BUDGET
COMPILER = f"triton {VERSION}"


def number_of(target: str) -> int | str:
    """As gpus.py and the budget name it: 90, or gfx942."""
    return int(target.removeprefix("sm_")) if target.startswith("sm_") else target


def with_traffic(budget: dict[str, Any]) -> dict[str, Any]:
    """The budget with an entry for each mode, of what follows from the mode itself."""
    kernels = {}
    for name, launch in recorded("sm_90").items():
        moved = traffic(launch, lanes=32)
        loads, stores = moved.accesses()
        follows = {"loads": loads, "stores": stores, "bytes_per_element": {"any": moved.bytes} if moved.bytes else {}}
        kernels[name] = {**budget["kernels"].get(name, {}), **follows}
    return {**budget, "kernels": kernels}


def complaints(name: str, made: Compiled, target: str, budget: dict[str, Any]) -> list[str]:
    """By every rule: machine code, layouts, and the arithmetic's contract."""
    found = machine_complaints(name, made.kernel, number_of(target), budget, COMPILER)
    if made.conversions:
        found.append(f"{name}, {target}: {made.conversions} conversions of layouts in the loop over whole tiles")
    if made.ptx:
        contract = contract_complaints(name, made.ptx)
    else:
        contract = amd_rules.contract_complaints(name, made.llvm, made.assembly)
    return found + [f"{text} ({target})" for text in contract]


def check(targets: Sequence[str] = tuple(TARGETS)) -> bool:
    """Prints a line per target; brings the budget and docs/kernels.md up to date. False if a rule is broken."""
    tasks = [(target, name, launch) for target in targets for name, launch in recorded(target).items()]
    # Several processes, started afresh: neither LLVM nor torch's threads like a fork.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        made = dict(zip([task[:2] for task in tasks], pool.map(_compiled, tasks, chunksize=4), strict=True))
    found: dict[str, dict[str, Kernel]] = {target: {} for target in targets}
    for (target, name), one in made.items():
        if isinstance(one, Compiled):
            found[target][name] = one.kernel
    budget = with_traffic(read_budget(BUDGET))
    recording = budget["compiler"] in ("", COMPILER) and all(isinstance(one, Compiled) for one in made.values())
    if recording:
        numbered = {number_of(target): kernels for target, kernels in found.items()}
        budget = updated_budget(budget, numbered, COMPILER)
        write_budget(budget, BUDGET)
        kernel_table.write()
    wrong: dict[str, list[str]] = {target: [] for target in targets}
    for (target, name), one in made.items():
        wrong[target] += complaints(name, one, target, budget) if isinstance(one, Compiled) else [one]
    for target, texts in wrong.items():
        print(f"Triton   {target:9} {COMPILER:12} {'WRONG' if texts else 'ok'}", *texts, sep="\n    ")
    if not recording:
        print(f'registers not recorded: the budget is of {budget["compiler"]}; "" in its place records this one')
    return not any(wrong.values())


def _compiled(task: tuple[str, str, Launch]) -> Compiled | str:
    """Or what Triton said."""
    target, name, launch = task
    try:
        return compiled(launch, target)
    except Exception as error:  # whatever a compiler may raise is a finding
        return f"{name}, {target}: does not compile: {type(error).__name__}: {error}"
