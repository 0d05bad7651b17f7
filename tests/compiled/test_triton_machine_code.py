"""The Triton kernels as machine code, PTX and LLVM IR, for some modes and targets; `make gate` does all.

Guards: launches that compile anew in the middle of a training, spills, more registers than before, a vector path that
has become scalar, layouts converted through shared memory, a contraction or a flushed denormal that would change the
contract's bits on a GPU and nowhere else. Runs on the oldest supported Triton too, where registers are not compared.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from compiled import attention_modes
from compiled.gpus import AMD_GPUS, occupancy
from compiled.machine_code import ToolError, binary_tool
from compiled.rules import read_budget
from compiled.triton_code import VERSION, Compiled, compiled
from compiled.triton_gate import BUDGET, COMPILER, complaints, number_of, with_traffic
from compiled.triton_launches import TARGETS, recording
from compiled.triton_modes import launch_all, recorded, traffic

from halfstep import triton_kernels
from halfstep.ops.triton_gpu import TritonBackend
from halfstep.triton_kernels import flat

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled")

# The kernels of the default optimizers and the heaviest modes; the H200's target and AMD's, which differ most.
PINNED = [
    (target, name)
    for target in ("sm_90", "gfx942")
    for name in (
        "grad_stats_kernel<bfloat16>",
        "scale_kernel<float16>",
        "cast_kernel<to bfloat16, from float32, at random>",
        "accumulate_kernel<from bfloat16>",
        "prologue_kernel<no given_total, no given_bad, no found_inf>",
        "update_kernel<float32, grad float32, states float32>",
        "update_kernel<bfloat16, grad bfloat16, states float32, checked master>",
        "update_kernel<float16, grad float16, states float16, amsgrad, at random>",
    )
]
PINNED += [
    ("sm_80", "finish_stats_kernel"),
    ("sm_120", "update_kernel<bfloat16, grad bfloat16, states float32, split master>"),
    ("sm_90", "cast_kernel<to float16, from bfloat16>"),
    ("sm_90", "flat_adam_kernel<float32, grad float32, states float32>"),
]


SPILLS_WITH_OLD_TRITON = ("sm_90", "grad_stats_kernel<bfloat16>")
OLD = pytest.mark.xfail(VERSION.startswith("3.6."), reason="ptxas of Triton 3.6 spills 16 bytes", strict=True)


@pytest.mark.parametrize(
    ("target", "name"), [pytest.param(*of, marks=[OLD] if of == SPILLS_WITH_OLD_TRITON else []) for of in PINNED]
)
def test_a_kernel_keeps_every_rule(target: str, name: str) -> None:
    launch = recorded(target)[name]
    assert complaints(name, compiled(launch, target), target, with_traffic(read_budget(BUDGET))) == []


def test_the_budget_is_whole() -> None:
    budget = read_budget(BUDGET)
    assert budget["kernels"].keys() == recorded("sm_90").keys() == recorded("gfx942").keys(), "run `make gate`"
    if budget["compiler"] == COMPILER:
        assert with_traffic(budget) == budget, "run `make gate`"
    for entry in budget["kernels"].values():
        assert entry["registers"].keys() == entry["shared"].keys() == {str(number_of(target)) for target in TARGETS}


def test_every_kernel_is_among_the_modes() -> None:
    found = pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    kernels = {
        name for module in modules for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    }  # fmt: skip
    launches = [*recorded("sm_90").values(), *attention_modes.recorded("sm_90").values()]
    assert kernels == {launch.kernel for launch in launches}
    assert len(kernels) >= 16


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_mode_is_compiled_once_whatever_the_tensors(target: str) -> None:
    """Numbers, sizes and where tables begin must not be constants, or a training would stop to compile."""
    forms: dict[Any, set[Any]] = {}
    for tensors in (1, 2, 3, 9):
        with recording(target) as launches:
            launch_all(TARGETS[target].warp_size, tensors)
        for launch in launches:
            forms.setdefault((launch.kernel, launch.mode), set()).add(repr(launch))
    assert {mode: len(of) for mode, of in forms.items() if len(of) > 1} == {}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_numbers_are_no_constants_wherever_a_tensor_begins(target: str) -> None:
    """Of the functions on one tensor, and a cast's seed. 1, multiples of 16 and 64 bits are special to Triton."""
    base, one, zero = torch.ones(99), torch.ones(()), torch.zeros(())
    with recording(target) as launches, mock.patch.multiple(flat, INTERPRETED=True, _lanes=lambda _: 32):
        for k, (first, size) in zip((1, 16, 17, 2**32 - 1), ((0, 1), (1, 16), (3, 33), (4, 64)), strict=True):
            x = base[first : first + size]
            flat.adam_(x, x, x, x, t=k, lr=1 / k, scale=one, found_inf=zero, seed=k, param_id=k, first_index=k)
            flat.cast_(x, x, stochastic=True, seed=k)
            flat.unscale_(x, one, zero)
            flat.sum_of_squares(x, one)
            TritonBackend(base.device).cast_([x], [x], stochastic=True, seed=k)
    found = [launch.kernel for launch in launches]
    assert len(found) == len(set(found)) == 6


