"""What LLVM IR and assembly of AMD's targets must be, as rules.py says it of PTX: each rule as a list of complaints.

AMD has no fused operation of its own in the contract, but division and roots are built from fused multiply-adds, on
every target. Those are told from contraction by their number, which each division and each root needs exactly, and in
LLVM IR, where Triton 3.6 writes its roots out, by the line of the source that they come from.
"""

from __future__ import annotations

import re
from collections import Counter

# Fused multiply-adds of one division (LLVM's for IEEE numbers) and of one root, by the instruction that each has once.
_BUILT_FROM = {
    "f32": {"div_fixup": 5, "sqrt": 2, "rsq": 5},  # rsq: Triton 3.6's own
    "f64": {"div_fixup": 5, "rsq": 7},
}
_FUSED = r"^\s+v_(pk_)?(?:fma|fmac|fmaak|fmamk|mad|mac|madak|madmk)_(f16|f32|f64)(?:_e32|_e64)?\b"
_MODES = {"denorm_mode_32": 3, "denorm_mode_16_64": 3, "round_mode_32": 0, "round_mode_16_64": 0}
_FLAGS = "contract|reassoc|fast|arcp|afn|nnan|ninf|nsz"

# What the rules are about; a kernel without it is not the one they were written for.
_EXPECTED = {
    "update_kernel": ("fmul", "fadd", "fdiv", "v_div_fixup_f32"),
    "prologue_kernel": ("fmul double", "fadd double", "fdiv double", "@llvm.sqrt.f64", "v_div_fixup_f64"),
    "finish_stats_kernel": ("fadd double",),
    "grad_stats_kernel": ("fmul", "fadd", "double"),
    "scale_kernel": ("fmul",),
    "accumulate_kernel": ("fadd",),
    "flat_adam_kernel": ("fmul", "fadd", "fdiv", "fdiv double", "@llvm.sqrt.f64", "v_div_fixup_f32", "v_div_fixup_f64"),
    "flat_chunks_kernel": ("fmul", "fadd", "double"),
    "flat_scale_kernel": ("fmul",),
    "flat_total_kernel": ("fadd double",),
}


def contract_complaints(name: str, llvm: str, assembly: str) -> list[str]:
    """What a kernel has that the arithmetic contract forbids, and what it lacks."""
    found = [*_in_llvm(llvm), *_in_assembly(assembly)]
    expected = _EXPECTED.get(name.partition("<")[0], ())
    missing = [each for each in expected if each not in llvm and each not in assembly]
    if missing:
        found.append(f"no {', '.join(missing)}: are the rules still about this kernel?")
    return [f"{name}: {text}" for text in found]


# ---- LLVM IR ---------------------------------------------------------------------------------------------------------
def _in_llvm(llvm: str) -> list[str]:
    found = []
    for what, pattern in {
        "flags that let LLVM change results": rf"\b(?:fadd|fsub|fmul|fdiv|fneg|fcmp|select|call|phi) (?:{_FLAGS})\b.*",
        "an accuracy less than IEEE's": r".*!fpmath.*",
        "a multiply-add that may be fused": r"call .*@llvm\.fmuladd\..*",
        "an approximation": r"call .*@llvm\.amdgcn\.(?:rcp|sqrt|exp2|log|sin|cos|fdiv\.fast|fmul\.legacy)\b.*",
    }.items():
        found += [f"{what}: {hit.strip()[:100]}" for hit in re.findall(pattern, llvm)[:1]]
    if '"denormal-fp-math-f32"="ieee"' not in llvm:
        found.append("denormals are not said to be kept")
    return [*found, *_roots_written_out(llvm), *_rounded_products(llvm)]


def _rounded_products(llvm: str) -> list[str]:
    """The code generator of Triton 3.6 makes one instruction of a product and its rounding, which adds +0 to it."""
    products = set(re.findall(r"^ +(%\w+) = fmul ", llvm, re.MULTILINE))
    rounded = re.findall(r"^ +(%\w+) = fptrunc .*? (%\w+) to (?:<\d+ x )?half", llvm, re.MULTILINE)
    found = []
    for half, product in rounded:
        uses = re.findall(rf"^.*{half}\b(?! =).*", llvm, re.MULTILINE) if product in products else []
        lost = [use.strip()[:100] for use in uses if "llvm.fabs" not in use]
        found += [f"a product whose zero may lose its sign: {use}" for use in lost]
    return found


