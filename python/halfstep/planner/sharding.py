"""What stays on one GPU from step to step: weights, gradients, masters and optimizer states after sharding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from .job import Job
from .model import PARTS, ModelShape, Weight
from .states import Mode, factored_state_elements

if TYPE_CHECKING:
    from .module import MeasuredModel


@dataclass(frozen=True)
class Degrees:
    """Ranks that weights are split over."""

    data: int
    tensor: int
    expert: int

    @classmethod
    def of(cls, job: Job) -> Degrees:
        return cls(job.data_parallel, job.tensor_parallel, job.expert_parallel)


@dataclass(frozen=True)
class Elements:
    """Elements of the weights that one data-parallel rank sees whole and of its shard of them."""

    whole: int = 0
    shard: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.whole + other.whole, self.shard + other.shard)


def local(weights: Iterable[Weight], degrees: Degrees) -> Elements:
    """After tensor and expert parallelism, whole and as the shard of rank 0, which has the most: torch's FSDP2 cuts
    the first dimension into equal pieces, the last ones may be shorter."""
    total = Elements()
    for weight in weights:
        rows, rest = weight.shape[0], weight.elements // weight.shape[0]
        if weight.tensor_parallel:
            rows = -(-rows // degrees.tensor)
        ranks = degrees.data
        if weight.matrices > 1:  # experts
            rows, ranks = -(-rows // degrees.expert), ranks // degrees.expert
        total += Elements(weight.copies * rows * rest, weight.copies * -(-rows // ranks) * rest)
    return total


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: which weights it has and how many micro-batches wait for their backward."""

    layers: int
    first: bool
    last: bool
    in_flight: int

    def outer(self, model: ModelShape | MeasuredModel) -> list[Weight]:
        """Its weights outside the layers."""
        return [weight for weight in model.outer_weights if self._has(weight, model)]

    def _has(self, weight: Weight, model: ModelShape | MeasuredModel) -> bool:
        # A tied table is needed at both ends.
        if weight.part == "embedding":
            return self.first or (self.last and model.tied and weight.name == "embedding")
        return self.last


def stages(model: ModelShape | MeasuredModel, job: Job) -> list[Stage]:
    """The first and the last stage, one of which needs the most. 1F1B (Narayanan et al., SC 2021, section 2.2): stage i
    of p holds activations of p - i micro-batches."""
    p = job.pipeline_parallel
    if p == 1:
        return [Stage(model.layers, True, True, 1)]
    if p > model.layers:
        raise ValueError(f"pipeline_parallel={p}: expected 1 .. layers={model.layers}, a layer for each stage at least")
    most, least = -(-model.layers // p), model.layers // p
    return [Stage(most, True, False, min(p, job.accumulation)), Stage(least, False, True, 1)]


@dataclass(frozen=True)
class Held:
    """Elements of one stage's weights on one GPU."""

    layer: Elements  # of one layer, trained or not
    outer: Elements  # outside the layers, trained or not
    trained_layer: Elements
    trained_outer: Elements
    trained: Elements
    frozen: Elements
    products: int  # of matrices that products read: autocast keeps copies
    loop: Elements  # temporaries of an optimizer that goes from tensor to tensor
    factored: int  # factored second moments, unsharded


@lru_cache(maxsize=4096)
def held(model: ModelShape | MeasuredModel, degrees: Degrees, stage: Stage) -> Held:
    outer = stage.outer(model)
    weights = [*outer, *(w.times(stage.layers) for w in model.layer_weights)]
    trained = [w for w in weights if w.trainable]
    read_by_head = ("embedding",) if model.tied and stage.last else ()
    products = [  # what is measured has autocast's copies among its activations
        w
        for w in weights
        if len(w.shape) == 2 and w.part in PARTS
        and (w.part != "embedding" or w.name in ("embedding_up", *read_by_head))
    ]  # fmt: skip
    return Held(
        local(model.layer_weights, degrees),
        local(outer, degrees),
        local((w for w in model.layer_weights if w.trainable), degrees),
        local((w for w in outer if w.trainable), degrees),
        local(trained, degrees),
        local((w for w in weights if not w.trainable), degrees),
        local(products, degrees).whole,
        loop_temporaries(model, degrees),
        -(-factored_state_elements(trained) // degrees.tensor),
    )


def loop_temporaries(model: ModelShape | MeasuredModel, degrees: Degrees) -> Elements:
    """What torch.optim.AdamW(foreach=False) holds at most: the square root of v and its quotient for one tensor, beside
    the quotient of the tensor before, which it lets go late. In the order of the modules, experts one by one."""
    outer, ends = model.outer_weights, ("norms", "head")
    layer = [w for w in model.layer_weights for _ in range(min(w.copies, 2))]
    order = [*(w for w in outer if w.part not in ends), *layer, layer[0], *(w for w in outer if w.part in ends)]
    sizes = [Elements(), *(local([replace(w, copies=1)], degrees) for w in order if w.trainable)]
    pairs = list(pairwise(sizes))
    return Elements(
        max((before.whole + 2 * size.whole for before, size in pairs), default=0),
        max((before.shard + 2 * size.shard for before, size in pairs), default=0),
    )


def model_states(elements: Elements, mode: Mode, zero: int) -> dict[str, int]:
    """Bytes of trainable weights by part. ZeRO (Rajbhandari et al., SC 2020, section 5): stage 1 shards masters and
    states, 2 gradients too, 3 weights too."""

    def on_gpu(stage: int) -> int:
        return elements.shard if zero >= stage else elements.whole

    return {
        "parameters": mode.weight_bytes * on_gpu(3),
        "gradients": mode.gradient_bytes * on_gpu(2),
        "masters": mode.master_bytes * on_gpu(1),
        "optimizer_states": round(mode.state_bytes * on_gpu(1)),
    }


def residents(found: Held, job: Job, mode: Mode) -> dict[str, int]:
    """`model_states` of one stage, frozen weights among the parameters. FSDP2 shards weights between steps in every
    stage of ZeRO; below stage 3 they are whole from forward to backward."""
    parts = model_states(found.trained, mode, job.sharded)
    held_weights = found.trained + found.frozen
    parts["parameters"] = mode.weight_bytes * (held_weights.shard if job.sharded else held_weights.whole)
    if mode.factored:
        parts["optimizer_states"] = mode.weight_bytes * -(-found.factored // (job.data_parallel if job.sharded else 1))
    return parts
