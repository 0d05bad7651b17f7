"""Any model, measured: built and run under fake tensors, which take no memory and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..activations import checkpoint, measure_activations
from ..activations.blocks import Blocks, find_blocks
from ..activations.measure import flop_formulas
from .costs import BlockCost, Bytes, Costs
from .job import Job
from .model import Weight
from .tape import GRADIENTS, TEMPORARIES

Make = Callable[[], nn.Module]
LossOf = Callable[[nn.Module, int, int], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "amp-bf16": torch.float32}
BLOCKS, OUTSIDE = "blocks", "outside"


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """A model that `estimate` takes in the place of a shape: a stack of equal blocks and what is around them.

    Bytes are those of torch's CPU kernels, which keep a little else than a GPU's: LayerNorm's statistics and dropout's
    masks in the activations' dtype. Which attention and loss run is the model's affair: a Job's fields about them
    change nothing. Only data parallelism is known: weights are split by tensor or pipeline for shapes alone.

    Args:
        make: returns the model, with weights of torch's default dtype; called several times, under fake tensors.
        loss_of: (model, micro_batch, sequence) -> loss: makes its inputs and runs the forward.
        blocks: as in hs.checkpoint; None finds them.
        name: for reports.

    Raises:
        ValueError: no blocks are found, or they are of several kinds.

    Example:
        >>> from halfstep.planner import Job, estimate
        >>> from halfstep.planner.module import MeasuredModel
        >>> def make():
        ...     block = lambda: torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ...     return torch.nn.Sequential(*(block() for _ in range(3)))
        >>> model = MeasuredModel(make, lambda model, b, s: model(torch.randn(b, s, 16)).sum())
        >>> model.parameters, model.layers
        (6672, 3)
        >>> estimate(model, Job(precision="fp32", optimizer="fp32", sequence=8)).phases["step"]["optimizer_states"]
        53376
    """

    make: Make
    loss_of: LossOf
    blocks: Blocks = None
    name: str = "measured"
    tied = False

    @cached_property
    def _weights(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...], int]:
        """Of one block, of what is outside, and how many blocks there are."""
        with _fake():
            model = self.make()
            blocks = list(find_blocks(model, self.blocks).values())
            inside = {id(p) for block in blocks for p in block.parameters()}
            kinds = {tuple((p.shape, p.requires_grad) for p in block.parameters()) for block in blocks}
            if len(kinds) > 1:
                raise ValueError(
                    f"blocks: expected one kind, got {len(kinds)} with weights of different shapes; choose one kind of "
                    "block with blocks="
                )
            outer = [(name, p) for name, p in model.named_parameters() if id(p) not in inside]
            return _weights_of(BLOCKS, blocks[0].named_parameters()), _weights_of(OUTSIDE, outer), len(blocks)

    @property
    def layer_weights(self) -> tuple[Weight, ...]:
        return self._weights[0]

    @property
    def outer_weights(self) -> tuple[Weight, ...]:
        return self._weights[1]

    @property
    def layers(self) -> int:
        return self._weights[2]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self.outer_weights, *(w.times(self.layers) for w in self.layer_weights))

    @property
    def parts(self) -> dict[str, int]:
        return {part: sum(w.elements * w.copies for w in self.weights if w.part == part) for part in (BLOCKS, OUTSIDE)}

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    active_parameters = parameters  # which ones a token goes through is not known

    @property
    def trainable_parameters(self) -> int:
        return sum(w.elements * w.copies for w in self.weights if w.trainable)

    def forward_flops(self, job: Job) -> int:
        """Of the forward of one micro-batch, as torch counts them: products, convolutions and attention."""
        from torch.utils.flop_counter import FlopCounterMode

        with _fake(DTYPES[job.precision]):
            module = self.make().train()
            with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counted:
                self.loss_of(module, job.micro_batch, job.sequence)
        return counted.get_total_flops()

    def check(self, job: Job) -> None:
        """Refuses what only a shape can answer."""
        for field in ("tensor_parallel", "expert_parallel", "pipeline_parallel"):
            if getattr(job, field) > 1:
                raise ValueError(
                    f"{field}={getattr(job, field)}: expected 1 for a measured model; plan its shape instead"
                )
        if job.recompute == "attention":
            raise ValueError(
                "recompute='attention': expected one of none, selective, layer for a measured model, whose attention "
                "is not known"
            )

    @cached_property
    def _known(self) -> dict[Job, Costs]:
        return {}

    def costs(self, job: Job) -> Costs:
        """For a Job's `.blocks`. Bytes grow with the micro-batch in equal steps, so two of them say what all need."""
        if job not in self._known:
            self._known[job] = self._costs(job)
        return self._known[job]

    def _costs(self, job: Job) -> Costs:
        if job.micro_batch == 1:
            return _measured(self, job)
        two, three = replace(job, micro_batch=2), replace(job, micro_batch=3)
        for size in (two, three):
            self._known.setdefault(size, _measured(self, size))
        return _extrapolated(self._known[two], self._known[three], job.micro_batch - 2)


def _weights_of(part: str, named: Any) -> tuple[Weight, ...]:
    return tuple(
        Weight(part, name, tuple(p.shape) or (1,), trainable=p.requires_grad, tensor_parallel=False)
        for name, p in named
    )


