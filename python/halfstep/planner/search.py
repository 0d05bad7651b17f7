"""Which ways to train fit, and which of them takes the least time by the model of `time.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from .batch import accumulation_for, micro_batches_for
from .degrees import splits, stages
from .hardware import Hardware
from .job import Job
from .memory import Estimate, Model, estimate
from .model import ModelShape
from .quantities import check_number
from .states import MODES, suits
from .time import Assumptions, StepTime, local_parameters, step_time, tokens

MOST_SEQUENCES = 2**20  # of a global batch; more is a slip of units
HOST_OFFLOAD = frozenset({"optimizer", "parameters"})  # what FSDP2's CPUOffloadPolicy moves

# Optimizer modes by what they do to a run, tried in this order: float32 masters and states, whose bits a split master
# shares; 16-bit states beside a master; weights without a master.
EXACT = ("master", "split")
NARROW_STATES = ("master-bf16-states", "split-bf16-states")
NO_MASTER = ("weights-fp32-states", "weights-bf16-states")


@dataclass(frozen=True)
class Space:
    """What the search may choose, the simplest value of each field first. One value in a field fixes it."""

    optimizers: tuple[str, ...] = EXACT
    recomputes: tuple[str, ...] = ("none", "selective", "layer")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    tensor_parallels: tuple[int, ...] = (1, 2, 4, 8)
    pipeline_parallels: tuple[int, ...] = (1, 2, 4, 8, 16)
    offloads: tuple[frozenset[str], ...] = (frozenset(), frozenset({"activations"}))
    micro_batches: tuple[int, ...] = ()  # empty: any


@dataclass(frozen=True)
class Wish:
    """What is given, whatever is chosen."""

    sequence: int = 2048
    sequences: int | None = None  # of a global batch; None: one micro-batch on each rank
    precision: str = "bf16"
    attention: str = "fused"
    loss: str = "logits"
    step: str = "fused"

    def __post_init__(self) -> None:
        check_number("sequence", self.sequence, 1, 2**27, remedy=" tokens")
        if self.sequences is not None:
            check_number("global_batch", self.sequences, 1, MOST_SEQUENCES, remedy=" sequences")


@dataclass(frozen=True)
class Candidate:
    """A way to train, with its memory and its time."""

    job: Job
    estimate: Estimate
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        return tokens(self.job) / self.time.total


def layouts(model: Model, hardware: Hardware, wish: Wish, space: Space) -> Iterator[Job]:
    """Every way to train in `space` that the GPUs and the model's sizes allow, with one sequence at a time."""
    optimizers = [mode for mode in space.optimizers if suits(mode, wish.precision)]
    for tensor, pipeline in _degrees(model, hardware, space):
        ranks = hardware.gpus // (tensor * pipeline)
        # Sharding is simpler than offload: every stage without it comes before every stage with it.
        choices = product(space.offloads, _zeros(space, ranks), optimizers, space.recomputes)
        for offload, zero, optimizer, recompute in choices:
            if "parameters" in offload and zero != 3:
                continue
            # hs.AdamW draws its random numbers by row: RowwiseParallel's weights are sharded on dimension 1.
            if tensor > 1 and MODES[optimizer].rounds_stochastically:
                continue
            yield Job(
                sequence=wish.sequence,
                precision=wish.precision,
                attention=wish.attention,
                loss=wish.loss,
                step=wish.step,
                optimizer=optimizer,
                recompute=recompute,
                zero=zero,
                data_parallel=ranks,
                # hs.Accumulator's sums; pipelines and tensor-parallel parameters go without it.
                accumulate_in_fp32=tensor == pipeline == 1,
                tensor_parallel=tensor,
                sequence_parallel=tensor > 1,
                pipeline_parallel=pipeline,
                offload=offload,
            )


def _zeros(space: Space, ranks: int) -> tuple[int, ...]:
    """One rank has nothing to shard; a stage that was asked for is kept, since FSDP2 on one rank can offload."""
    return (0,) if ranks == 1 and 0 in space.zeros else space.zeros


