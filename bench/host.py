"""What a step and a list cost the host, with Triton's kernels and with the native ones; nothing of it needs a GPU.

halfstep bench host [--quick] [--only "1,000"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.bench import cases, launchless, phases
from halfstep.bench.backends import Redirected
from halfstep.bench.clocks import Runner
from halfstep.bench.command import run_bench
from halfstep.bench.harness import Comparison, Provider
from halfstep.ops import triton_gpu

BF16 = torch.bfloat16
ABOUT = (
    "The host's share of a step and of a list over many one-element tensors, with Triton's kernels and the native ones."
)
NOTE = (
    "Triton's rows: the whole call up to the launcher of each compiled kernel, in whose place nothing is called (but "
    f"results are set). Compiled for sm_{launchless.CAPABILITY}; tensors are on the CPU. Not in them: the "
    "launcher and the driver, torch.cuda's allocator, device and stream, and the copies of tables to a device. "
    "Native rows: with the CPU's kernels, which run. moved: every gradient lies elsewhere than at the step before. "
    "no C++: Python reads the tensors, as where halfstep._cpu is not built."
)


def step(case: cases.Case) -> Comparison:
    """bfloat16 weights with float32 masters, overflow check and clipping."""
    weights, grads = phases.narrow(case, BF16)
    options = dict(max_grad_norm=phases.MAX_NORM, skip_nonfinite=True)

    def optimizer(job: type[phases.Halfstep] = phases.Halfstep) -> Callable[[], Runner]:
        def make() -> Runner:
            runner = job(phases.clones(weights), grads, **options)
            return Unchecked(runner, runner.prepare)

        return make

    providers = [
        Provider("halfstep, native", optimizer(), None),
        Provider("halfstep, native, moved", optimizer(Moving), None),
        Provider("halfstep, Triton", on_triton(optimizer()), None),
        Provider("halfstep, Triton, moved", on_triton(optimizer(Moving)), None),
        Provider("halfstep, Triton, no C++", on_triton(optimizer(), read_by_python=True), None),
    ]
    return Comparison(case, "bf16 phase, host", "halfstep, native", providers, lambda begin, end: {})


def unscale(case: cases.Case) -> Comparison:
    grads = [g.to(BF16) for g in case.gradients()]
    inverse, found = torch.ones(()), torch.zeros(1)

    def make() -> Runner:
        return Unchecked(lambda: hs.unscale_(grads, inverse, found))

    providers = [Provider("halfstep, native", make, None), Provider("halfstep, Triton", on_triton(make), None)]
    return Comparison(case, "unscale_ bf16, host", "halfstep, native", providers, lambda begin, end: {})


class Unchecked(Runner):
    """What is not launched has no results."""

    def __init__(self, job: Callable[[], Any], prepare: Callable[[], None] = lambda: None) -> None:
        self._job, self._prepare = job, prepare

    def __call__(self) -> None:
        self._job()

    def prepare(self) -> None:
        self._prepare()

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {}


class Moving(phases.Halfstep):
    """As after zero_grad(set_to_none=True), where a backward may put every gradient elsewhere."""

    def __init__(self, weights: list[Tensor], grads: list[Tensor], **options: Any) -> None:
        super().__init__(weights, grads, **options)
        self._grads = [grads, phases.clones(grads)]

    def prepare(self) -> None:
        self._grads.reverse()
        for param, grad in zip(self.params, self._grads[0], strict=True):
            param.grad = grad


def on_triton(make: Callable[[], Runner], read_by_python: bool = False) -> Callable[[], Runner]:
    def redirected() -> Runner:
        kernels = launchless.backend()
        if read_by_python:
            kernels = triton_gpu.TritonBackend(kernels.device)
            kernels.reader = None  # as where the CPU's module is not built
        return Redirected(make, kernels)

    return redirected


def comparisons(chosen: list[cases.Case], only: str = "") -> Iterator[Comparison]:
    """Each job on every case of one-element tensors whose "case: job" contains `only`."""
    quick = max(case.elements for case in chosen) < 10**6
    for case in map(cases.scalars, (100,) if quick else (1000, 5000)):
        for name, job in (("bf16 phase, host", step), ("unscale_ bf16, host", unscale)):
            if only.lower() in f"{case.name}: {name}".lower():
                yield job(case)


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench("host", ABOUT, comparisons, arguments, note=NOTE, on_gpu=False)


if __name__ == "__main__":
    main()
