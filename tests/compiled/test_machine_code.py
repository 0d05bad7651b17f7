"""The CUDA kernels as machine code and PTX, for an old architecture, the H200's and the newest; `make gate` does all.

Guards: spills and local memory, more registers than before, a vector path that has become scalar, a contraction or a
flushed denormal that would change the contract's bits on a GPU and nowhere else.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from compiled import kernel_table
from compiled.gpus import GPUS, occupancy
from compiled.machine_code import Kernel, kernels, nvcc, nvcc_version, ptx, sources
from compiled.rules import archs, contract_complaints, machine_complaints, nvcc_name, read_budget, updated_budget

PINNED = [75, 90, 120]
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc on this machine")


@needs_nvcc
@pytest.mark.parametrize("arch", PINNED)
def test_machine_code_keeps_to_its_budget(arch: int) -> None:
    if arch not in archs():
        pytest.skip(f"nvcc {nvcc_version()} does not know sm_{arch}")
    budget = read_budget()
    found = {name: kernel for source in sources() for name, kernel in kernels(source, arch).items()}
    assert found.keys() == budget["kernels"].keys()
    wrong = [machine_complaints(name, kernel, arch, budget, nvcc_name()) for name, kernel in found.items()]
    assert list(itertools.chain.from_iterable(wrong)) == []


@needs_nvcc
@pytest.mark.parametrize("source", [path.name for path in sources()])
def test_ptx_keeps_the_contract(source: str) -> None:
    (path,) = [path for path in sources() if path.name == source]
    bodies = ptx(path, 90)
    assert [text for name, body in bodies.items() for text in contract_complaints(name, body)] == []


# ---- the budget ------------------------------------------------------------------------------------------------------
KERNEL = Kernel(registers=40, stack=0, local=0, shared=100, spills=0, threads=256, loads={"128": 4}, stores={"128": 3})


def budget_of(**facts: Any) -> dict[str, Any]:
    entry = {"loads": {"128": 4}, "stores": {"128": 3}, "bytes_per_element": {"float32": 28}, "threads": 256}
    entry |= {"registers": {"90": 40}, "shared": {"90": 100}, **facts}
    return {"compiler": nvcc_name(), "kernels": {"k": entry}}


@needs_nvcc
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"registers": 41}, "k, sm_90: registers grew from 40 to 41"),
        ({"registers": 39}, None),
        ({"shared": 101}, "shared grew from 100 to 101"),
        ({"spills": 4}, "4 bytes spilled"),
        ({"stack": 8}, "8 bytes stack"),
        ({"local": 8}, "8 bytes local memory"),
        ({"threads": 0}, "no __launch_bounds__"),
        ({"threads": 512}, "blocks of 512 threads, the budget says 256"),
        ({"threads": 1024, "registers": 65}, "65 registers for 1024 threads: it cannot be launched"),
        ({"shared": 228 * 1024 + 1}, "bytes of shared memory, a block has 233472"),
        ({"loads": {"128": 3, "64": 2}}, "3 loads of 128 bits, expected 4 or more"),
        ({"stores": {"32": 12}}, "0 stores of 128 bits, expected 3 or more"),
    ],
)
def test_each_rule_can_fail(change: dict[str, Any], complaint: str | None) -> None:
    found = machine_complaints("k", Kernel(**{**vars(KERNEL), **change}), 90, budget_of(), nvcc_name())
    assert (complaint is None) == (found == []), found
    assert complaint is None or complaint in "\n".join(found)


@needs_nvcc
def test_registers_of_another_nvcc_are_not_compared() -> None:
    bigger = Kernel(**{**vars(KERNEL), "registers": 41})
    assert machine_complaints("k", bigger, 90, {**budget_of(), "compiler": "nvcc 11.0"}, nvcc_name()) == []
    (unknown,) = machine_complaints("other", KERNEL, 90, budget_of(), nvcc_name())
    assert unknown.startswith("other: no entry in the budget: add its loads, stores and bytes_per_element")


@needs_nvcc
def test_the_gate_lowers_the_budget_and_never_raises_it() -> None:
    def registers_after(now: int, budget: dict[str, Any]) -> dict[str, int]:
        found = {90: {"k": Kernel(**{**vars(KERNEL), "registers": now}), "new": KERNEL}}
        updated = updated_budget(budget, found, nvcc_name())["kernels"]
        assert updated.keys() == {"k"}, "a kernel without an entry gets none by itself"
        return updated["k"]["registers"]

    assert registers_after(38, budget_of()) == {"90": 38}
    assert registers_after(44, budget_of()) == {"90": 40}
    assert registers_after(44, budget_of(registers={})) == {"90": 44}


# ---- the table -------------------------------------------------------------------------------------------------------
def budgets() -> list[dict[str, Any]]:
    return [
        read_budget(path) for path in (kernel_table.BUDGET, kernel_table.TRITON_BUDGET, kernel_table.ATTENTION_BUDGET)
    ]


def test_the_table_follows_from_the_budget() -> None:
    expected = kernel_table.markdown(*budgets())
    assert kernel_table.DOCUMENT.read_text("utf-8") == expected, "run `make gate`"


def test_a_table_of_another_budget_differs() -> None:
    cuda, triton, attention = budgets()
    shown = kernel_table.markdown(cuda, triton, attention)
    for budget, name, target in (
        (cuda, "update_kernel<Plain>", "90"),
        (triton, "scale_kernel<float16>", "90"),
        (attention, "forward_kernel<bfloat16, 64, causal>", "sm_90"),
    ):
        registers = budget["kernels"][name]["registers"]
        before, registers[target] = registers[target], 9999
        assert kernel_table.markdown(cuda, triton, attention) != shown
        registers[target] = before
    assert kernel_table.markdown(cuda, triton, attention) == shown
    assert "prediction, not a" in shown
    assert "| `update_kernel<Bf16Master>` | bfloat16, float32 master | 30 | 6.25 |" in shown  # 30e9 bytes / 4.8e12


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "share"),
    [
        (90, 32, 256, 0, 1.0),
        (90, 48, 256, 0, 40 / 64),  # 42 warps' registers, in fours, in blocks of 8
        (80, 255, 256, 0, 8 / 64),
        (86, 32, 512, 0, 1.0),
        (86, 32, 1024, 0, 32 / 48),  # one block and a half
        (75, 16, 32, 0, 16 / 32),  # 16 blocks at most
        (90, 32, 128, 57 * 1024, 16 / 64),
        (80, 32, 128, 40 * 1024, 16 / 64),  # 41 KiB with the system's: 4 blocks
        (86, 32, 128, 50 * 1024, 4 / 48),  # 51 KiB: 1 block
        ("gfx942", 64, 256, 0, 1.0),
        ("gfx942", 65, 256, 0, 7 / 8),  # 72 of 512
        ("gfx942", 229, 128, 0, 2 / 8),
        ("gfx942", 64, 256, 40 * 1024, 4 / 32),
        ("gfx942", 400, 512, 0, 0),  # two waves on a SIMD do not fit
    ],
)
def test_occupancy(arch: int | str, registers: int, threads: int, shared: int, share: float) -> None:
    assert occupancy(arch, registers, threads, shared) == pytest.approx(share)


@needs_nvcc
def test_limits_are_known_for_every_architecture() -> None:
    assert set(archs()) <= GPUS.keys()
    assert {75, 80, 86, 89, 90} <= set(archs()) or float(nvcc_version()) >= 14