def _degrees(model: Model, hardware: Hardware, space: Space) -> Iterator[tuple[int, int]]:
    if not isinstance(model, ModelShape):  # how to split its modules is not known
        if 1 in space.tensor_parallels and 1 in space.pipeline_parallels:
            yield 1, 1
        return
    # ColwiseParallel and RowwiseParallel split nn.Linear alone: no tensors of all experts, and no fused q, k, v.
    whole = (model.experts or model.fused_qkv) and 1 in space.tensor_parallels
    for tensor in (1,) if whole else space.tensor_parallels:
        for pipeline in space.pipeline_parallels:
            if splits(model, hardware, tensor) and stages(model, hardware, tensor, pipeline):
                yield tensor, pipeline


# ---- memory ----------------------------------------------------------------------------------------------------------
def fits(found: Estimate, hardware: Hardware) -> bool:
    return found.peak <= hardware.gpu_memory and not hardware.host_missing(found.host)


def least_bytes(model: Model, job: Job) -> float:
    """What weights, gradients, masters and optimizer states of a GPU need at least, whatever the activations are.

    Cheap to know, so that the many ways that are out of the question cost no estimate.
    """
    mode = MODES[job.optimizer]
    local = local_parameters(model, job) * model.trainable_parameters / model.parameters
    total = 0.0
    for stage, size, part in (
        (3, mode.weight_bytes, "parameters"),
        (2, mode.gradient_bytes, "parameters"),
        (1, mode.master_bytes + mode.state_bytes, "optimizer"),
    ):
        if part not in job.offload:
            total += size * local / (job.data_parallel if job.zero >= stage else 1)
    return total


def largest_micro_batch(model: Model, job: Job, hardware: Hardware, most: int) -> int:
    """The largest micro-batch up to `most` whose peak fits; 0 if one sequence does not. Memory grows with it."""

    def holds(micro_batch: int) -> bool:
        return fits(estimate(model, replace(job, micro_batch=micro_batch)), hardware)

    return largest_that(holds, most) if least_bytes(model, job) <= hardware.gpu_memory else 0


