"""Attention's part of `make gate`: every mode for the targets it has, then the budget and its table.

The budget holds what `make gate` fills in for each kernel and target: registers, shared memory, threads, instructions
of the loop over whole blocks, and what the table shows beside. Numbers of one Triton, as those of the other kernels.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from compiled import kernel_table
from compiled.attention_modes import MODES, Mode, recorded
from compiled.attention_rules import complaints, whole_loop
from compiled.matrix_loops import is_matrix
from compiled.rules import read_budget, write_budget
from compiled.triton_code import Compiled, compiled
from compiled.triton_gate import COMPILER
from compiled.triton_launches import TARGETS, Launch

from halfstep.triton_kernels.attention.segments import Config

BUDGET = kernel_table.ATTENTION_BUDGET
LIMITS = ("registers", "shared", "loop")  # of which the least is kept


def mode_of(name: str) -> Mode:
    return next(mode for mode in MODES if name.endswith(f"<{mode.name}>"))


def facts(name: str, launch: Launch, made: Compiled) -> dict[str, Any]:
    """What the budget holds of a kernel on a target."""
    loop, c = whole_loop(mode_of(name), launch, made), launch.constant("C")
    found: dict[str, Any] = {
        "registers": made.kernel.registers, "shared": made.kernel.shared, "threads": made.kernel.threads,
        "tile": _tile(launch, c),
    }  # fmt: skip
    if loop:
        matrix = [f"{count} {opcode}" for opcode, count in sorted(loop.opcodes.items()) if is_matrix(opcode)]
        found |= {"loop": loop.instructions, "matrix": ", ".join(matrix)}
    return found


def _tile(launch: Launch, c: Config) -> str:
    if launch.kernel == "delta_kernel":
        return f"{launch.constant('ROWS')} rows"
    return f"{c.BLOCK_M}x{c.BLOCK_N}, {launch.options['num_stages']}"


def updated(budget: dict[str, Any], found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """With what was found where nothing was recorded or less is needed now; without kernels that are gone."""
    kernels: dict[str, Any] = {}
    for (target, name), of_kernel in found.items():
        old, entry = budget["kernels"].get(name, {}), kernels.setdefault(name, {})
        for what, value in of_kernel.items():
            before = old.get(what, {}).get(target, value)
            entry.setdefault(what, {})[target] = min(value, before) if what in LIMITS else value
    return {"compiler": COMPILER, "kernels": dict(sorted(kernels.items()))}


def check(targets: Sequence[str] = tuple(TARGETS)) -> bool:
    """Prints a line per target; brings the budget and docs/kernels.md up to date. False if a rule is broken."""
    tasks = [(target, name, launch) for target in targets for name, launch in recorded(target).items()]
    # Started afresh: neither LLVM nor torch's threads like a fork. Facts come back, not what was compiled.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        made = dict(zip([task[:2] for task in tasks], pool.map(_judged, tasks, chunksize=4), strict=True))
    budget = read_budget(BUDGET)
    recording = budget["compiler"] in ("", COMPILER) and all(found for found, _ in made.values())
    if recording:
        write_budget(updated(budget, {key: found for key, (found, _) in made.items()}), BUDGET)
        kernel_table.write()
    for target in targets:
        texts = [text for (of, _), (_, wrong) in made.items() if of == target for text in wrong]
        print(f"attention {target:8} {COMPILER:12} {'WRONG' if texts else 'ok'}", *texts, sep="\n    ")
    if not recording:
        print(f'attention: nothing recorded: the budget is of {budget["compiler"]}; "" in its place records this one')
    return not any(wrong for _, wrong in made.values())


def _judged(task: tuple[str, str, Launch]) -> tuple[dict[str, Any], list[str]]:
    """(facts, complaints); no facts if it does not compile."""
    target, name, launch = task
    try:
        made = compiled(launch, target)
    except Exception as error:  # whatever a compiler may raise is a finding
        return {}, [f"{name}, {target}: does not compile: {type(error).__name__}: {error}"]
    return facts(name, launch, made), complaints(name, mode_of(name), launch, made, target, read_budget(BUDGET))
