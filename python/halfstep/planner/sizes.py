"""Counts and bytes of one rank: what the parallel degrees and the precision leave of a model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from .job import Job
from .model import ModelShape

FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True)
class Sizes:
    tokens: int
    residual_tokens: int  # of norms, residuals and their dropout: fewer with sequence parallelism
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    vocabulary: int
    value: int  # bytes of an element of a product's result
    stream: int  # ... of the residual stream and the norms: float32 under autocast
    weight: int  # ... of the gradient of a weight
    statistic: int  # ... of LayerNorm's mean or deviation of one token
    cpu: bool

    @classmethod
    def of(cls, model: ModelShape, job: Job) -> Sizes:
        value = FLOAT32 if job.precision == "fp32" else 2
        cpu, t = job.device == "cpu", job.tensor_parallel
        tokens = job.micro_batch * job.sequence
        stream = FLOAT32 if job.autocast else value
        return cls(
            tokens=tokens,
            residual_tokens=-(-tokens // t) if job.sequence_parallel else tokens,
            heads=-(-model.heads // t),
            kv_heads=-(-model.kv_heads // t),  # at least one: ranks beyond the heads hold copies
            ffn=-(-model.ffn // t),
            experts=-(-model.experts // job.expert_parallel),
            vocabulary=-(-model.vocabulary // t),
            value=value,
            stream=stream,
            weight=FLOAT32 if job.autocast or job.precision == "fp32" else 2,
            statistic=stream if cpu else FLOAT32,  # torch's LayerNorm on the CPU keeps them in the input's dtype
            cpu=cpu,
        )
