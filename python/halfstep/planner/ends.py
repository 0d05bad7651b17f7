"""Activations outside the layers: embedding, head and loss, and what all layers share."""

from __future__ import annotations

from .job import Job
from .layers import Layers
from .model import ModelShape
from .sizes import FLOAT32, INT64, Sizes
from .tape import Tape


def head_tape(model: ModelShape, job: Job) -> Tape:
    """Final norm, logits and loss. The loss is computed in float32 from logits in the model's dtype."""
    build, n = Layers(model, job), Sizes.of(model, job)
    x = build.tape.value("residual", n.residual_tokens * model.hidden, n.stream)
    y = build.norm(x)
    width, part = model.embedding_rank or model.hidden, "embedding" if model.tied else "head"
    if model.embedding_rank:
        y = build.linear(part, y, width, model.hidden)
    y = build.cast("logits", y, n.value)
    weight = n.vocabulary * width * n.weight if model.trains(part) else 0
    saves = [y] if weight else []
    if job.loss == "fused":
        # Cut cross-entropy (Wijmans et al., ICLR 2025): the logits never stand in memory; one log-sum-exp a token.
        build.op("logits", y, 1, FLOAT32, y, extra=[n.tokens * FLOAT32], weight=weight)
        return build.tape
    logits = build.op("logits", y, n.tokens * n.vocabulary, n.value, *saves, weight=weight)
    logits = build.cast("logits", logits, FLOAT32)
    logits = build.op("logits", logits, logits.elements, FLOAT32, save_output=True)  # log-softmax
    # Targets, and how many count. transformers cuts them from labels with one more, which a single sequence keeps.
    targets = n.tokens + (1 if job.micro_batch == 1 else 0)
    build.op("logits", logits, 1, FLOAT32, extra=[targets * INT64, FLOAT32])
    return build.tape


def embedding_tape(model: ModelShape, job: Job) -> Tape:
    """Token and position embedding."""
    build, n = Layers(model, job), Sizes.of(model, job)
    ids = build.tape.value("embedding", 0, INT64)
    width = model.embedding_rank or model.hidden
    trains = model.trains("embedding")
    # Of a tied table this is a second gradient, which is added to the head's.
    table = n.vocabulary * width * n.weight if trains else 0
    rows = n.tokens if model.embedding_rank else n.residual_tokens
    x = build.op("embedding", ids, rows * width, n.stream, weight=table)
    if model.embedding_rank:
        x = build.linear("embedding", x, model.hidden, width)
    if model.positions:  # their numbers are kept, once for all sequences
        gradient = model.positions * model.hidden * n.weight if trains else 0
        x = build.op("embedding", x, x.elements, n.stream, extra=[job.sequence * INT64], weight=gradient)
    build.dropout(x)
    return build.tape


def shared_bytes(model: ModelShape, job: Job) -> int:
    """What all layers share: the cosines and sines of rotary positions; the arguments that a checkpoint holds."""
    n, checkpoint = Sizes.of(model, job), job.recompute in ("layer", "selective")
    rotary = 0 if model.positions else 2 * job.sequence * model.head_dim * n.stream
    positions = 0 if model.positions or not checkpoint else job.sequence * INT64
    item = 1 if job.attention == "fused" else n.stream  # booleans, or numbers to add
    mask = job.micro_batch * job.sequence**2 * item
    return rotary + positions + (mask if checkpoint and job.attention_mask else 0)


def input_bytes(job: Job) -> int:
    """Token ids of a micro-batch."""
    return job.micro_batch * job.sequence * INT64
