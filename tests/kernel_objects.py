"""What may not be inside the per-ISA object files; used by tests/test_install.py and `make gate`.

One source is compiled once per instruction set and all objects go into one module. Two things would break it without
any test noticing on a new CPU: a shared (weak, common) symbol, of which the linker keeps one copy and may keep the
AVX-512 one for everybody, and an instruction that the ISA of the file does not have.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# nm: W/w/V/v weak, u unique, C common. Global definitions are the other capital letters except U (undefined).
WEAK = "WwVvuC"
# May not appear in that ISA's code; every AVX instruction's name starts with v, and so do verr and verw.
FOREIGN = {"baseline": r"%[yz]mm|\tv(?!err|erw)\w+", "avx2": r"%zmm|%k[1-7]"}
FUSED = r"\bv?fn?m(add|sub)|\bfmadd|\bfml[as]\b"  # x86 vfmadd231ps, vfnmsub...; arm fmadd, fmla, fmls


def complaints(objects: Path, isa: str, prefix: str = "") -> list[str]:
    """Everything wrong with the objects of one ISA below `objects`; `prefix` names a cross binutils (aarch64-...-)."""
    found = sorted(objects.rglob("*.o"))
    if not found:
        return [f"{isa}: no object file below {objects}"]
    return [f"{isa}: {path.name}: {text}" for path in found for text in _complaints(path, isa, prefix)]


def _complaints(path: Path, isa: str, prefix: str) -> list[str]:
    result = []
    for line in _output(f"{prefix}nm", "--defined-only", "--demangle", str(path)).splitlines():
        kind, name = line.split(maxsplit=2)[1:]
        if kind in WEAK:
            result.append(f"shared symbol ({kind}) {name}")
        elif kind.isupper() and not re.search(rf"(\b|_){isa}\b", name):
            result.append(f"global symbol without the ISA in its name: {name}")
    code = _output(f"{prefix}objdump", "--disassemble", "--no-show-raw-insn", str(path))
    for what, pattern in (("code of another ISA", FOREIGN.get(isa)), ("fused multiply-add", FUSED)):
        hit = re.search(rf"^.*(?:{pattern}).*$", code, re.MULTILINE) if pattern else None
        if hit:
            result.append(f"{what}: {hit[0].strip()}")
    return result


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
