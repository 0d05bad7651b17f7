"""The moments of one training step at which memory may be highest, on one stage of the pipeline.

The peak is not the sum of the parts: gradients of weights appear while activations go. Layers are alike, so memory is a
linear function of the layer that the forward or the backward is at, and highest at the first or the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from .costs import BlockCost, Bytes, Costs, add, highest, times
from .job import Job
from .sharding import Elements, Held, Stage, residents
from .states import MODES
from .tape import GRADIENTS, TEMPORARIES

TRANSIENTS = (TEMPORARIES, "autocast_copies", "unsharded_parameters", "all_gather", "reduce_scatter")
LATE = ("masters", "optimizer_states")  # made in the first step
FLOAT32 = 4


class Timeline:
    def __init__(self, job: Job, stage: Stage, costs: Costs, weights: Held):
        self.job, self.stage, self.costs, self.weights = job, stage, costs, weights
        self.mode = MODES[job.optimizer]
        self.states = residents(weights, job, self.mode)  # wherever they are
        # Everything sharded lives on the host under FSDP2's CPUOffloadPolicy, gradients too, as they are reduced.
        self.all_on_host = job.offload >= {"optimizer", "parameters"}

    # ---- what is there throughout ------------------------------------------------------------------------------------
    def resident(self, first: bool) -> dict[str, int]:
        """On the device in every phase; the first step has no optimizer states until it makes them."""
        parts = {part: size for part, size in self.states.items() if part != GRADIENTS}
        if first or "optimizer" in self.job.offload:
            parts.update(dict.fromkeys(LATE, 0))
        if "parameters" in self.job.offload:
            parts["parameters"] = 0
        parts["inputs"] = self.costs.inputs
        return parts

    def _sharded(self, elements: Elements) -> int:
        return elements.shard if self.job.sharded >= 2 else elements.whole

    def _updated(self, elements: Elements) -> int:
        """Elements that this rank's optimizer updates."""
        return elements.shard if self.job.sharded else elements.whole

    @property
    def sums(self) -> int:
        """Bytes of float32 sums of 16-bit gradients (hs.Accumulator)."""
        apart = self.job.accumulate_in_fp32 and self.job.accumulation > 1 and self.mode.gradient_bytes < FLOAT32
        return FLOAT32 * self._sharded(self.weights.trained) if apart else 0

    @property
    def buckets(self) -> int:
        """Bytes of DistributedDataParallel's buckets: of all gradients, allocated when it is constructed and kept
        (Reducer::initialize_buckets); with gradient_as_bucket_view the gradients are views of them."""
        return self.states[GRADIENTS] if self.job.data_parallel > 1 and not self.job.sharded else 0

    @property
    def waiting(self) -> int:
        """Bytes of gradients that are there before a backward starts."""
        if self.job.accumulation == 1 or self.all_on_host:
            return self.buckets
        return self.sums + self.buckets if self.sums else self.states[GRADIENTS]

    @property
    def host(self) -> dict[str, int]:
        """Pinned host memory for this GPU: what is offloaded, and buffers of what is copied there and back."""
        job, parts = self.job, {}
        if "optimizer" in job.offload:
            parts.update({part: self.states[part] for part in LATE})
            parts[GRADIENTS] = self.states[GRADIENTS] + (self.sums if self.all_on_host else 0)
            if "parameters" not in job.offload:
                parts["updated_parameters"] = self.mode.weight_bytes * self._updated(self.weights.trained)
        if "parameters" in job.offload:
            parts["parameters"] = self.states["parameters"]
        if "activations" in job.offload:
            parts["activations"] = self.stage.in_flight * self.stage.layers * sum(self.costs.layer.movable.values())
        return {part: size for part, size in parts.items() if size}

    # ---- activations that are kept -----------------------------------------------------------------------------------
    def kept(self, layers: int) -> dict[str, int]:
        """When the forward of the current micro-batch went through so many layers, the waiting ones included."""
        first = (self.costs.embedding.kept,) if self.stage.first else ()
        return add(self._of_layers(layers), {"attention": self.costs.shared}, *first, self.others)

    @cached_property
    def others(self) -> dict[str, int]:
        """Of the micro-batches that wait for their backward, but for the current one."""
        first = (self.costs.embedding.kept,) if self.stage.first else ()
        return times(self.stage.in_flight - 1, add(self._of_layers(self.stage.layers), *first))

    def _of_layers(self, layers: int) -> dict[str, int]:
        """On the device: with offloading, one layer of what can be moved is on its way."""
        layer = self.costs.layer
        if "activations" not in self.job.offload:
            return times(layers, layer.kept)
        return add(times(layers, layer.kept), times(min(layers, 1) - layers, layer.movable))

    @property
    def kept_in_all(self) -> int:
        """Of one micro-batch, head and loss included, wherever they are."""
        stage, costs = self.stage, self.costs
        blocks = [(stage.layers, costs.layer), (stage.first, costs.embedding), (stage.last, costs.head)]
        return costs.shared + sum(count * sum(block.kept.values()) for count, block in blocks)

    # ---- what sharded and offloaded weights need while they are used -------------------------------------------------
    def whole(self, layers: int, gathering: bool = False) -> dict[str, int]:
        """Unsharded weights in the dtype they are computed with: those outside the layers, and of so many layers; with
        the buffer that the next layer is gathered into."""
        job, layer, width = self.job, self.weights.layer.whole, self.compute_width
        parts: dict[str, int] = {}
        if job.sharded or "parameters" in job.offload:
            parts["unsharded_parameters"] = width * (self.weights.outer.whole + layers * layer)
        if gathering and self.resharding:
            parts["all_gather"] = width * layer
        if job.autocast:
            parts["autocast_copies"] = 2 * self.weights.products
        return parts

    @property
    def compute_width(self) -> int:
        """Bytes of an element of the weights that a layer computes with: FSDP2's param_dtype."""
        return 2 if self.job.precision == "amp-bf16" and self.job.sharded else self.mode.weight_bytes

    @property
    def resharding(self) -> bool:
        """Whether layers are whole only while they are used."""
        return self.job.sharded == 3 or "parameters" in self.job.offload

    # ---- the moments -------------------------------------------------------------------------------------------------
    def highest(self, phase: str) -> Bytes:
        """Bytes by part at the highest moment of a phase, without what is there throughout."""
        return highest(getattr(self, f"_{phase}")())

    def _forward(self) -> Iterator[Bytes]:
        layers, waiting = self.stage.layers, {GRADIENTS: self.waiting}
        for number in {layers - 1, max(layers - 2, 0)}:  # the last one gathers no other
            whole = 1 if self.resharding else layers
            whole_weights = self.whole(whole, gathering=number < layers - 1)
            yield add(self.kept(number), self.costs.layer.forward, waiting, whole_weights)
        if self.stage.first:
            yield add(self.others, self.costs.embedding.forward, waiting, self.whole(0))

    def _loss(self) -> Iterator[Bytes]:
        layers = 0 if self.resharding else self.stage.layers
        at_end = add(self.kept(self.stage.layers), {GRADIENTS: self.waiting})
        yield add(at_end, self.whole(layers))
        if self.stage.last:
            yield add(at_end, self.costs.head.forward, self.whole(layers))
            yield add(at_end, self._block(self.costs.head, 0), self.whole(layers, gathering=True))

    def _backward(self) -> Iterator[Bytes]:
        layers, costs, waiting = self.stage.layers, self.costs, {GRADIENTS: self.waiting}
        for number in {layers - 1, max(layers - 2, 0), min(1, layers - 1), 0}:
            behind = layers - 1 - number
            weights = self.whole(1 if self.resharding else number + 1, gathering=number > 0)
            reducing = self._reduced(self.weights.trained_layer) if behind else {}
            yield add(self.kept(number), waiting, self._block(costs.layer, behind), weights, reducing)
            if self.job.sharded >= 2:
                # The layer's weights are copied out of the buffer they were gathered into.
                begun = {GRADIENTS: self._gradients_behind(behind), TEMPORARIES: costs.layer.output}
                weights = self.whole(1 if self.resharding else number + 1, gathering=True)
                yield add(self.kept(number + 1), waiting, begun, weights, reducing)
                # Gradients are copied to where they are reduced, when the weights are no longer whole.
                weights = self.whole(0 if self.resharding else number, gathering=number > 0)
                own = {GRADIENTS: self._gradients_behind(behind) + costs.layer.gradients}
                yield add(self.kept(number), waiting, own, weights, self._reduced(self.weights.trained_layer))
        if self.stage.first:
            reducing = self._reduced(self.weights.trained_layer)
            yield add(self.others, waiting, self._block(costs.embedding, layers), self.whole(0), reducing)

    def _block(self, block: BlockCost, behind: int) -> Bytes:
        """The backward of one block behind which are so many layers and the head."""
        one_by_one = self.job.release_gradients or self.buckets or (self.waiting and not self.sums)
        if one_by_one and self.job.sharded < 2:
            return block.adding
        before = self._gradients_behind(behind) if block is not self.costs.head else 0
        return add(block.making, {GRADIENTS: before})

    def _gradients_behind(self, layers: int) -> int:
        """Bytes of gradients of the head and of layers that the backward is through with."""
        job, of_layer = self.job, self.costs.layer.gradients
        head = self.costs.head.gradients if self.stage.last else 0
        # FSDP2 reduces those outside the layers at the end, together.
        if self.all_on_host or job.release_gradients or (job.sharded >= 2 and self.waiting and not self.sums):
            return head
        if job.sharded < 2:
            return head + layers * of_layer
        layer = self.weights.trained_layer
        return head + layers * (self.mode.gradient_bytes * layer.shard if layer.whole else 0)

    def _reduced(self, elements: Elements) -> dict[str, int]:
        """The buffer that gradients are reduced from: FSDP2 keeps it until the next one is needed."""
        if self.job.sharded < 2:
            return {}
        return {"reduce_scatter": (FLOAT32 if self.job.reduce_in_fp32 else self.compute_width) * elements.whole}

    def _reduce(self) -> Iterator[Bytes]:
        if self.job.sharded >= 2:
            outer = self.weights.trained_outer  # all at once, when the last layer is done
            embedding = self.costs.embedding.gradients if self.stage.first else 0
            own = {GRADIENTS: self._gradients_behind(self.stage.layers) + embedding, **self._reduced(outer)}
            yield add({GRADIENTS: self.waiting}, own)
        yield {GRADIENTS: self._made + self.sums * (not self.all_on_host)}

    @property
    def _made(self) -> int:
        """Bytes of gradients on the device when backward is over, sums of micro-batches left out."""
        return 0 if self.job.release_gradients or self.all_on_host else self.states[GRADIENTS]

    def _step(self) -> Iterator[Bytes]:
        # Where there are float32 sums, the optimizer reads them, and the last micro-batch's gradients are gone.
        gradients = self.sums + self.buckets if self.sums and not self.all_on_host else self._made
        elements = {"fused": 0, "foreach": self._updated(self.weights.trained),
                    "for-loop": self._updated(self.weights.loop)}[self.job.step]  # fmt: skip
        on_device = "optimizer" not in self.job.offload
        yield {GRADIENTS: gradients, TEMPORARIES: self.mode.weight_bytes * elements * on_device}
