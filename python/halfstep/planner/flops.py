"""Floating-point operations of a pass: from a model's shape, or counted while a measured model runs."""

from __future__ import annotations

from functools import lru_cache

from .job import Job
from .memory import Model
from .model import ModelShape
from .module import MeasuredModel


def forward_flops(model: Model, job: Job, *, causal: bool = True) -> float:
    """FLOPs of one micro-batch's forward pass: 2 for each weight and token, 4 for each score and column of a head.

    Source: Narayanan et al. 2021, appendix; Chowdhery et al. 2022, appendix B. Lookups multiply nothing.
    """
    if not isinstance(model, ModelShape):
        return job.micro_batch * measured_flops(model, job.sequence)
    parts = model.parts
    # Lookups and norms multiply nothing to speak of.
    weights = model.active_parameters - parts.get("embedding", 0) - parts.get("norms", 0)
    if model.tied:  # the output projection multiplies by the table that was not counted
        weights += model.vocabulary * (model.embedding_rank or model.hidden)
    keys = min(job.sequence, model.window or job.sequence)
    seen = keys - keys * keys / (2 * job.sequence) if causal else keys  # keys of a query, on average
    scores = 4 * seen * model.heads * model.head_dim * model.layers
    return job.micro_batch * job.sequence * (2 * weights + scores)


@lru_cache(maxsize=64)
def measured_flops(model: MeasuredModel, sequence: int) -> int:
    """Of one sequence's forward pass, in float32: the dtype changes nothing, and every CPU has kernels for it."""
    return model.forward_flops(Job(sequence=sequence, precision="fp32", optimizer="fp32"))


def backward_flops(model: Model, job: Job, forward: float) -> float:
    """Gradients of inputs and of weights cost a forward pass each; frozen weights need only the first."""
    return forward * (1 + model.trainable_parameters / model.parameters)
