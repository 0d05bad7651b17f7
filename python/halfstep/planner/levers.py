"""Architecture levers: what a change of the model saves of its parameters, and of a job's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .job import Job
from .memory import Model, estimate
from .model import ModelShape
from .states import MODES

EMBEDDING_RANK = 128  # of a factorised embedding; ALBERT's (Lan et al. 2020, section 3.1)
MOE_EXPERTS, MOE_ACTIVE = 8, 2  # as in Mixtral (Jiang et al. 2024)
OPTIMIZER_LEVERS = ("split", "split-bf16-states", "weights-bf16-states", "weights-int8-states", "adafactor")


@dataclass(frozen=True)
class Lever:
    """One change by itself, everything else as it is. Negative savings are costs."""

    name: str
    change: str
    parameters: int  # of the changed model
    active_parameters: int  # those that a token goes through
    parameters_saved: int
    peak: int  # bytes on a GPU
    peak_saved: int
    available: bool  # in this version
    reason: str = ""


def levers(model: Model, job: Job) -> list[Lever]:
    """Every lever that applies, with what it saves; the largest saving first."""
    peak = estimate(model, job).peak
    found = []
    for name, change, shape, changed in _changes(model, job):
        mode = MODES[changed.optimizer]
        less = estimate(shape, changed).peak
        active = shape.active_parameters if isinstance(shape, ModelShape) else shape.parameters
        found.append(
            Lever(name, change, shape.parameters, active, model.parameters - shape.parameters, less,
                  peak - less, mode.available, mode.reason)
        )  # fmt: skip
    return sorted(found, key=lambda lever: -lever.peak_saved)


def _changes(model: Model, job: Job) -> Iterator[tuple[str, str, Model, Job]]:
    for name, change, shape in _shapes(model) if isinstance(model, ModelShape) else ():
        yield name, change, shape, job
    for mode in OPTIMIZER_LEVERS:
        fits_precision = (MODES[mode].weight_bytes == 4) == (MODES[job.optimizer].weight_bytes == 4)
        if mode != job.optimizer and fits_precision and not (mode.startswith("split") and job.precision == "fp16"):
            yield "optimizer states", f"{job.optimizer} -> {mode}", model, replace(job, optimizer=mode)


def _shapes(model: ModelShape) -> Iterator[tuple[str, str, ModelShape]]:
    if model.kv_heads % 2 == 0 and model.kv_heads > 2:
        grouped = model.kv_heads // 8 if model.kv_heads % 8 == 0 and model.kv_heads > 8 else model.kv_heads // 2
        yield "GQA", f"{model.kv_heads} -> {grouped} KV heads", replace(model, kv_heads=grouped)
    if model.kv_heads > 1:
        yield "MQA", f"{model.kv_heads} -> 1 KV head", replace(model, kv_heads=1)
    if model.layers > 1:
        fewer = max(1, model.layers * 3 // 4)
        yield "fewer layers", f"{model.layers} -> {fewer} layers", replace(model, layers=fewer)
    group = model.heads // model.kv_heads
    heads = model.heads * 3 // 4 // group * group
    if heads:
        hidden = model.hidden * heads // model.heads
        narrower = replace(model, hidden=hidden, heads=heads, kv_heads=heads // group,
                           ffn=model.ffn * heads // model.heads,
                           embedding_rank=min(model.embedding_rank, hidden))  # fmt: skip
        yield "smaller width", f"{model.hidden} -> {hidden} wide, FFN and heads in proportion", narrower
    if not model.tied:
        yield "tied embeddings", "one table for input and output", replace(model, tied=True)
    if not model.embedding_rank and model.hidden > EMBEDDING_RANK:
        factorised = replace(model, embedding_rank=EMBEDDING_RANK)
        yield "factorised embeddings", f"tables of rank {EMBEDDING_RANK}", factorised
    if not model.experts:
        yield from _mixtures(model)


def _mixtures(model: ModelShape) -> Iterator[tuple[str, str, ModelShape]]:
    """MoE keeps the compute of a token while parameters grow, or the parameters while the compute shrinks."""
    sparse = replace(model, experts=MOE_EXPERTS, experts_per_token=MOE_ACTIVE)
    chosen = f"{MOE_EXPERTS} experts, {MOE_ACTIVE} for a token"
    if model.ffn >= 2 * MOE_EXPERTS:
        same_total = replace(sparse, ffn=model.ffn // MOE_EXPERTS)
        yield "MoE of the same size", f"{chosen}, FFN {same_total.ffn} each", same_total
        same_active = replace(sparse, ffn=model.ffn // MOE_ACTIVE)
        yield "MoE of the same compute", f"{chosen}, FFN {same_active.ffn} each", same_active
