"""A Triton kernel with one fault each, compiled: the readers of machine code, PTX and LLVM IR see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from compiled import amd_rules, planted_triton
from compiled.planted_triton import planted_kernel
from compiled.rules import contract_complaints
from compiled.triton_code import VERSION, Compiled, compiled, conversions_in
from compiled.triton_launches import recording

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled")


def planted(target: str, fault: str = "NOTHING", **options: Any) -> Compiled:
    table, half = torch.zeros(2, dtype=torch.int64), torch.ones(4096, dtype=torch.float16)
    with recording(target) as launches:
        planted_kernel[(1,)](
            table, half, 4, FAULT=getattr(planted_triton, fault).value, BLOCK=1024, REST=256,
            num_warps=256 // lanes(target), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    (launch,) = launches
    return compiled(replace(launch, options={**launch.options, **options}), target)


def lanes(target: str) -> int:
    return 64 if target == "gfx942" else 32


def contract_of(made: Compiled) -> str:
    if made.ptx:
        return "\n".join(contract_complaints("planted", made.ptx))
    return "\n".join(amd_rules.contract_complaints("planted", made.llvm, made.assembly))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_sound_kernel(target: str) -> None:
    made = planted(target)
    assert (made.kernel.stack, made.kernel.local, made.kernel.spills, made.kernel.shared) == (0, 0, 0, 0)
    assert (made.kernel.threads, made.kernel.loads, made.kernel.stores) == (256, {"128": 1}, {"128": 1})
    assert made.conversions == 0
    assert contract_of(made) == ""


@pytest.mark.parametrize(
    ("fault", "of_nvidia", "of_amd"),
    [
        ("FUSED", "fused multiply-add", "a contraction?"),
        ("FAST_DIVISION", "an approximation", None),
        ("FAST_ROOT", "an approximation", "an approximation"),
        ("ROOT_OF_DENORMALS", None, "a root of what may be a denormal" if VERSION < "3.9" else None),
        ("LOST_SIGN", None, "a product whose zero may lose its sign"),
    ],
)
def test_arithmetic_that_breaks_the_contract(fault: str, of_nvidia: str | None, of_amd: str | None) -> None:
    for target, complaint in (("sm_90", of_nvidia), ("gfx942", of_amd)):
        found = contract_of(planted(target, fault))
        assert (complaint is None) == (found == ""), (target, found)
        assert complaint is None or complaint in found, (target, found)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_fusion_that_is_allowed_is_seen(target: str) -> None:
    found = contract_of(planted(target, enable_fp_fusion=True))
    assert ("may fuse" if target == "sm_90" else "a contraction?") in found or "fused" in found, found


def test_denormals_that_amd_may_flush_are_seen() -> None:
    found = contract_of(planted("gfx942", allow_flush_denorm=True))
    assert "denormals are not said to be kept" in found
    assert "float_denorm_mode_32 is not 3" in found


@pytest.mark.parametrize("fault", ["UNALIGNED", "MASKED"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_scalar_accesses_are_not_counted_as_vectors(target: str, fault: str) -> None:
    assert "128" not in planted(target, fault).kernel.loads


def test_spills_and_local_memory() -> None:
    kernel = planted("sm_90", "SPILLED", maxnreg=24).kernel
    assert kernel.spills > 0
    assert kernel.stack > 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_conversions_of_layouts_and_shared_memory(target: str) -> None:
    made = planted(target, "CONVERTED")
    assert made.conversions > 0
    assert made.kernel.shared > 0


def test_a_kernel_without_its_loop_is_said() -> None:
    with pytest.raises(AssertionError, match="no loop over tiles of 512 elements"):
        conversions_in("tt.func { }", 512)


def test_fused_operations_of_another_place_are_no_roots() -> None:
    """As Triton 3.6 writes them out."""
    root = "  %9 = call float @llvm.amdgcn.rsq.f32(float %8), !dbg !5\n"
    chosen = "  %7 = select i1 %1, float 1.0, float 2.0\n  %8 = fmul float %6, %7\n"
    fma = "  %1{0} = call float @llvm.fma.f32(float %9, float %9, float %9), !dbg !{1}\n"
    kept = '"denormal-fp-math-f32"="ieee"'

    def said(llvm: str) -> str:
        return "\n".join(amd_rules._in_llvm(llvm + kept))

    five = "".join(fma.format(i, 5) for i in range(5))
    assert said(chosen + root + five) == ""
    assert "that is no root's, at !6" in said(chosen + root + five + fma.format(6, 6))
    assert "6 fused multiply-adds in 1 roots, expected 5" in said(chosen + root + five + fma.format(6, 5))
    assert "a root of what may be a denormal" in said("  %8 = fadd float %6, %6\n" + root + five)
    pairs = five.replace("float @llvm.fma.f32", "<2 x float> @llvm.fma.v2f32")
    assert said(chosen + root + root.replace("%9 =", "%10 =") + pairs) == ""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("v_fma_mix_f32 v1, v2, s3, neg(0) op_sel_hi:[1,0,0]", ""),
        ("v_fma_mix_f32 v1, -v2, 1.0, v3 op_sel_hi:[1,1,0]", ""),
        ("v_fma_mix_f32 v1, v2, s3, v4 op_sel_hi:[1,0,0]", "a contraction"),
        ("v_fma_mix_f32 v1, v2, s3, 0 op_sel_hi:[1,0,0]", "a contraction"),
        ("v_fma_mixlo_f16 v1, v2, s3, v4 op_sel_hi:[1,0,0]", "a contraction"),
        ("v_fma_f16 v1, v2, s3, v4", "a fused multiply-add of f16"),
        ("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", "2 fused multiply-adds of f32, 0 of them"),
        ("v_rcp_f32_e32 v1, v2", "reciprocals of f32 that belong to no division"),
        ("v_fmac_f64_e32 v[0:1], v[2:3], v[4:5]", "1 fused multiply-adds of f64, 0 of them"),
        ("v_mad_u64_u32 v[0:1], s[0:1], v2, v3, 0", ""),
    ],
)
def test_lines_of_assembly(line: str, complaint: str) -> None:
    modes = {"denorm_mode_32": 3, "denorm_mode_16_64": 3, "round_mode_32": 0, "round_mode_16_64": 0}
    kept = "".join(f"\t\t.amdhsa_float_{mode} {value}\n" for mode, value in modes.items())
    found = "\n".join(amd_rules._in_assembly(f"\t{line}\n{kept}"))
    assert (complaint == "") == (found == ""), found
    assert complaint in found


def test_rules_that_have_lost_their_subject_are_said() -> None:
    assert "are the rules still about this kernel?" in amd_rules.contract_complaints("update_kernel<x>", "", "")[-1]