def largest_that(holds: Callable[[int], bool], most: int) -> int:
    """The largest n of 1 .. most for which holds(n), 0 if there is none; what holds for n holds below it."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def frugal(space: Space) -> Space:
    """The part of a space that needs the least memory: everything recomputed that may be, everything sharded."""
    zeros = tuple(zero for zero in space.zeros if zero in (0, max(space.zeros)))
    return replace(space, recomputes=space.recomputes[-1:], zeros=zeros)


def most_frugal(model: Model, hardware: Hardware, wish: Wish, space: Space) -> Candidate | None:
    """The way with the least peak at one sequence on each rank, of those that the host memory suffices for; if it does
    for none, the way with the least RAM. None without any."""
    best: tuple[tuple[int, int], Job, Estimate] | None = None
    for layout in layouts(model, hardware, wish, frugal(space)):
        job = _with_batch(layout, wish, space.micro_batches[0] if space.micro_batches else 1)
        found = estimate(model, job)
        need = hardware.host_missing(found.host), found.peak
        if best is None or need < best[0]:
            best = need, job, found
    return None if best is None else Candidate(best[1], best[2], step_time(model, best[1], hardware))


def any_fits(model: Model, hardware: Hardware, wish: Wish, spaces: Iterable[Space]) -> bool:
    """Whether one sequence at a time can be trained on in any way."""
    return any(
        least_bytes(model, job) <= hardware.gpu_memory and fits(estimate(model, _with_batch(job, wish, 1)), hardware)
        for space in spaces
        for job in layouts(model, hardware, wish, frugal(space))
    )


# ---- time ------------------------------------------------------------------------------------------------------------
def cheapest(
    model: Model, hardware: Hardware, wish: Wish, space: Space, assumptions: Assumptions | None = None
) -> Candidate | None:
    """The feasible way that takes the least time for a wanted global batch (else: for a token); None if nothing fits.

    Of ways that differ by less than `Assumptions.indifference` the simplest is taken, the first that `layouts` yields:
    no way is told from another by less than what the model can know.
    """
    assumptions = assumptions or Assumptions()
    search = _for_tokens if wish.sequences is None and not space.micro_batches else _for_batch
    job = search(model, hardware, wish, space, assumptions)
    if job is None:
        return None
    return Candidate(job, estimate(model, job), step_time(model, job, hardware, assumptions))


def _for_batch(model: Model, hardware: Hardware, wish: Wish, space: Space, assumptions: Assumptions) -> Job | None:
    """Times are cheaper to know than memory, so the ways are sorted by time, and looked at until one fits."""
    rated: list[tuple[float, int, Job, _Room]] = []
    for layout in layouts(model, hardware, wish, space):
        room = _Room(model, layout, hardware)
        for job in batches(layout, wish, space):
            seconds = step_time(model, job, hardware, assumptions).total
            rated.append((seconds if wish.sequences else seconds / tokens(job), len(rated), job, room))
    rated.sort(key=lambda each: each[:2])
    fastest = next((seconds for seconds, _, job, room in rated if room.holds(job)), None)
    if fastest is None:
        return None
    near = [each for each in rated if fastest <= each[0] <= fastest * (1 + assumptions.indifference)]
    return next(job for _, _, job, room in sorted(near, key=lambda each: each[1]) if room.holds(job))


def batches(layout: Job, wish: Wish, space: Space) -> Iterator[Job]:
    """The micro-batches and accumulations that make the wanted global batch."""
    if wish.sequences is None:
        pairs = [(micro_batch, 1) for micro_batch in space.micro_batches]
    elif space.micro_batches:
        pairs = [(m, accumulation_for(wish.sequences, m, layout.data_parallel)) for m in space.micro_batches]
    else:
        pairs = micro_batches_for(wish.sequences, layout.data_parallel)
    for micro_batch, accumulation in pairs:
        yield replace(layout, micro_batch=micro_batch, accumulation=accumulation)


class _Room:
    """Which micro-batches of one layout fit. Memory grows with the micro-batch, so few have to be looked at."""

    def __init__(self, model: Model, layout: Job, hardware: Hardware) -> None:
        self._model, self._hardware, self._layout = model, hardware, layout
        # From two micro-batches on, and in a pipeline from as many as it has stages, memory depends on them no more.
        self._enough = max(2, layout.pipeline_parallel)
        self._limits: dict[int, list[int]] = {}  # accumulation -> [largest that fits, smallest that does not]
        self._hopeless = least_bytes(model, layout) > hardware.gpu_memory

    def holds(self, job: Job) -> bool:
        if self._hopeless:
            return False
        accumulation = min(job.accumulation, self._enough)
        if accumulation not in self._limits:  # most layouts that do not fit do not even with one sequence
            self._limits[accumulation] = [1, MOST_SEQUENCES + 1] if self._look(1, accumulation) else [0, 1]
        limits = self._limits[accumulation]
        if limits[0] < job.micro_batch < limits[1]:
            limits[0 if self._look(job.micro_batch, accumulation) else 1] = job.micro_batch
        return job.micro_batch <= limits[0]

    def _look(self, micro_batch: int, accumulation: int) -> bool:
        job = replace(self._layout, micro_batch=micro_batch, accumulation=accumulation)
        return fits(estimate(self._model, job), self._hardware)


def _for_tokens(model: Model, hardware: Hardware, wish: Wish, space: Space, assumptions: Assumptions) -> Job | None:
    """The largest micro-batch of each layout, for the layouts that could still be the best: a token takes the less time
    the larger the micro-batch is, so the largest of all gives a bound."""

    def seconds(job: Job) -> float:
        return step_time(model, job, hardware, assumptions).total / tokens(job)

    bounds = [
        (seconds(replace(job, micro_batch=MOST_SEQUENCES)), index, job)
        for index, job in enumerate(layouts(model, hardware, wish, space))
    ]
    found: list[tuple[float, int, Job]] = []
    fastest = float("inf")
    for bound, index, layout in sorted(bounds, key=lambda each: each[:2]):
        if bound > fastest * (1 + assumptions.indifference):
            break
        largest = largest_micro_batch(model, layout, hardware, MOST_SEQUENCES)
        if largest:
            job = replace(layout, micro_batch=largest)
            found.append((seconds(job), index, job))
            fastest = min(fastest, found[-1][0])
    near = [each for each in found if each[0] <= fastest * (1 + assumptions.indifference)]
    return min(near, key=lambda each: each[1])[2] if near else None


def _with_batch(job: Job, wish: Wish, micro_batch: int) -> Job:
    if wish.sequences is None:
        return replace(job, micro_batch=micro_batch)
    accumulation = accumulation_for(wish.sequences, micro_batch, job.data_parallel)
    return replace(job, micro_batch=micro_batch, accumulation=accumulation)