def _roots_written_out(llvm: str) -> list[str]:
    """Triton 3.6's roots: five fused operations, all of the root's place in the source, on a number scaled before."""
    fused = [(_width(line), _place(line)) for line in re.findall(r".*call .*@llvm\.fma\..*", llvm)]
    roots = re.findall(r".*call .*@llvm\.amdgcn\.rsq\..*", llvm)
    places = Counter(map(_place, roots))
    found = [f"a fused multiply-add that is no root's, at {place}" for _, place in fused if place not in places]
    for place, count in places.items():
        has = sum(width for width, of in fused if of == place)
        if has != 5 * count:
            found.append(f"{has} fused multiply-adds in {count} roots, expected {5 * count}, at {place}")
    unscaled = [root.strip()[:100] for root in roots if not _scaled(root, llvm)]
    return found + [f"a root of what may be a denormal: {root}" for root in unscaled]


def _width(line: str) -> int:
    vector = re.search(r"@llvm\.fma\.v(\d+)", line)
    return int(vector[1]) if vector else 1


def _place(line: str) -> str:
    return line.rpartition("!dbg ")[2].strip() if "!dbg " in line else "no place"


def _scaled(root: str, llvm: str) -> bool:
    """Whether a root's operand is a product of which one factor was chosen."""
    made = dict(re.findall(r"^ +(%\w+) = (.*)", llvm, re.MULTILINE))
    operand = re.findall(r"%\w+", root)[-1]
    for _ in range(4):  # through the elements of vectors
        how = made.get(operand, "")
        if not how.startswith(("extractelement", "shufflevector")):
            factors = re.findall(r"%\w+", how) if how.startswith("fmul ") else []
            return any(_chosen(factor, made) for factor in factors)
        operand = re.findall(r"%\w+", how)[0]
    return False


def _chosen(value: str, made: dict[str, str]) -> bool:
    """Whether a value, or an element that was put into it, comes from a select."""
    how = made.get(value, "")
    if how.startswith(("insertelement", "shufflevector")):
        return any(made.get(each, "").startswith("select ") for each in re.findall(r"%\w+", how))
    return how.startswith("select ")


# ---- assembly --------------------------------------------------------------------------------------------------------
def _in_assembly(assembly: str) -> list[str]:
    found = []
    for kind, built in _BUILT_FROM.items():
        has = sum(2 if pair else 1 for pair, of in re.findall(_FUSED, assembly, re.MULTILINE) if of == kind)
        counts = {what: _count(rf"v_{what}_{kind}", assembly) for what in built}
        expected = sum(built[what] * count for what, count in counts.items())
        if has != expected:
            parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no division or root"
            found.append(f"{has} fused multiply-adds of {kind}, {expected} of them for {parts}: a contraction?")
        if _count(rf"v_rcp_{kind}", assembly) != counts["div_fixup"]:
            found.append(f"reciprocals of {kind} that belong to no division")
    halves = _lines(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f16", assembly)
    found += [f"a fused multiply-add of f16: {line.strip()}" for line in halves]
    found += [f"a contraction: {line.strip()}" for line in _mixed(assembly)]
    for mode, value in _MODES.items():
        if f".amdhsa_float_{mode} {value}\n" not in assembly:
            found.append(f"float_{mode} is not {value}: denormals kept, rounded to nearest")
    return found


def _mixed(assembly: str) -> list[str]:
    """Operations of float16 and float32 at once that round otherwise than a product or a sum alone.

    To float32 they are exact where one factor is 1, and a product where -0 is added. To float16: `_rounded_products`.
    """
    to_float, to_half = r"v_(?:fma|mad)_mix_f32", r"v_(?:fma|mad)_mix(?:lo|hi)_f16"
    found = [line for line in _lines(to_float, assembly) if not re.search(r", (?:1\.0|neg\(0\))(?:,| |$)", line)]
    return found + [line for line in _lines(to_half, assembly) if not re.search(r", (?:0|neg\(0\))(?: |$)", line)]


def _count(opcode: str, assembly: str) -> int:
    return len(_lines(opcode, assembly))


def _lines(opcode: str, assembly: str) -> list[str]:
    return re.findall(rf"^\s+{opcode}(?:_e32|_e64|_sdwa|_dpp)?\b.*", assembly, re.MULTILINE)
