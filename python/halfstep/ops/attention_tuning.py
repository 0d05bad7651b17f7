"""Which tiles Triton's attention kernels take for calls of one shape: timed, when asked for, on the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .triton_attention import kernels


class TunedTile(NamedTuple):
    """One kernel's tile, and median times of the pass (forward or backward) that it is part of."""

    queries: int
    keys: int
    warps: int
    stages: int
    ms: float
    ms_before: float  # with the tile that it had


def tune(*passes: Callable[[], Any]) -> dict[str, TunedTile]:
    """The fastest tile of each kernel that the passes of a call launch, kept for such calls: by the kernel's name.

    One kernel after the other: those of a pass do not overlap, so what is best for one does not depend on another.
    """
    choices = kernels().choices
    found: dict[str, TunedTile] = {}
    for run in passes:
        with choices.trying({}) as trial:
            run()
        if not trial.asked:
            raise RuntimeError(
                "tune_attention times Triton's kernels, and the backend in use launched none of them: call it without "
                "backend.override, or with Triton's backend there"
            )
        for kernel, (work, own, others) in trial.asked.items():
            times: dict[Any, float] = {}
            for tile in dict.fromkeys([own, *others]):
                with choices.trying({kernel: tile}):
                    times[tile] = milliseconds(run)
            best = min(times, key=times.__getitem__)
            choices.choose(work, best)
            found[kernel] = TunedTile(*best[:4], ms=times[best], ms_before=times[own])
    return found


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of some runs; infinite if a kernel asks for more than this GPU has."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return float(do_bench(run, return_mode="median"))  # type: ignore[arg-type]
    except OutOfResources:
        return float("inf")
