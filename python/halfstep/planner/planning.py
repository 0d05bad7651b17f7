"""`plan()`: from a model and hardware, in whatever form they come, to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .batch import LearningRate, batch_advice, scaled_learning_rate
from .checks import check_choice
from .degrees import check_degrees
from .hardware import DEFAULT_PRESET, Hardware
from .hardware import hardware as make_hardware
from .job import ATTENTIONS, PRECISIONS, Job
from .levers import levers
from .memory import Model
from .model import ModelShape
from .module import MeasuredModel
from .presets import PRESETS, from_config, preset
from .quantities import check_number, parse_global_batch
from .remedies import remedies, unavailable
from .result import Measured, Memory, Plan
from .search import (
    EXACT,
    HOST_OFFLOAD,
    MOST_SEQUENCES,
    NARROW_STATES,
    NO_MASTER,
    Candidate,
    Space,
    Wish,
    cheapest,
    largest_micro_batch,
    most_frugal,
)
from .settings import settings
from .states import MODES, suits
from .time import Assumptions, step_time

DEFAULT_SEQUENCE = 2048  # tokens
OFFLOADS = {
    "none": (frozenset(),),
    "activations": (frozenset({"activations"}),),
    "host": (HOST_OFFLOAD, HOST_OFFLOAD | {"activations"}),
}


def plan(
    model: Any,
    hardware: Hardware | str | Mapping[str, Any] = DEFAULT_PRESET,
    *,
    sequence: int | None = None,
    global_batch: int | str | None = None,
    precision: str = "bf16",
    attention: str = "fused",
    optimizer: str | None = None,
    recompute: str | None = None,
    zero: int | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    offload: str | None = None,
    micro_batch: int | None = None,
    learning_rate: float | None = None,
    learning_rate_batch: int | str | None = None,
    assumptions: Assumptions | None = None,
) -> Plan:
    """What trains `model` on this hardware in the least time, its memory by part, and what to change if nothing fits.

    Nothing is run and no GPU is needed. Ways to train are looked at in this order, and the cheapest of the first
    group that has one wins: float32 masters and states on the GPUs; the same with pipeline stages; the same with
    parameters and states on the host; 16-bit states beside a master; no master, with stochastic rounding. So nothing
    that changes the numbers of a run is proposed while something else fits, and pipelines are weighed only where no
    way without them fits, even if they were faster. Ways whose times differ by less than 2 %
    (`Assumptions.indifference`) count as equal, and the simplest of them is taken: few splits, no offload, a low stage
    of ZeRO, nothing recomputed. Everything below that is not None is
    fixed, the rest is chosen.

    Args:
        model: a preset's name (`llama-7b`), the path of a transformers config.json, such a config, a ModelShape, or
            what makes any nn.Module, in a MeasuredModel (below), which is built and run under fake tensors.
        hardware: Hardware, a preset's name (`h100`), or a dict for `halfstep.planner.hardware`: {"preset": "h100",
            "gpus": 16}.
        sequence: tokens, 1 .. 2**27, and no more than a table of learned positions has rows. None: 2048, or those.
        global_batch: sequences of an optimizer step, or a text: `1M-tokens`, `512-sequences`. None: one micro-batch.
        precision: "bf16", "fp16", "amp-bf16" (float32 weights under autocast) or "fp32".
        attention: "fused" never stores the scores, "eager" does.
        optimizer: a name in `halfstep.planner.MODES`.
        recompute: "none", "selective" or "layer", as hs.checkpoint has them.
        zero: stage 0 .. 3.
        tensor_parallel, pipeline_parallel: GPUs that a layer, and stages that the layers, are split over.
        offload: "none", "activations" or "host" (parameters and states: FSDP2's CPUOffloadPolicy).
        micro_batch: sequences at a time on one GPU, 1 .. 2**20.
        learning_rate, learning_rate_batch: of another run; the plan says what they are for this batch.
        assumptions: constants of the time model.

    Raises:
        ValueError, TypeError: one line with the field, its value, what was expected.

    Example:
        >>> import halfstep as hs
        >>> found = hs.plan("llama-7b", {"preset": "a100-80gb", "gpus": 8}, global_batch="1M-tokens")
        >>> found.fits, found.job.data_parallel * found.job.tensor_parallel
        (True, 8)
        >>> from halfstep.planner import MeasuredModel
        >>> def make():
        ...     return torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3)))
        >>> def loss_of(model, micro_batch, sequence):
        ...     return model(torch.randn(sequence, micro_batch, 64)).sum()
        >>> hs.plan(MeasuredModel(make, loss_of), hardware="h100", sequence=128, global_batch=64).fits
        True
    """
    if not isinstance(assumptions, Assumptions | None):
        raise TypeError(f"assumptions={assumptions!r}: expected halfstep.planner.Assumptions(...) or None")
    shape, machine = shape_of(model), hardware_of(hardware)
    sequence = sequence_of(shape, sequence)
    wish = wish_of(sequence, precision, attention)
    wanted = None if global_batch is None else parse_global_batch(global_batch, sequence)
    if wanted is not None:
        wish = replace(wish, sequences=max(1, round(wanted)) if wanted > 0 else round(wanted))
    chosen = choices(precision, optimizer, recompute, zero, tensor_parallel, pipeline_parallel, offload, micro_batch)
    check_degrees(shape, machine, tensor_parallel, pipeline_parallel)
    found = next((c for space in chosen if (c := cheapest(shape, machine, wish, space, assumptions))), None)
    fits_first = found is not None and found.job.optimizer in (*EXACT, "fp32") and not found.job.offload & HOST_OFFLOAD
    best = found or _least(shape, machine, wish, chosen)
    job = best.job
    advice = (
        [] if wanted is None else batch_advice(wanted, job.micro_batch, job.data_parallel, job.accumulation, sequence)
    )
    return Plan(
        model=shape if isinstance(shape, ModelShape) else Measured.of(shape),
        hardware=machine,
        fits=found is not None,
        job=job,
        memory=Memory.of(best.estimate),
        largest_micro_batch=largest_micro_batch(shape, job, machine, MOST_SEQUENCES),
        time=step_time(shape, job, machine, assumptions),
        settings=settings(job),
        advice=tuple(advice),
        remedies=() if fits_first else tuple(remedies(shape, machine, wish, chosen[0])),
        unavailable=tuple(unavailable(shape, best)),
        levers=tuple(levers(shape, job)),
        learning_rate=_learning_rate(learning_rate, learning_rate_batch, job),
        assumptions=assumptions or Assumptions(),
    )


def sequence_of(model: Model, sequence: int | None) -> int:
    """Tokens of a sequence, which a table of learned positions limits."""
    positions = model.positions if isinstance(model, ModelShape) else 0
    if sequence is None:
        return min(DEFAULT_SEQUENCE, positions or DEFAULT_SEQUENCE)
    if positions and isinstance(sequence, int) and sequence > positions:
        raise ValueError(
            f"sequence={sequence:,}: expected 1 .. positions={positions:,}, the learned positions of {model.name}"
        )
    return sequence


def wish_of(sequence: int, precision: str, attention: str) -> Wish:
    check_choice("precision", precision, PRECISIONS)
    check_choice("attention", attention, ATTENTIONS)
    return Wish(sequence=sequence, precision=precision, attention=attention)


def shape_of(model: Any) -> Model:
    if isinstance(model, (ModelShape, MeasuredModel)):
        return model
    if callable(model):
        raise TypeError(
            f"model={type(model).__name__}: expected halfstep.planner.MeasuredModel(make, loss_of) around what makes a "
            "module, a preset's name, a transformers configuration or a ModelShape"
        )
    if not isinstance(model, str):
        return from_config(model)
    if model not in PRESETS and ("/" in model or model.endswith(".json") or Path(model).exists()):
        return from_config(model)
    return preset(model)


def hardware_of(hardware: Hardware | str | Mapping[str, Any]) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, str):
        return make_hardware(hardware)
    if isinstance(hardware, Mapping):
        return make_hardware(**hardware)
    raise TypeError(f"hardware={hardware!r}: expected a Hardware, a preset's name or a dict of its fields")


def choices(
    precision: str = "bf16",
    optimizer: str | None = None,
    recompute: str | None = None,
    zero: int | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    offload: str | None = None,
    micro_batch: int | None = None,
) -> list[Space]:
    """The groups of ways to train, in the order in which they are tried, narrowed by what is given."""
    check_choice("precision", precision, PRECISIONS)
    space = _narrowed(Space(pipeline_parallels=(1,)), precision, recompute, zero, tensor_parallel, micro_batch)
    if offload is not None:
        check_choice("offload", offload, OFFLOADS)
        if offload == "host" and precision == "fp16":
            raise ValueError("offload='host': expected none or activations with precision='fp16', or precision='bf16'")
        if offload == "host" and zero not in (None, 3):
            raise ValueError(f"zero={zero}: expected 3 with offload='host', which is FSDP2's, or another offload")
        space = replace(space, offloads=OFFLOADS[offload], zeros=(3,) if offload == "host" else space.zeros)
    if pipeline_parallel is not None:
        check_number("pipeline_parallel", pipeline_parallel, 1, 1024)
        space = replace(space, pipeline_parallels=(pipeline_parallel,))
    if precision == "fp16" and pipeline_parallel not in (None, 1):
        raise ValueError(
            f"pipeline_parallel={pipeline_parallel}: expected 1 with precision='fp16', or precision='bf16'"
        )
    groups = _optimizers(precision, optimizer)
    if optimizer is not None and MODES[optimizer].rounds_stochastically and tensor_parallel not in (None, 1):
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: expected 1 with optimizer={optimizer!r}, whose stochastic rounding "
            "takes DTensors sharded on dimension 0 alone, or another optimizer"
        )
    spaces = [replace(space, optimizers=groups[0])]
    if pipeline_parallel is None and offload != "host" and precision != "fp16":
        spaces.append(replace(spaces[0], pipeline_parallels=Space.pipeline_parallels))
    if offload is None and zero in (None, 3) and precision != "fp16":
        spaces.append(replace(spaces[0], offloads=OFFLOADS["host"], zeros=(3,)))
    return spaces + [replace(space, optimizers=group) for group in groups[1:]]


def _narrowed(
    space: Space, precision: str, recompute: str | None, zero: int | None, tensor: int | None, micro_batch: int | None
) -> Space:
    if recompute is not None:
        check_choice("recompute", recompute, Space.recomputes)
        space = replace(space, recomputes=(recompute,))
    if precision == "fp16":
        # The overflow flag of a scaler is not shared between shards or stages in this version.
        if zero not in (None, 0):
            raise ValueError(f"zero={zero}: expected 0 with precision='fp16', or precision='bf16'")
        if tensor not in (None, 1):
            raise ValueError(f"tensor_parallel={tensor}: expected 1 with precision='fp16', or precision='bf16'")
        space = replace(space, zeros=(0,), tensor_parallels=(1,))
    if zero is not None:
        check_number("zero", zero, 0, 3)
        space = replace(space, zeros=(zero,))
    if tensor is not None:
        check_number("tensor_parallel", tensor, 1, 1024)
        space = replace(space, tensor_parallels=(tensor,))
    if micro_batch is not None:
        check_number("micro_batch", micro_batch, 1, 2**20)
        space = replace(space, micro_batches=(micro_batch,))
    return space


def _optimizers(precision: str, optimizer: str | None) -> list[tuple[str, ...]]:
    if optimizer is not None:
        check_choice("optimizer", optimizer, MODES)
        if not MODES[optimizer].available:
            raise ValueError(f"optimizer={optimizer!r}: {MODES[optimizer].reason}; expected one of {_available()}")
        Job(precision=precision, optimizer=optimizer)  # raises if they do not go together
        return [(optimizer,)]
    groups = [("fp32",)] if precision in ("fp32", "amp-bf16") else [EXACT, NARROW_STATES, NO_MASTER]
    return [tuple(mode for mode in group if suits(mode, precision)) for group in groups]


def _available() -> str:
    return ", ".join(name for name, mode in MODES.items() if mode.available)


def _least(model: Model, hardware: Hardware, wish: Wish, spaces: list[Space]) -> Candidate:
    """Of what does not fit, the way that needs the least, in the first group that is possible at all."""
    return next(found for space in spaces if (found := most_frugal(model, hardware, wish, space)))


def _learning_rate(rate: float | None, batch: int | str | None, job: Job) -> LearningRate | None:
    if (rate is None) != (batch is None):
        raise ValueError(
            f"learning_rate={rate!r}, learning_rate_batch={batch!r}: expected both, the rate and the global batch "
            "that it was found with, or neither"
        )
    if rate is None or batch is None:
        return None
    check_number("learning_rate", rate, 1e-12, 1e3, whole=False)
    sequences = parse_global_batch(batch, job.sequence, "learning_rate_batch")
    check_number("learning_rate_batch", sequences, 1e-3, 2**30, remedy=" sequences", whole=False)
    return scaled_learning_rate(rate, job.global_batch / sequences)