# ---- launches --------------------------------------------------------------------------------------------------------
def test_what_is_known_of_arguments() -> None:
    launch = recorded("sm_90")["update_kernel<bfloat16, grad bfloat16, states float32, checked master>"]
    known = {tuple(launch.signature)[path[0]] for path, value in launch.attributes.items() if value}
    assert known == {"rows", "settings", "decision", "records", "results"}  # multiples of 16, unlike grads, n and work
    assert (launch.signature["n"], launch.signature["rows"], launch.signature["records"]) == ("i32", "*i64", "*fp32")
    assert launch.options == {"num_warps": 8, "num_ctas": 1, "num_stages": 1, "enable_fp_fusion": False}
    assert recorded("gfx942")[launch.name].options["num_warps"] == 4  # of 64 lanes


@pytest.mark.parametrize(
    ("name", "moved", "loads", "stores"),
    [
        ("update_kernel<bfloat16, grad bfloat16, states float32, checked master>", 30, {"128": 3, "64": 2},
         {"128": 3, "64": 1}),
        ("update_kernel<bfloat16, grad bfloat16, states float32, split master>", 26, {"128": 2, "64": 3},
         {"128": 2, "64": 2}),
        ("update_kernel<float32, grad float32, states float32, amsgrad>", 36, {"128": 5}, {"128": 4}),
        ("grad_stats_kernel<bfloat16>", 2, {"128": 8}, {}),
        ("scale_kernel<float16>", 4, {"128": 1}, {"128": 1}),
        ("cast_kernel<to bfloat16, from float16>", 4, {"128": 1}, {"128": 1}),
        ("cast_kernel<to float32, from float16>", 6, {"64": 1}, {"128": 1}),
        ("accumulate_kernel<from bfloat16>", 10, {"128": 1, "64": 1}, {"128": 1}),
    ],
)  # fmt: skip
def test_what_modes_must_move(name: str, moved: int, loads: dict[str, int], stores: dict[str, int]) -> None:
    of = traffic(recorded("sm_90")[name], 32)
    assert (of.bytes, of.accesses()) == (moved, (loads, stores))


# ---- each rule can fail ----------------------------------------------------------------------------------------------
GOOD = "update_kernel<float32, grad float32, states float32>"


@pytest.fixture(scope="module")
def good() -> Compiled:
    return compiled(recorded("sm_90")[GOOD], "sm_90")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stack": 8}, "8 bytes stack"),
        ({"spills": 2}, "2 bytes spilled"),
        ({"registers": 255, "threads": 512}, "255 registers for 512 threads: it cannot be launched"),
        ({"shared": 240_000}, "240000 bytes of shared memory, a block has 233472"),
        ({"loads": {"128": 3, "32": 4}}, "3 loads of 128 bits, expected 4 or more"),
        ({"stores": {}}, "0 stores of 128 bits, expected 3 or more"),
        ({"registers": 200}, "registers grew from 44 to 200"),
    ],
)
def test_each_rule_of_machine_code_can_fail(good: Compiled, change: dict[str, Any], complaint: str) -> None:
    entry = {"loads": {"128": 4}, "stores": {"128": 3}, "registers": {"90": 44}, "shared": {"90": 0}, "threads": 256}
    budget = {"compiler": COMPILER, "kernels": {GOOD: entry}}
    worse = replace(good, kernel=replace(good.kernel, **change))
    assert complaint in "\n".join(complaints(GOOD, worse, "sm_90", budget))
    of_another = complaints(GOOD, worse, "sm_90", {**budget, "compiler": "triton 0.0.1"})
    assert ("registers grew" in complaint) == (of_another == [])


def test_what_is_fused_or_flushed_is_said(good: Compiled) -> None:
    for text, instead, complaint in [
        ("add.rn.f32", "fma.rn.f32", "fused multiply-add"),
        ("add.rn.f32", "add.f32", "an operation that ptxas may fuse"),
        ("mul.rn.f32", "mul.rn.ftz.f32", "denormals flushed"),
        ("div.rn.f32", "div.full.f32", "a division or root that is not IEEE's"),
        ("sqrt.rn.f32", "sqrt.approx.f32", "an approximation"),
    ]:
        assert text in good.ptx
        found = complaints(GOOD, replace(good, ptx=good.ptx.replace(text, instead)), "sm_90", read_budget(BUDGET))
        assert any(complaint in each for each in found), (text, found)


def test_amd_compiler_says_the_same_occupancy() -> None:
    seen = 0
    for _, name in [pinned for pinned in PINNED if pinned[0] == "gfx942"]:
        made = compiled(recorded("gfx942")[name], "gfx942")
        (waves,) = re.findall(r"; Occupancy: (\d+)", made.assembly)
        (scalars,) = re.findall(r"\.sgpr_count: +(\d+)", made.assembly)
        if int(scalars) <= 80:  # of 800 on a SIMD; more than that cost one wave of eight, which is not counted here
            assert occupancy("gfx942", made.kernel.registers, 256, 0) == int(waves) / AMD_GPUS["gfx942"].waves, name
            seen += 1
    assert seen >= 4


def test_conversions_of_layouts_are_said(good: Compiled) -> None:
    found = complaints(GOOD, replace(good, conversions=3), "sm_90", read_budget(BUDGET))
    assert found == [f"{GOOD}, sm_90: 3 conversions of layouts in the loop over whole tiles"]


def test_the_tools_of_triton_are_there() -> None:
    try:
        assert binary_tool("nvdisasm")
        assert binary_tool("cuobjdump")
    except ToolError as error:
        pytest.fail(f"Triton {VERSION}: {error}")
