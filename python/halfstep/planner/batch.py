"""The global batch, micro-batch x data-parallel ranks x accumulation, and the learning rate that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

MANY_MICRO_STEPS = 100  # "hundreds": the fixed costs of a micro-batch are paid that often for one step


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a run, carried over to another batch size."""

    reference: float
    ratio: float  # new batch / reference batch
    sqrt: float
    linear: float

    def __str__(self) -> str:
        return (
            f"learning rate {self.reference:g} at {1 / self.ratio:.4g} of this batch: {self.sqrt:.3g} by square root "
            "(Adam: Malladi et al. 2022; Krizhevsky 2014), "
            f"{self.linear:.3g} linearly (SGD with warmup: Goyal et al. 2017); start from the first with hs.AdamW"
        )


def scaled_learning_rate(reference: float, ratio: float) -> LearningRate:
    """Square-root and linear scaling for a batch that is `ratio` times the reference's.

    Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5, and
    S. Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", NeurIPS 2022 (square root);
    P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1 (linear).
    """
    return LearningRate(reference, ratio, reference * math.sqrt(ratio), reference * ratio)


def accumulation_for(sequences: int, micro_batch: int, data_parallel: int) -> int:
    """Micro-batches for at least `sequences` in a global batch: GBS = MBS x DP x GAS, rounded up."""
    return -(-sequences // (micro_batch * data_parallel))


def micro_batches_for(sequences: int, data_parallel: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation): for each accumulation the smallest micro-batch that needs no more, largest first.

    A larger micro-batch with the same accumulation would only make the global batch larger than what was asked for.
    """
    share = -(-sequences // data_parallel)
    found: dict[int, int] = {}
    accumulation = 1
    while accumulation <= share:
        micro_batch = -(-share // accumulation)
        found.setdefault(micro_batch, -(-share // micro_batch))
        # The next accumulation that makes the micro-batch smaller.
        accumulation = -(-share // (micro_batch - 1)) if micro_batch > 1 else share + 1
    return list(found.items())


def batch_advice(wanted: float, micro_batch: int, data_parallel: int, accumulation: int, sequence: int) -> list[str]:
    """What to know about a global batch of `wanted` sequences made of these."""
    made = micro_batch * data_parallel * accumulation
    advice = []
    if abs(made - wanted) >= 1:  # less than a sequence apart is what tokens that are no multiple of a sequence give
        advice.append(
            f"the global batch is {made:,} sequences ({made * sequence:,} tokens) instead of {wanted:,.6g}: "
            f"a multiple of micro-batch x data-parallel ranks = {micro_batch * data_parallel:,}. A shorter last "
            "micro-batch gives less: hs.Accumulator divides by the tokens that there were"
        )
    if accumulation >= MANY_MICRO_STEPS:
        advice.append(
            f"{accumulation:,} micro-batches for one step: hundreds of them make steps rare and pay fixed costs that "
            "often; use more GPUs, a larger micro-batch (recompute, fewer bytes for states) or a smaller batch"
        )
    return advice
