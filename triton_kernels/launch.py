"""Launches of the multi-tensor kernels: how many programs, how many warps, and how they are compiled.

Tensors are on one device, which is the current one, and so is its stream. Their contents: layout.py and the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton
from torch import Tensor

from . import elementwise, sizes
from . import grad_stats as statistics
from . import prologue as between
from . import update as second
from .layout import NUMEL, RECORD_COLUMNS

__all__ = [
    "INTERPRETED", "NUMEL", "RECORD_COLUMNS", "accumulate", "cast", "finish_stats", "grad_stats", "prologue", "scale",
    "sizes", "update",
]  # fmt: skip

# Triton's interpreter is in place of its compiler (TRITON_INTERPRET=1): it follows addresses of the CPU, no others
INTERPRETED = not isinstance(second.update_kernel, triton.JITFunction)
Tasks = Iterable[tuple[tuple[int, ...], Tensor]]  # a pattern of dtypes, and the work of its programs
ITEM_SIZES = (4, 2, 2)  # of a dtype's elements
EXACT = {"enable_fp_fusion": False, "num_stages": 1}  # no multiply and add become one rounding


def tiles(widest: int, lanes: int) -> dict[str, int]:
    warps = sizes.warps(sizes.BLOCK, widest, lanes)
    return {"SHARE": sizes.SHARE, "BLOCK": sizes.BLOCK, "REST": warps * lanes, "num_warps": warps}


def grad_stats(
    addresses: Tensor, numels: Tensor, firsts: Tensor, tasks: Tasks, scale: Tensor | None, sums: Tensor, lanes: int
) -> None:
    for (dtype,), work in tasks:
        statistics.grad_stats_kernel[(work.numel(),)](
            addresses, numels, firsts, work, scale, sums, DTYPE=dtype,
            num_warps=sizes.warps(sizes.LANES, ITEM_SIZES[dtype], lanes), **EXACT,
        )  # fmt: skip


def finish_stats(
    sums: Tensor, firsts: Tensor, tensor_sums: Tensor, total: Tensor, first_bad: Tensor, lanes: int
) -> None:
    between.finish_stats_kernel[(1,)](
        sums, firsts, tensor_sums.numel(), tensor_sums, total, first_bad, **_prologue(lanes)
    )


def _prologue(lanes: int) -> dict[str, Any]:
    return {"BLOCK": sizes.PROLOGUE_BLOCK, "num_warps": sizes.PROLOGUE_BLOCK // lanes, **EXACT}


def prologue(*tensors: Any, lanes: int) -> None:
    """Arguments as prologue_kernel's."""
    between.prologue_kernel[(1,)](*tensors, **_prologue(lanes))


def update(
    rows: Tensor, grads: Tensor, n: int, tasks: Tasks, settings: Tensor, decision: Tensor, records: Tensor,
    results: Tensor, *, lanes: int,
) -> None:  # fmt: skip
    """tasks: patterns of (param, grad, state, how the weight is held, amsgrad, rounded at random)."""
    for (param, grad, state, held, amsgrad, at_random), work in tasks:
        second.update_kernel[(work.numel(),)](
            rows, grads, n, work, settings, decision, records, results, PARAM_DTYPE=param, GRAD=grad, STATE=state,
            HELD=held, AMSGRAD=bool(amsgrad), AT_RANDOM=bool(at_random), **tiles(4, lanes), **EXACT,
        )  # fmt: skip


def scale(addresses: Tensor, numels: Tensor, tasks: Tasks, factor: Tensor, first_bad: Tensor, lanes: int) -> None:
    for (dtype,), work in tasks:
        elementwise.scale_kernel[(work.numel(),)](
            addresses, numels, work, factor, first_bad, DTYPE=dtype, **tiles(ITEM_SIZES[dtype], lanes), **EXACT
        )


def cast(dsts: Tensor, srcs: Tensor, numels: Tensor, tasks: Tasks, stochastic: bool, seed: int, lanes: int) -> None:
    for (dst, src), work in tasks:
        elementwise.cast_kernel[(work.numel(),)](
            dsts, srcs, numels, work, seed, DST=dst, SRC=src, AT_RANDOM=stochastic,
            **tiles(max(ITEM_SIZES[dst], ITEM_SIZES[src]), lanes), **EXACT,
        )  # fmt: skip


def accumulate(dsts: Tensor, srcs: Tensor, numels: Tensor, tasks: Tasks, lanes: int) -> None:
    for (_, src), work in tasks:
        elementwise.accumulate_kernel[(work.numel(),)](dsts, srcs, numels, work, SRC=src, **tiles(4, lanes), **EXACT)
