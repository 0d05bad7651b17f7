"""Loops of machine code, and the matrix instructions in them: NVIDIA's SASS as nvdisasm prints it, AMD's assembly.

A loop is what lies between a label and a branch back to it. Compilers also put waiting loops and rare paths behind a
kernel's end, which branch back into the middle of it: what holds an EXIT is no loop. Counted are innermost loops with
matrix instructions, whole bodies, branch included, of one warp.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Products of matrices: SASS (mma.sync, wgmma, tcgen05, DMMA, int8's IMMA and the rest), CDNA
_MATRIX = re.compile(r"^(?:[A-Z]*H?G?MMA\b|UTC[A-Z]*MMA\b|[A-Z]+MMA\b|v_mfma_)")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", re.MULTILINE)
_SASS_LABEL = re.compile(r"^\s*(\.L_x_\d+):", re.MULTILINE)
_AMD_LABEL = re.compile(r"^(\.LBB\w+):")
_AMD_LINE = re.compile(r"^\s+([a-z]\w+)(.*)")


@dataclass(frozen=True)
class Loop:
    instructions: int
    opcodes: Counter[str]

    def matrix(self) -> int:
        return sum(count for opcode, count in self.opcodes.items() if is_matrix(opcode))


def is_matrix(opcode: str) -> bool:
    return bool(_MATRIX.match(opcode))


def opcodes(code: str) -> Counter[str]:
    """Of all of a kernel."""
    return Counter(opcode for opcode, _ in _parsed(code)[0])


def matrix_loops(code: str, counts_as_matrix: str = "") -> list[Loop]:
    """Innermost loops with matrix instructions.

    Args:
        counts_as_matrix: an opcode that stands for them where a product has none (FFMA).
    """
    lines, labels = _parsed(code)
    spans = []
    for last, (opcode, rest) in enumerate(lines):
        target = re.search(r"\.L(?:_x_\d+|BB\w+)", rest) if _is_branch(opcode) else None
        first = labels.get(target[0], len(lines)) if target else len(lines)
        if first <= last:
            body = [each for each, _ in lines[first : last + 1]]
            if "EXIT" not in body and any(is_matrix(each) or each == counts_as_matrix for each in body):
                spans.append((first, last, body))
    inner = [
        body for first, last, body in spans
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b, _ in spans)
    ]  # fmt: skip
    return [Loop(len(body), Counter(body)) for body in inner]


def whole_block_loop(code: str, counts_as_matrix: str = "") -> Loop | None:
    """The leanest of them: it is the one that masks nothing. None if there is none."""
    return min(matrix_loops(code, counts_as_matrix), key=lambda loop: loop.instructions, default=None)


def _is_branch(opcode: str) -> bool:
    return opcode == "BRA" or opcode.startswith(("BRA.", "s_branch", "s_cbranch"))


def _parsed(code: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(opcode, operands) of each instruction, and the index of the one that follows each label."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for text in code.splitlines():
        sass, label = _SASS_LINE.match(text), _SASS_LABEL.match(text) or _AMD_LABEL.match(text)
        if label:
            labels[label[1]] = len(lines)
        elif found := sass or _AMD_LINE.match(text.partition(";")[0]):
            lines.append((found[1], found[2]))
    return lines, labels