@contextmanager
def _fake(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class _Mark:
    """A point of the step: bytes there, the highest since the mark before, bytes of weights' gradients."""

    live: int
    peak: int
    gradients: int


class _Watch:
    """Marks where the step enters and leaves one block and the whole stack."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], watched: int):
        self.marks: dict[str, _Mark] = {}
        self.parameters = list(model.parameters())
        self.hooks = []
        for number, block in enumerate(blocks):
            self.hooks.append(block.register_forward_pre_hook(self._entering(number), with_kwargs=True))
        self.hooks.append(blocks[watched].register_forward_hook(self._marking("left", "begun")))
        self.hooks.append(blocks[-1].register_forward_hook(self._marking("stack left", "stack begun")))
        self.watched = watched

    def mark(self, name: str) -> None:
        gradients = sum(p.grad.untyped_storage().nbytes() for p in self.parameters if p.grad is not None)
        self.marks[name] = _Mark(self.measured.bytes, self.measured.peak, gradients)
        self.measured.peak = self.measured.bytes

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            if number in (self.watched, self.watched + 1):
                self.mark("entered" if number == self.watched else "next entered")
            for name, where in (("over", self.watched), ("stack over", 0)):
                if number == where:
                    _on_gradient((args, kwargs), partial(self.mark, name))

        return enter

    def _marking(self, forward: str, backward: str) -> Callable[..., None]:
        def leave(block: nn.Module, args: Any, output: Any) -> None:
            self.mark(forward)
            _on_gradient(output, partial(self.mark, backward))

        return leave

    def step(self, loss_of: Callable[[], Tensor], autocast: Any) -> None:
        with measure_activations() as self.measured:
            with autocast:
                loss = loss_of()
            self.mark("forward")
            loss.backward()
            self.mark("backward")


def _on_gradient(tree: Any, then: Callable[[], None]) -> None:
    """Calls `then` when backward has the gradient of the first tensor that has one."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: then())
            return


def _measured(model: MeasuredModel, job: Job) -> Costs:
    with _fake(DTYPES[job.precision]):
        module = model.make().train()
        if job.recompute != "none":
            checkpoint(module, job.recompute, blocks=model.blocks)
        blocks = list(find_blocks(module, model.blocks).values())
        watched = min(1, len(blocks) - 1)  # the first one may keep what all share
        watch = _Watch(module, blocks, watched)
        autocast = torch.autocast("cpu", torch.bfloat16) if job.autocast else nullcontext()
        watch.step(lambda: model.loss_of(module, job.micro_batch, job.sequence), autocast)
    # A policy's results cannot be told from arguments, and are not moved.
    return _costs(watch.marks, watched, len(blocks), movable=job.recompute != "selective")


def _costs(marks: dict[str, _Mark], watched: int, layers: int, movable: bool) -> Costs:
    """Embedding and head as what is not of the blocks: kept by the head, since it is there when the forward is over."""
    entered, left = marks["entered"], marks["left"]
    after = marks.get("next entered", left)
    kept = after.live - entered.live
    below, all_layers, none = watched * kept, layers * kept, _Mark(0, 0, 0)
    begun = marks["begun"]
    # With a single block its own mark comes first, and has the peak.
    stack_begun = begun if watched == layers - 1 else marks["stack begun"]
    end = marks["backward"]
    over = marks.get("over", end)
    stack_over = marks.get("stack over", none)
    own = over.gradients - begun.gradients
    blocks = {BLOCKS: kept}
    layer = BlockCost(
        blocks, left.peak - below, _moments(over.peak - below - begun.gradients, blocks, own), 0,
        blocks if movable else {},
    )  # fmt: skip
    outside = {OUTSIDE: marks["forward"].live - all_layers}
    head = BlockCost(
        outside, marks["forward"].peak - all_layers,
        _moments(stack_begun.peak - all_layers, outside, stack_begun.gradients), 0, {},
    )  # fmt: skip
    rest = end.gradients - stack_begun.gradients - layers * own
    embedding = BlockCost({}, 0, _moments(end.peak - stack_over.gradients, {}, rest), 0, {})
    return Costs(layer, head, embedding, 0, 0)


def _moments(total: int, kept: Bytes, gradients: int) -> tuple[Bytes, ...]:
    """The highest moment of a backward, and its end."""
    room = max(total - sum(kept.values()), 0)
    made = min(gradients, room)
    return (
        {**kept, GRADIENTS: made, TEMPORARIES: room - made},
        {GRADIENTS: gradients, TEMPORARIES: 0},
    )


def _extrapolated(two: Costs, three: Costs, more: int) -> Costs:
    """What `more` sequences than two need."""

    def grown(a: Any, b: Any) -> Any:
        if isinstance(a, int):
            return a + more * (b - a)
        if isinstance(a, dict):
            return {key: grown(a.get(key, 0), b.get(key, 0)) for key in {*a, *b}}
        if isinstance(a, tuple):
            return tuple(grown(x, y) for x, y in zip(a, b, strict=True))
        return type(a)(*(grown(getattr(a, field), getattr(b, field)) for field in a.__dataclass_fields__))

    return grown(two, three)
