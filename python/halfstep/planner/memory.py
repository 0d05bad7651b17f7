"""Peak memory of a training step: model states, activations and transients on one GPU, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .costs import Bytes, add, costs_of_blocks
from .job import Job
from .model import ModelShape
from .module import MeasuredModel
from .sharding import Degrees, Stage, held, stages
from .timeline import TRANSIENTS, Timeline

STATE_PARTS = ("parameters", "gradients", "masters", "optimizer_states")
ACTIVATION_PARTS = (
    "residual",
    "norms",
    "attention",
    "scores",
    "ffn",
    "router",
    "embedding",
    "logits",
    "blocks",
    "outside",
)
Model = ModelShape | MeasuredModel
PHASES = ("forward", "loss", "backward", "reduce", "step")
MIB = 2**20


@dataclass(frozen=True)
class Allowance:
    """What torch's allocator does not count as tensors. Assumptions, not measurements of the job: set your own."""

    context: int = 600 * MIB  # CUDA context with torch's kernels loaded, cuBLAS workspaces
    communication: int = 400 * MIB  # NCCL's channels and buffers; only with several GPUs
    fragmentation: float = 0.03  # of what tensors take: rounding to blocks, gaps that nothing fits into

    def bytes(self, tensors: int, gpus: int) -> dict[str, int]:
        context = self.context + (self.communication if gpus > 1 else 0)
        return {"context": context, "fragmentation": round(self.fragmentation * tensors)}


class Phases:
    """What follows from the parts of each phase; a base of what has them."""

    phases: Mapping[str, Mapping[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak(self) -> int:
        """Of every step but the first; what a GPU must have."""
        return max(self.totals.values())

    @property
    def peak_phase(self) -> str:
        return max(self.totals, key=lambda phase: self.totals[phase])


@dataclass(frozen=True)
class Estimate(Phases):
    """Bytes on the GPU that needs the most. Phases hold what is there at the phase's highest moment."""

    model: Model
    job: Job
    parts: Mapping[str, int]  # every part at its own largest; their sum is more than the peak
    phases: Mapping[str, Mapping[str, int]]
    first_step_peak: int  # before the optimizer has made its states
    host: Mapping[str, int]  # in host memory for one GPU, pinned
    transients: Mapping[str, int]  # those parts that come and go inside a step
    stage: Stage = field(repr=False)


def estimate(model: Model, job: Job, allowance: Allowance | None = None) -> Estimate:
    """Bytes of every part and phase of one training step, on the GPU of a job that needs the most.

    Nothing is run; a `MeasuredModel` runs under fake tensors, once for each kind of micro-batch. See `Allowance` for
    what is assumed beside tensors. Without ZeRO, data parallelism is DistributedDataParallel, whose buckets are there
    from the start and hold the gradients (gradient_as_bucket_view=True).
    """
    allowance = allowance or Allowance()
    candidates = [_of_stage(model, job, stage, allowance) for stage in stages(model, job)]
    return max(candidates, key=lambda one: one.peak)


def kept_activations(model: Model, job: Job) -> int:
    """Bytes that one micro-batch keeps from forward to backward, wherever, on the GPU whose stage keeps the most."""
    return max(_timeline(model, job, stage).kept_in_all for stage in stages(model, job))


def _timeline(model: Model, job: Job, stage: Stage) -> Timeline:
    if isinstance(model, MeasuredModel):
        model.check(job)
    costs = model.costs(job.blocks) if isinstance(model, MeasuredModel) else costs_of_blocks(model, job.blocks)
    return Timeline(job, stage, costs, held(model, Degrees.of(job), stage))


def _of_stage(model: Model, job: Job, stage: Stage, allowance: Allowance) -> Estimate:
    timeline = _timeline(model, job, stage)
    moments = {phase: timeline.highest(phase) for phase in PHASES}
    resident, at_first = timeline.resident(first=False), timeline.resident(first=True)
    phases = {phase: _with(allowance, add(resident, moment), job) for phase, moment in moments.items()}
    before = (add(resident if phase == "step" else at_first, moment) for phase, moment in moments.items())
    first_step_peak = max(sum(_with(allowance, parts, job).values()) for parts in before)
    names = {part for found in phases.values() for part in found}
    parts = {part: max(found.get(part, 0) for found in phases.values()) for part in names}
    transients = {part: parts[part] for part in TRANSIENTS if parts.get(part)}
    return Estimate(model, job, parts, phases, first_step_peak, timeline.host, transients, stage)


def _with(allowance: Allowance, parts: Bytes, job: Job) -> dict[str, int]:
    tensors = {part: size for part, size in parts.items() if size}
    return {**tensors, **allowance.bytes(sum(tensors.values()), job.gpus)}
