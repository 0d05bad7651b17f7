"""hs.attention beside torch's attentions, FlexAttention and flash-attn: time, and the memory that a call takes on top.

    halfstep bench attention [--quick] [--device cuda] [--only "head dim 128"]

On a GPU each of SDPA's backends is forced. On the CPU this is about memory: it must grow with the length, not with its
square. The times there are those of one small batch, torch's own kernel in all but the windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch

from halfstep.bench import attention_providers
from halfstep.bench.attention_truth import Job, truths
from halfstep.bench.cases import Case
from halfstep.bench.command import run_bench
from halfstep.bench.harness import Comparison, Provider

_TOKENS, _WIDTH = 16384, 2048  # of a GPU's case: heads x head dim is a usual model's width
_WINDOW = 128


def case(length: int, dim: int, batch: int, heads: int, where: Case) -> Case:
    name = f"{batch} x {heads} heads, length {length:,}, head dim {dim}"
    return replace(where, name=name, shapes=((batch, heads, length, dim),), bandwidth=False)


def cases(standard: Sequence[Case], quick: bool) -> list[Case]:
    """For the device of the other benches' cases."""
    where = standard[0]
    if quick:
        return [case(length, 64, 2, 2, where) for length in (64, 256)]
    if not where.gpu:
        return [case(length, 64, 2, 4, where) for length in (512, 1024, 2048, 4096)]
    sizes = [(dim, length) for dim in (128, 64, 256) for length in (1024, 2048, 4096, 8192, 16384, 32768)]
    return [
        case(length, dim, max(1, _TOKENS // length), _WIDTH // dim, where)
        for dim, length in sizes
        if dim == 128 or length in (1024, 4096, 16384)
    ]


def comparisons(chosen: list[Case], only: str = "") -> Iterator[Comparison]:
    """Forward and backward of each job on each case whose "case: job" contains `only`."""
    for one in chosen:
        dtype = torch.bfloat16 if one.gpu else torch.float32
        jobs = [Job("causal", True)]
        jobs.append(Job("all visible", False) if one.gpu else Job(f"causal, window of {_WINDOW}", True, _WINDOW))
        for job in jobs:
            for backward in (False, True):
                what = f"{job.name}, {'backward' if backward else 'forward'}"
                if only.lower() in f"{one.name}: {what}".lower():
                    yield comparison(one, job, what, dtype, backward)


def comparison(one: Case, job: Job, what: str, dtype: torch.dtype, backward: bool) -> Comparison:
    generator = torch.Generator(one.device).manual_seed(0)
    shape = one.shapes[0]
    tensors = [torch.randn(shape, generator=generator, device=one.device, dtype=dtype) for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    d_out = tensors[3]

    def make(name: str) -> Provider:
        return Provider(name, lambda: attention_providers.ready(name, job, (q, k, v), d_out, backward), None)

    computed = cache(lambda: truths(job, q, k, v, d_out, backward))

    def expected(begin: int, end: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {
            key: (truth.reshape(-1)[begin:end], allowed.reshape(-1)[begin:end])
            for key, (truth, allowed) in computed().items()
        }

    names = attention_providers.ON_GPU if one.gpu else attention_providers.ON_CPU
    flops = flop(shape, job.causal, backward) if one.gpu else None
    return Comparison(one, what, names[1], [make(name) for name in names], expected, memory=True, flops=flops)


def flop(shape: tuple[int, ...], causal: bool, backward: bool) -> float:
    """Of two products over all heads, or over what a causal mask leaves; a backward pass has five (Dao 2023)."""
    batch, heads, length, dim = shape
    return 4 * batch * heads * length**2 * dim * (0.5 if causal else 1) * (2.5 if backward else 1)


def main(arguments: Sequence[str] | None = None) -> None:
    about = "hs.attention against SDPA's backends, FlexAttention and flash-attn: time, TFLOP/s on a GPU, memory."
    note = "extra MiB: what one call takes at its worst moment beside what was there, its results included"
    run_bench("attention", about, comparisons, arguments, note=note, cases_of=cases, each_backend=False)


if __name__ == "__main__":
    main()
