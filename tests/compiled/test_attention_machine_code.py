"""Attention's kernels as machine code, for some modes and targets; `make gate` does all.

Guards: products on another unit than their dtype's, spills, tiles that do not fit, masks in the loop that needs none,
accesses that have become narrow. Some of it runs on the oldest supported Triton too, where nothing is counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from compiled import planted_dots
from compiled.attention_gate import BUDGET, facts, mode_of, updated
from compiled.attention_modes import Mode, launches_of, recorded, vectors_of
from compiled.attention_rules import SLACK, complaints, matrix_complaints, memory_complaints, whole_loop
from compiled.matrix_loops import matrix_loops, whole_block_loop
from compiled.planted_dots import planted_dots_kernel
from compiled.rules import read_budget
from compiled.triton_code import Compiled, compiled
from compiled.triton_gate import COMPILER
from compiled.triton_launches import recording

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled")

# On every Triton; what most people use
OLDEST_TOO = [
    ("sm_90", "forward_kernel<bfloat16, 64, causal>"),
    ("sm_80", "queries_kernel<bfloat16, 64, causal>"),
    ("sm_90", "keys_kernel<bfloat16, 64, causal>"),
    ("sm_80", "bias_kernel<bfloat16, 64, bias>"),
    ("gfx942", "delta_kernel<bfloat16, 64, causal>"),
]
PINNED = [
    ("sm_90", "forward_kernel<bfloat16, 128, causal>"),
    ("sm_90", "keys_kernel<bfloat16, 128, causal>"),
    ("sm_90", "queries_kernel<bfloat16, 128, causal>"),
    ("sm_90", "queries_kernel<float16, 64, causal>"),
    ("sm_90", "forward_kernel<bfloat16, 40, causal>"),
    ("sm_90", "forward_kernel<bfloat16, 64, varlen>"),
    ("sm_80", "forward_kernel<bfloat16, 64, causal>"),
    ("sm_80", "keys_kernel<bfloat16, 64, dropout>"),
    ("sm_80", "forward_kernel<bfloat16, 64, window>"),
    ("sm_86", "queries_kernel<bfloat16, 256, causal>"),
    ("sm_100", "forward_kernel<bfloat16, 64, causal>"),
    ("sm_100", "keys_kernel<bfloat16, 64, causal>"),
    ("sm_120", "forward_kernel<bfloat16, 64, causal>"),
    ("gfx942", "queries_kernel<bfloat16, 64, causal>"),
]


@pytest.mark.parametrize(
    ("target", "name"), [*OLDEST_TOO, *(pytest.param(*pinned, marks=pytest.mark.newest) for pinned in PINNED)]
)
def test_a_kernel_keeps_every_rule(target: str, name: str) -> None:
    launch, budget = recorded(target)[name], read_budget(BUDGET)
    made = compiled(launch, target)
    assert complaints(name, mode_of(name), launch, made, target, budget) == []
    if budget["compiler"] == COMPILER:
        assert budget["kernels"][name]["tile"][target] == facts(name, launch, made)["tile"], "run `make gate`"


def test_the_budget_has_nothing_that_is_gone() -> None:
    kernels = read_budget(BUDGET)["kernels"]
    for name, entry in kernels.items():
        for target in entry["registers"]:
            assert name in recorded(target), f"{name} on {target}: run `make gate`"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_numbers_are_no_constants(target: str) -> None:
    """Lengths, heads, strides, windows and scales must not be, or a training would stop to compile."""
    found: dict[str, set[str]] = {}
    for rows, heads, options in (
        (1, (1, 1), {}),
        (16, (16, 1), {"right": 0, "scale": 1.0}),
        (17, (4, 2), {"right": 16, "top_left": False}),
        (4096, (3, 3), {"right": None, "scale": 0.3}),
    ):
        for launch in launches_of(Mode(options=options), target, rows, heads).values():
            found.setdefault(launch.kernel, set()).add(repr(launch))
    assert {kernel: len(forms) for kernel, forms in found.items()} == {
        "forward_kernel": 1, "delta_kernel": 1, "keys_kernel": 1, "queries_kernel": 1,
    }  # fmt: skip


# ---- each rule can fail ----------------------------------------------------------------------------------------------
GOOD = "delta_kernel<bfloat16, 64, causal>"


def planted(target: str, fault: str, m: int = 64, **options: Any) -> Compiled:
    a, out = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    with recording(target) as launches:
        planted_dots_kernel[(1,)](
            a, a, out, 4, FAULT=getattr(planted_dots, fault).value, M=m, D=64, num_warps=4, num_stages=2,
            enable_fp_fusion=True,
        )  # fmt: skip
    (launch,) = launches
    return compiled(replace(launch, options={**launch.options, **options}), target)


@pytest.mark.newest
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_an_upcast_before_a_product_is_seen(target: str) -> None:
    assert matrix_complaints(Mode(), planted(target, "NOTHING"), target) == []
    found = "\n".join(matrix_complaints(Mode(), planted(target, "UPCAST"), target))
    assert "expected" in found
    assert "TF32" in found or "tf32" in found or "f32" in found
    assert matrix_complaints(Mode(torch.float32), planted(target, "UPCAST"), target) or target == "gfx942"
    assert matrix_complaints(Mode(torch.float16), planted(target, "NOTHING"), target) or target == "sm_100"


def test_a_mask_in_the_loop_is_more_than_the_slack() -> None:
    lean, masked = (whole_block_loop(planted("sm_90", fault).assembly) for fault in ("NOTHING", "MASKED"))
    assert lean
    assert masked
    assert lean.matrix() == masked.matrix() > 0
    assert masked.instructions > lean.instructions * SLACK


@pytest.mark.newest
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_narrow_accesses_are_seen(target: str) -> None:
    assert memory_complaints(Mode(), planted(target, "NOTHING")) == []
    assert "narrow accesses" in "\n".join(memory_complaints(Mode(), planted(target, "MISALIGNED")))
    assert memory_complaints(Mode(what="mask"), planted(target, "MISALIGNED")) == []


@pytest.mark.newest
def test_spills_and_too_much_shared_memory_are_seen() -> None:
    launch = recorded("sm_120")[GOOD]
    for made, complaint in (
        (planted("sm_120", "NOTHING", 128, num_stages=8), "bytes of shared memory, a block has 102400"),
        (planted("sm_120", "NOTHING", maxnreg=32), "bytes spilled"),
    ):
        found = complaints(GOOD, Mode(), launch, made, "sm_120", {"compiler": "", "kernels": {}})
        assert complaint in "\n".join(found), found


def test_growth_is_said() -> None:
    launch = recorded("sm_90")[GOOD]
    made = compiled(launch, "sm_90")
    loads, stores = vectors_of(launch, "sm_90", 2)
    entry = {"registers": {"sm_90": 8}, "shared": {"sm_90": made.kernel.shared}, "threads": {"sm_90": 256}}
    budget = {"compiler": COMPILER, "kernels": {GOOD: entry}}
    found = "\n".join(complaints(GOOD, Mode(), launch, made, "sm_90", budget))
    assert f"registers grew from 8 to {made.kernel.registers}" in found
    assert "blocks of 128 threads, the budget says 256" in found
    assert made.kernel.loads["128"] >= loads > stores == 0
    fewer = replace(made, kernel=replace(made.kernel, loads={"32": 9}))
    assert f"0 loads of 128 bits, expected {loads} or more" in "\n".join(
        complaints(GOOD, Mode(), launch, fewer, "sm_90", budget)
    )


def test_a_longer_loop_is_said() -> None:
    launch = replace(recorded("sm_90")[GOOD], kernel="queries_kernel")
    made = planted("sm_90", "NOTHING")
    loop = whole_loop(Mode(), launch, made)
    assert loop
    for before, said in ((loop.instructions, False), (int(loop.instructions / SLACK) - 1, True)):
        budget = {"compiler": COMPILER, "kernels": {GOOD: {"loop": {"sm_90": before}}}}
        found = "\n".join(complaints(GOOD, Mode(), launch, made, "sm_90", budget))
        assert (f"grew from {before} to {loop.instructions} instructions" in found) == said


def test_the_least_is_kept() -> None:
    old = {"compiler": COMPILER, "kernels": {"f": {"loop": {"sm_90": 5}}, "gone": {}}}
    found = {("sm_90", "f"): {"loop": 7, "threads": 4}, ("sm_80", "f"): {"loop": 3, "threads": 2}}
    assert updated(old, found) == {
        "compiler": COMPILER,
        "kernels": {"f": {"loop": {"sm_90": 5, "sm_80": 3}, "threads": {"sm_90": 4, "sm_80": 2}}},
    }


def test_loops_of_code() -> None:
    sass = """
.L_x_0:
        /*0000*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_1:
        /*0010*/              @!P0 HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0020*/                   FADD R1, R1, R2 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_0) ;
"""
    (loop,) = matrix_loops(sass)  # not what comes back from behind the EXIT
    assert (loop.instructions, loop.matrix()) == (3, 1)
    amd = (
        ".LBB0_1:\n\tv_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]\n\ts_cbranch_scc1 .LBB0_1 ; x\n\ts_endpgm"
    )
    (loop,) = matrix_loops(amd)
    assert (loop.instructions, loop.matrix()) == (2, 1)
    assert matrix_loops("        /*0000*/                   EXIT ;\n") == []
