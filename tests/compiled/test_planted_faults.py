"""Kernels with one fault each, compiled: the reader of machine code and PTX sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled.machine_code import FLAGS, Kernel, ToolError, kernels, nvcc, ptx, short_name, widths
from compiled.rules import FORBIDDEN, contract_complaints

pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc on this machine")

GOOD = """
extern "C" __global__ void __launch_bounds__(128) planted(const float4* a, float4* b) {
  float4 x = a[threadIdx.x];
  x.x = sqrtf(x.x) / x.y + x.z;
  b[threadIdx.x] = x;
}
"""


def compiled(folder: Path, code: str, flags: list[str] | None = None) -> Kernel:
    path = folder / "planted.cu"
    path.write_text(code)
    return kernels(path, 90, flags)["planted"]


def complaints(folder: Path, code: str, flags: list[str] | None = None) -> list[str]:
    path = folder / "planted.cu"
    path.write_text(code)
    return [text for name, body in ptx(path, 90, flags).items() for text in contract_complaints(name, body)]


def test_a_sound_kernel(tmp_path: Path) -> None:
    kernel = compiled(tmp_path, GOOD)
    assert (kernel.stack, kernel.local, kernel.spills, kernel.threads) == (0, 0, 0, 128)
    assert (kernel.loads, kernel.stores) == ({"128": 1}, {"128": 1})
    assert complaints(tmp_path, GOOD) == []


def test_spills(tmp_path: Path) -> None:
    """160 values alive at once where 32 registers are left."""
    code = """
extern "C" __global__ void __launch_bounds__(1024, 2) planted(float* a) {
  float x[160];
#pragma unroll
  for (int k = 0; k < 160; ++k) x[k] = a[k * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 160; ++k) a[k * 1024 + threadIdx.x] = x[159 - k];
}
"""
    kernel = compiled(tmp_path, code)
    assert kernel.spills > 0
    assert kernel.stack > 0


def test_an_array_in_local_memory(tmp_path: Path) -> None:
    code = """
extern "C" __global__ void __launch_bounds__(128) planted(float* a, const int* i) {
  float x[64];
  for (int k = 0; k < 64; ++k) x[i[k] & 63] = a[k];
  for (int k = 0; k < 64; ++k) a[k] = x[i[k + threadIdx.x] & 63];
}
"""
    kernel = compiled(tmp_path, code)
    assert kernel.stack + kernel.local >= 256
    assert kernel.spills == 0


def test_a_scalar_store_and_no_launch_bounds(tmp_path: Path) -> None:
    code = GOOD.replace("b[threadIdx.x] = x;", "((float*)b)[4 * threadIdx.x + 1] = x.x;")
    kernel = compiled(tmp_path, code.replace("__launch_bounds__(128)", ""))
    assert (kernel.loads, kernel.stores, kernel.threads) == ({"128": 1}, {"32": 1}, 0)


def test_widths_of_every_opcode() -> None:
    code = """
        /*0000*/  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/  LDG.E.LTC128B.64.CONSTANT R4, [R2] ;
        /*0020*/  LD.E.U16 R4, [R2] ;
        /*0030*/  LDG.E.S8.CONSTANT R4, [R2] ;
        /*0040*/  LDG.E.ENL2.256 R4, R8, [R2] ;
        /*0050*/  @P0 LDG.E R4, [R2] ;
        /*0060*/  LDS.128 R4, [R2] ;
        /*0070*/  LDC.64 R4, c[0x0][0x10] ;
        /*0080*/  STG.E.64 [R2], R4 ;
"""
    assert widths("LD", code) == {"128": 1, "64": 1, "16": 1, "8": 1, "256": 1, "32": 1}
    assert widths("ST", code) == {"64": 1}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("x.x = sqrtf(x.x)", "x.x = __fmaf_rn(x.x, x.y, x.z)"), "fused multiply-add"),
        (("x.x = sqrtf(x.x)", "x.x = (float)fma((double)x.x, 2.0, 1.0)"), "fused multiply-add"),
        (("sqrtf(x.x)", "rsqrtf(x.x)"), "an approximation"),
        (("sqrtf(x.x) / x.y", "__fdividef(x.x, x.y)"), "an approximation"),
        (("sqrtf(x.x)", "__fsqrt_rz(x.x)"), "a division or root that is not IEEE's"),
    ],
)
def test_arithmetic_that_breaks_the_contract(tmp_path: Path, change: tuple[str, str], what: str) -> None:
    assert GOOD.count(change[0]) == 1
    found = complaints(tmp_path, GOOD.replace(*change))
    assert any(text.startswith(f"planted: {what}") for text in found), found


@pytest.mark.parametrize(
    ("flag", "instead", "what"),
    [
        ("--fmad=false", "--fmad=true", "an operation that ptxas may fuse"),
        ("-ftz=false", "-ftz=true", "denormals flushed"),
        ("-prec-div=true", "-prec-div=false", "an approximation"),
        ("-prec-sqrt=true", "-prec-sqrt=false", "an approximation"),
    ],
)
def test_flags_that_break_the_contract(tmp_path: Path, flag: str, instead: str, what: str) -> None:
    assert flag in FLAGS
    found = complaints(tmp_path, GOOD, [instead if each == flag else each for each in FLAGS])
    assert any(text.startswith(f"planted: {what}") for text in found), found


def test_a_function_that_is_not_inlined_is_read_too(tmp_path: Path) -> None:
    code = "__device__ __noinline__ float helper(float x, float y) { return __fmaf_rn(x, y, y); }\n"
    found = complaints(tmp_path, code + GOOD.replace("sqrtf(x.x)", "helper(x.x, x.z)"))
    assert [text for text in found if text.startswith("helper: fused multiply-add")]


def test_rules_that_have_lost_their_subject_are_said() -> None:
    assert "are the rules still about this kernel?" in contract_complaints("update_kernel<Plain>", "ret;")[0]
    assert len(FORBIDDEN) == 5


def test_what_does_not_compile_and_warnings_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="not_declared"):
        compiled(tmp_path, GOOD.replace("x.z;", "not_declared;"))
    with pytest.raises(ToolError, match="unused"):
        compiled(tmp_path, GOOD.replace("float4 x =", "int unused = 3; float4 x ="))


def test_a_changed_source_is_compiled_again(tmp_path: Path) -> None:
    before = compiled(tmp_path, GOOD)
    assert compiled(tmp_path, GOOD) == before
    assert compiled(tmp_path, GOOD.replace("(128)", "(64)")).threads == 64


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("void halfstep::(anonymous namespace)::f<(halfstep::Dtype)1>(int*)", "f<(Dtype)1>"),
        ("void halfstep::_GLOBAL__N__0a_9_update_cu_74::g<halfstep::_GLOBAL__N__0a_9_update_cu_74::Plain>(T<int>)",
         "g<Plain>"),
        ("_INTERNAL_8b::Sum _INTERNAL_8b::h<true>(void const*, int)", "h<true>"),
        ("planted", "planted"),
    ],
)  # fmt: skip
def test_names(full: str, short: str) -> None:
    assert short_name(full) == short
