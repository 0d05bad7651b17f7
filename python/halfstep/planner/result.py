"""What `plan` answers: a value that shows itself as text, as rich tables, as JSON and as a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .batch import LearningRate
from .hardware import Hardware
from .job import Job
from .levers import Lever
from .memory import ACTIVATION_PARTS, STATE_PARTS, TRANSIENTS, Estimate, Phases
from .model import ModelShape
from .module import MeasuredModel
from .plain import from_plain, to_plain
from .quantities import shown
from .remedies import Remedy, Unavailable
from .time import Assumptions, StepTime, tokens

if TYPE_CHECKING:
    from rich.console import Group


PART_ORDER = (*STATE_PARTS, *ACTIVATION_PARTS, *TRANSIENTS, "inputs", "fragmentation", "context")


@dataclass(frozen=True)
class Memory(Phases):
    """Bytes on the GPU that needs the most; `Estimate` without what it was made from."""

    parts: dict[str, int]  # every part at its own largest moment; their sum is more than the peak
    phases: dict[str, dict[str, int]]  # what is there at each phase's highest moment
    first_step_peak: int  # before the optimizer has made its states
    host: dict[str, int]  # in host memory, for one GPU
    transients: dict[str, int]  # those parts that come and go inside a step

    @classmethod
    def of(cls, found: Estimate) -> Memory:
        phases = {phase: _ordered(parts) for phase, parts in found.phases.items()}
        return cls(_ordered(found.parts), phases, found.first_step_peak, dict(found.host), _ordered(found.transients))


def _ordered(parts: Mapping[str, int]) -> dict[str, int]:
    """What stays, what goes from forward to backward, what comes and goes, what is assumed."""
    return {part: parts[part] for part in PART_ORDER if parts.get(part)} | {
        part: size for part, size in parts.items() if size
    }


@dataclass(frozen=True)
class Measured:
    """What a plan keeps of a model that was measured, whose code is no value to write down."""

    name: str
    parameters: int
    trainable_parameters: int
    layers: int

    @classmethod
    def of(cls, model: MeasuredModel) -> Measured:
        return cls(model.name, model.parameters, model.trainable_parameters, model.layers)


@dataclass(frozen=True)
class Plan:
    """What trains on the hardware, how, and what to change if nothing does. All sizes in bytes, times in seconds."""

    model: ModelShape | Measured
    hardware: Hardware
    fits: bool
    job: Job  # the cheapest that fits; if none does, the one that needs the least
    memory: Memory
    largest_micro_batch: int  # that fits, everything else as in the job; 0 if none does
    time: StepTime
    settings: dict[str, str]  # topic -> the halfstep or torch call
    advice: tuple[str, ...]
    remedies: tuple[Remedy, ...]  # what would make it train, if it does not with float32 masters and states on the GPUs
    unavailable: tuple[Unavailable, ...]  # savings that this version cannot make
    levers: tuple[Lever, ...]  # changes of the model, largest saving first
    learning_rate: LearningRate | None
    assumptions: Assumptions

    @property
    def margin(self) -> int:
        """Bytes of GPU memory left at the peak; negative if it does not fit."""
        return self.hardware.gpu_memory - self.memory.peak

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs, by the time model."""
        return tokens(self.job) / self.time.total

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and texts, for json.dumps; with the sums that a reader would have to make."""
        sums = {
            "peak": self.memory.peak,
            "peak_phase": self.memory.peak_phase,
            "margin": self.margin,
            "step_seconds": self.time.total,
            "tokens_per_second": self.tokens_per_second,
            "global_batch": self.job.global_batch,
        }
        return {"summary": sums, **to_plain(self)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Plan:
        """The plan that to_json() made `found` of."""
        return from_plain(cls, {name: value for name, value in found.items() if name != "summary"})

    def script(self) -> str:
        """A training script to edit. ValueError where this version has none (tensor and pipeline parallelism)."""
        from .script import script

        return script(self.model, self.job)

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def __rich__(self) -> Group:
        from .tables import render

        return render(self)


def lines(plan: Plan) -> list[str]:
    """The plan as plain text."""
    memory = plan.memory
    verdict = "trains" if plan.fits else "does not fit"
    space = f"{shown(memory.peak, 'bytes')} of {shown(plan.hardware.gpu_memory, 'bytes')} in {memory.peak_phase}"
    found = [
        f"{plan.model.name} ({shown(plan.model.parameters, ' parameters')}) on {describe(plan.hardware)}: {verdict}",
        f"  peak per GPU: {space}, {margin_text(plan.margin)}",
    ]
    if plan.fits:
        found.append(
            f"  largest micro-batch that fits: {plan.largest_micro_batch:,} (planned: {plan.job.micro_batch:,})"
        )
    if memory.host:
        lacks = plan.hardware.host_missing(memory.host)
        missing = f" ({shown(lacks, 'bytes')} missing)" if lacks else ""
        found.append(f"  RAM per GPU: {shown(sum(memory.host.values()), 'bytes')}{missing}")
    found.append(f"  step: {plan.time.total:.3g} s, {plan.tokens_per_second:,.0f} tokens/s by the time model")
    found += [f"  {topic}: {text}" for topic, text in plan.settings.items()]
    if plan.remedies:
        found += ["what would make it:" if not plan.fits else "compared:", *(f"  {each}" for each in plan.remedies)]
    found += [f"note: {text}" for text in plan.advice]
    if plan.learning_rate is not None:
        found.append(f"note: {plan.learning_rate}")
    for each in plan.unavailable:
        found.append(
            f"not available in this version: {each.change} would save {shown(each.saves, 'bytes')} of the peak"
        )
    return found


def describe(hardware: Hardware) -> str:
    return f"{hardware.gpus:,} x {hardware.name} ({shown(hardware.gpu_memory, 'bytes')} each)"


def margin_text(margin: int) -> str:
    return f"{shown(abs(margin), 'bytes')} {'left' if margin >= 0 else 'missing'}"
