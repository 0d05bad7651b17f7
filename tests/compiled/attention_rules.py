"""What the machine code of attention's kernels must be, beside what rules.py says of every kernel.

Each product is the matrix instruction of its own dtype: one that was upcast would be TF32's. float32 is exact: no
matrix instruction, but on AMD, whose own for float32 rounds as a fused multiply-add does.
"""

from __future__ import annotations

import re
from typing import Any

from compiled.attention_modes import Mode, vectors_of
from compiled.matrix_loops import Loop, is_matrix, opcodes, whole_block_loop
from compiled.rules import machine_complaints
from compiled.triton_code import Compiled
from compiled.triton_gate import COMPILER, number_of
from compiled.triton_launches import Launch

SLACK = 1.03  # of the instructions in the loop over whole blocks, over the budget's

_MMA_SYNC = {
    "bfloat16": r"HMMA\.16816\.F32\.BF16", "float16": r"HMMA\.16816\.F32", "tf32": r"HMMA\.1688\.F32\.TF32",
    "float32": None,
}  # fmt: skip
_WGMMA = {
    "bfloat16": r"HGMMA\.64x\d+x16\.F32\.BF16", "float16": r"HGMMA\.64x\d+x16\.F32",
    "tf32": r"HGMMA\.64x\d+x8\.F32\.TF32", "float32": None,
}  # fmt: skip
_TCGEN05 = {"bfloat16": "UTCHMMA", "float16": "UTCHMMA", "tf32": "UTCHMMA", "float32": None}  # and its kind in PTX
_CDNA = {
    "bfloat16": r"v_mfma_f32_\d+x\d+x\d+_bf16(?:_1k)?", "float16": r"v_mfma_f32_\d+x\d+x\d+_f16",
    "tf32": r"v_mfma_f32_\d+x\d+x\d+_x?f32", "float32": r"v_mfma_f32_\d+x\d+x\d+_f32",
}  # fmt: skip
MATRIX = {
    "sm_80": _MMA_SYNC, "sm_86": _MMA_SYNC, "sm_89": _MMA_SYNC, "sm_120": _MMA_SYNC,
    "sm_90": _WGMMA, "sm_100": _TCGEN05, "gfx942": _CDNA,
}  # fmt: skip
_KINDS = {"bfloat16": "kind::f16", "float16": "kind::f16", "tf32": "kind::tf32"}  # of tcgen05.mma
# Accesses to global memory of less than 32 bits
_NARROW = r"(?:LDG|STG)\.E\.[US](?:8|16)\b.*|(?:buffer|global)_(?:load|store)_(?:u?short|s?byte|ubyte)\w*"


def product(mode: Mode) -> str:
    """What a mode's products are of."""
    return "tf32" if mode.tf32 else str(mode.dtype).removeprefix("torch.")


def whole_loop(mode: Mode, launch: Launch, made: Compiled) -> Loop | None:
    """The loop over whole blocks; None for the kernel without."""
    if launch.kernel == "delta_kernel":
        return None
    return whole_block_loop(made.assembly, "FFMA" if product(mode) == "float32" else "")


def complaints(
    name: str, mode: Mode, launch: Launch, made: Compiled, target: str, budget: dict[str, Any]
) -> list[str]:  # fmt: skip
    """By every rule.

    Args:
        budget: of attention: name -> fact -> target -> number.
    """
    entry = {what: budget["kernels"].get(name, {}).get(what, {}) for what in ("registers", "shared", "threads", "loop")}
    loads, stores = vectors_of(launch, target, mode.dtype.itemsize)
    expected = {
        "loads": {"128": loads},
        "stores": {} if target == "gfx942" else {"128": stores},  # AMD stores as matrix instructions leave results
        "registers": {str(number_of(target)): number for of, number in entry["registers"].items() if of == target},
        "shared": {str(number_of(target)): number for of, number in entry["shared"].items() if of == target},
        "threads": entry["threads"].get(target, made.kernel.threads),
    }
    view = {"compiler": budget["compiler"], "kernels": {name: expected}}
    found = machine_complaints(name, made.kernel, number_of(target), view, COMPILER)
    own = memory_complaints(mode, made)
    if launch.kernel != "delta_kernel":
        c = launch.constant("C")
        own += matrix_complaints(mode, made, target, c.BLOCK_N if launch.kernel == "keys_kernel" else c.BLOCK_M)
    loop, most = whole_loop(mode, launch, made), entry["loop"].get(target)
    if loop is None and launch.kernel != "delta_kernel":
        own.append("no loop with products: are the rules still about this kernel?")
    if loop and most and budget["compiler"] == COMPILER and loop.instructions > most * SLACK:
        own.append(
            f"the loop over whole blocks grew from {most} to {loop.instructions} instructions; if that is meant, "
            "delete this number and run `make gate`"
        )
    return found + [f"{name}, {target}: {text}" for text in own]


def matrix_complaints(mode: Mode, made: Compiled, target: str, rows: int = 64) -> list[str]:
    """rows: of the first product's tile. Triton multiplies less than 64 with mma.sync on every GPU of NVIDIA."""
    by_mma_sync = rows < 64 and target in ("sm_90", "sm_100")
    expected = (_MMA_SYNC if by_mma_sync else MATRIX[target])[product(mode)]
    found = {opcode: count for opcode, count in opcodes(made.assembly).items() if is_matrix(opcode)}
    if expected is None:
        return [f"{', '.join(found)} where products of float32 are exact"] if found else []
    other = [opcode for opcode in found if not re.fullmatch(expected, opcode)]
    said = [f"{', '.join(other)} among its matrix instructions, expected only {expected}"] if other else []
    if len(other) == len(found):
        said.append(f"no {expected}")
    if target == "sm_100" and not by_mma_sync:
        kinds = set(re.findall(r"tcgen05\.mma\S*(kind::\w+)", made.ptx))
        if kinds != {_KINDS[product(mode)]}:
            said.append(f"products of {', '.join(sorted(kinds))}, expected {_KINDS[product(mode)]}")
    return said


def memory_complaints(mode: Mode, made: Compiled) -> list[str]:
    narrow = [opcode for opcode in opcodes(made.assembly) if re.fullmatch(_NARROW, opcode)]
    if narrow and mode.what not in ("mask", "bias"):  # whose rows may begin anywhere
        return [f"narrow accesses: {', '.join(narrow)}"]
    return []
