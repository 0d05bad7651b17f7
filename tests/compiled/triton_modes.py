"""The modes in which the Triton kernels are compiled here, and what each must move for one element.

Every kernel with every dtype and every flag at least once; of the update, whose flags multiply to hundreds, the kinds
that optimizers make by default and the heaviest ones.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import NamedTuple
from unittest import mock

import torch
from adam_rows import make_case
from compiled.triton_launches import TARGETS, Launch, recording
from optimizer_cases import GROUPS
from torch import Tensor

from halfstep.ops.triton_gpu import TritonBackend
from halfstep.reference.step import StepInputs
from halfstep.triton_kernels import flat

FLOAT32, BFLOAT16, FLOAT16 = FLOATS = torch.float32, torch.bfloat16, torch.float16
BYTES = (4, 2, 2)  # of the dtypes' codes
_ONE, _ZERO = torch.ones(()), torch.zeros(())

# Weight and what it keeps beside itself, gradient, states, amsgrad
KINDS = [
    ((FLOAT32, None), FLOAT32, FLOAT32, False),
    ((FLOAT32, None), FLOAT32, FLOAT32, True),
    ((FLOAT32, None), BFLOAT16, BFLOAT16, False),
    ((BFLOAT16, None), BFLOAT16, FLOAT32, False),
    ((BFLOAT16, None), BFLOAT16, BFLOAT16, False),
    ((BFLOAT16, "master"), BFLOAT16, FLOAT32, False),
    ((BFLOAT16, "master"), FLOAT32, BFLOAT16, False),
    ((BFLOAT16, "remainder"), BFLOAT16, FLOAT32, False),
    ((FLOAT16, "master"), FLOAT16, FLOAT32, False),
    ((FLOAT16, None), FLOAT16, FLOAT16, True),
]
STEPS = {
    "given statistics": StepInputs(scale=_ONE, found_inf=_ZERO, sum_squares=_ONE.double(), first_bad=-_ONE.long()),
    "nothing given, at random, masters trusted": StepInputs(stochastic_weight=True, heal=False),
}
OWN_STATISTICS = {"clipping": StepInputs(max_norm=1.0), "scaled": StepInputs(scale=_ONE, skip_nonfinite=True)}


@functools.cache
def recorded(target: str) -> dict[str, Launch]:
    """All modes, by name, as they are launched on a target."""
    with recording(target) as launches:
        launch_all(TARGETS[target].warp_size)
    return {launch.name: launch for launch in launches}


def launch_all(lanes: int, tensors: int = 1) -> None:
    """Calls the backend in all modes, with lists of so many tensors of two sizes."""
    backend = TritonBackend(torch.device("cpu"))
    backend.lanes = lanes
    sizes = [5, 70_001] * tensors
    lists = {dtype: [torch.ones(size, dtype=dtype) for size in sizes] for dtype in FLOATS}
    for dtype, scale in itertools.product(FLOATS, (None, _ONE)):
        backend.grad_stats(lists[dtype], scale)
    for dtype in FLOATS:
        backend.unscale_(lists[dtype], _ONE)
        backend.accumulate_(lists[FLOAT32], lists[dtype])
    for dst, src in itertools.product(FLOATS, FLOATS):
        for stochastic in {False, dst != src and dst != FLOAT32}:
            backend.cast_(lists[dst], lists[src], stochastic=stochastic, seed=3)
    for weight, grad, state, amsgrad in KINDS:
        cases = [make_case(weight, grad, state, size, 0, amsgrad=amsgrad) for size in sizes]
        plan = backend.AdamPlan([case.row for case in cases])
        plan.set_grads([case.grad for case in cases])
        for inputs in STEPS.values():
            plan.run(GROUPS, inputs, with_stats=False)
        for inputs in OWN_STATISTICS.values():
            plan.run(GROUPS, inputs, with_stats=True)
    with mock.patch.multiple(flat, INTERPRETED=True, _lanes=lambda _: lanes):  # which lets the CPU's tensors in
        _launch_flat(lists)


def _launch_flat(lists: dict[torch.dtype, list[Tensor]]) -> None:
    x, half = lists[FLOAT32][1], lists[BFLOAT16][1]
    for dtype in (FLOAT32, BFLOAT16):
        flat.unscale_(lists[dtype][1], _ONE, _ZERO)
        flat.sum_of_squares(lists[dtype][1], _ONE)
    flat.cast_(half, x)
    flat.cast_(half, x, stochastic=True)
    flat.adam_(x, x, x, x, t=1, lr=1e-3, scale=_ONE, found_inf=_ZERO, decoupled=False)
    flat.adam_(half, half, x, x, t=1, lr=1e-3, master=x)
    flat.adam_(half, half, half, half, t=1, lr=1e-3, stochastic=True)


# ---- what a mode must move -------------------------------------------------------------------------------------------
class Traffic(NamedTuple):
    """Of one element: the bytes it has in each tensor that is read, and that is written."""

    reads: list[int]
    writes: list[int]
    at_once: int  # elements that a lane moves in one access
    rows: int  # accesses to each tensor in one round of the loop

    @property
    def bytes(self) -> int:
        return sum(self.reads) + sum(self.writes)

    def accesses(self) -> tuple[dict[str, int], dict[str, int]]:
        """Loads and stores of one round of the loop over whole tiles: bits -> how many."""
        return self._widths(self.reads), self._widths(self.writes)

    def _widths(self, sizes: list[int]) -> dict[str, int]:
        count: Counter[str] = Counter()
        for size in sizes:
            bits = 8 * size * self.at_once
            count[str(min(bits, 128))] += self.rows * -(-bits // 128)
        return dict(sorted(count.items()))


def traffic(launch: Launch, lanes: int) -> Traffic:
    """From the mode alone, as a reader of the contract would count it.

    Raises: KeyError for a kernel that nobody has counted yet.
    """
    threads = launch.options["num_warps"] * lanes
    if launch.kernel in ("prologue_kernel", "finish_stats_kernel", "flat_total_kernel"):
        return Traffic([], [], 1, 1)
    if launch.kernel in ("grad_stats_kernel", "flat_chunks_kernel"):
        return Traffic([BYTES[launch.constant("DTYPE")]], [], 1024 // threads, 8)
    reads, writes = _MOVED[launch.kernel.removeprefix("flat_")](launch)
    return Traffic(reads, writes, launch.constant("BLOCK") // threads, 1)


def _scale(launch: Launch) -> tuple[list[int], list[int]]:
    size = BYTES[launch.constant("DTYPE")]
    return [size], [size]


def _cast(launch: Launch) -> tuple[list[int], list[int]]:
    return [BYTES[launch.constant("SRC")]], [BYTES[launch.constant("DST")]]


def _accumulate(launch: Launch) -> tuple[list[int], list[int]]:
    return [4, BYTES[launch.constant("SRC")]], [4]


def _update(launch: Launch) -> tuple[list[int], list[int]]:
    weight, states = BYTES[launch.constant("PARAM_DTYPE")], [BYTES[launch.constant("STATE")]] * 2
    if launch.constant("AMSGRAD"):
        states.append(states[0])
    held = launch.constant("HELD")
    read = [[weight], [4], [4, weight], [2, weight]][held]
    written = [[weight], [4, weight], [4, weight], [2, weight]][held]
    return [BYTES[launch.constant("GRAD")], *states, *read], [*states, *written]


_MOVED = {
    "scale_kernel": _scale, "cast_kernel": _cast, "accumulate_kernel": _accumulate, "update_kernel": _update,
    "adam_kernel": _update,
}  # fmt: skip
