"""What the emulator of the CUDA runtime sees of faulty kernels, and that what the other tests set in it has an effect.

Guards: an emulator that finds nothing. The faults are in csrc/emulation/planted.cu. It cannot see races between blocks,
and orderings between threads that hold on the host and not on a GPU.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_all_same_bits, assert_same_bits
from emulated_builds import VARIANTS, built
from emulated_cuda import ORDER_IDS, ORDERS, emulated, launches

from halfstep.ops import native_cpu

ASCENDING, DESCENDING, SHUFFLED = 0, 1, 2
EVERY = (ASCENDING, DESCENDING, SHUFFLED)
ALL = tuple((variant, order) for variant in VARIANTS for order in EVERY)
ADDRESS = tuple(("address", order) for order in EVERY)
THREAD = tuple(("thread", order) for order in EVERY)
RESULT = tuple((variant, order) for variant in ("plain", "address") for order in EVERY)

WRONG = "{fault}: wrong"
RACE = r"WARNING: ThreadSanitizer: data race"
# fault: (builds and orders, what they say), ...; nothing else may see it
FAULTS = {
    "out_of_bounds": [(ADDRESS, "heap-buffer-overflow")],
    "shared_out_of_bounds": [(ADDRESS, "index 64 out of bounds"), (tuple(x for x in ALL if x[0] != "address"), WRONG)],
    "beside_shared": [(ADDRESS, "global-buffer-overflow"), (tuple(x for x in ALL if x[0] != "address"), WRONG)],
    "barrier_missing": [(RESULT, WRONG), (THREAD, RACE)],
    "overwritten_too_early": [(tuple(x for x in RESULT if x[1] != ASCENDING), WRONG), (THREAD, RACE)],
    "warp_barrier_missing": [(RESULT, WRONG), (THREAD, RACE)],
    "misaligned": [(ADDRESS, "misaligned address")],
    "uninitialised_shared": [(ALL, WRONG)],
    "offset_overflow": [(ADDRESS, "signed integer overflow: 131072 * 16384")],
    "barrier_not_met_by_all": [(ALL, "thread 0 waits for the block at planted.cu:{line}; thread 61 has returned")],
    "barriers_at_two_places": [
        (ALL, "thread 0 waits for the block at planted.cu:{line}; thread 1 waits for the block at")
    ],
    "shuffle_not_met_by_all": [
        (ALL, "thread 0 waits for the warp's lanes 0xffffffff at planted.cu:{line}; thread 16 has")
    ],
    "shuffle_from_outside_its_mask": [(ALL, WRONG)],
    "mask_without_the_caller": [
        (ALL, "thread 7 is not among the lanes 0x0000007f that it calls for at planted.cu:{line}")
    ],
    "update_without_atomic": [(THREAD, RACE)],
    "global_race": [(THREAD, RACE)],
}  # fmt: skip


def planted(variant: str, fault: str, order: int) -> subprocess.CompletedProcess[str]:
    command = [str(built(f"planted_{variant}")), fault, str(order)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("variant", VARIANTS)
def test_healthy_kernels_pass(variant):
    for order in EVERY:
        ran = planted(variant, "healthy", order)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines() == [f"{fault}: right" for fault in FAULTS]
        assert ran.stderr == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, root):
    expected = {where: text for places, text in FAULTS[fault] for where in places}
    for variant, order in ALL:
        ran = planted(variant, fault, order)
        said = ran.stdout + ran.stderr
        text = expected.get((variant, order))
        if text is None:
            assert ran.stdout == f"{fault}: right\n", (variant, order, said)
        else:
            assert text.format(fault=fault, line=line_of(fault, root)) in said, (variant, order, said)
            assert ran.returncode != 0, "a fault that is seen ends the run as a failure"


def line_of(fault: str, root) -> int:
    """Of the barrier or exchange that the fault's thread 0 (or 7) meets: marked in the source."""
    source = (root / "csrc" / "emulation" / "planted.cu").read_text().splitlines()
    marked = [n for n, line in enumerate(source, 1) if line.endswith(f"// {fault}")]
    return marked[0] if marked else 0


# ---- what tests set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=ORDER_IDS)
def test_two_python_threads(order):
    """The bindings release the GIL, and the emulator has one set of threads: launches wait for each other."""
    lists = [[ordinary(n, dtype, n) for n in (70001, 5, 1030)] for dtype in (FLOAT32, BFLOAT16)] * 2
    expected = [native_cpu.grad_stats(tensors, None) for tensors in lists]
    emulated().module.set_order(*order)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                got = list(pool.map(lambda tensors: emulated().grad_stats(tensors, None), lists))
                for mine, theirs in zip(got, expected, strict=True):
                    assert_all_same_bits(mine, theirs, str(order))
    finally:
        emulated().module.reset_machine()


def test_denormals_whatever_the_host_does():
    x = torch.tensor([1e-40, 1.5])
    expected = x.clone()
    assert torch.set_flush_denormal(True)
    try:
        emulated().unscale_([x], torch.tensor(1.0))
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(x, expected, "denormal")


def test_the_ends_of_a_grid_alone():
    x = torch.ones(5 * 16384)
    emulated().module.set_ends_only(2)
    try:
        emulated().unscale_([x], torch.tensor(2.0))
    finally:
        emulated().module.reset_machine()
    assert [set(block.tolist()) for block in x.split(16384)] == [{2.0}, {2.0}, {1.0}, {2.0}, {2.0}]


def test_launches_are_noted():
    x = torch.ones(3 * 65536 + 1)
    with launches() as made:
        emulated().grad_stats([x], None)
    assert [(launch["grid"], launch["block"]) for launch in made] == [
        ((4, 1, 1), (128, 1, 1)),
        ((1, 1, 1), (512, 1, 1)),
    ]
