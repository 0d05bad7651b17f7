"""Seconds of one optimizer step, from counts and rates: FLOPs, bytes over links, bytes in memory, waiting.

A model for comparing plans, not a prediction: every constant that is not counted from the job is a field of
`Assumptions`, to be seen in the result and replaced by what a machine was measured to do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from .flops import backward_flops, forward_flops
from .hardware import Hardware
from .job import Job
from .memory import Model, kept_activations
from .model import ModelShape
from .quantities import check_number
from .states import MODES


@dataclass(frozen=True)
class Assumptions:
    """What the time model takes for granted; shares are of the hardware's peak rates."""

    # Model FLOPs reached in training: 44-52 % (Narayanan et al. 2021, table 1), 46 % (Chowdhery et al. 2022, PaLM,
    # section 4.1), 42-54 % (Korthikanti et al. 2022, table 5). Elementwise operations and launches are in it.
    matmul_efficiency: float = 0.5
    link_efficiency: float = 0.8  # of a link's rate, as ring collectives of large messages reach it
    memory_efficiency: float = 0.8  # of the memory bandwidth, as streaming kernels reach it
    host_link_efficiency: float = 0.8  # of PCIe, from and to pinned memory
    communication_overlap: float = 0.8  # of the compute time, behind which gathers and reductions can hide
    offload_overlap: float = 0.8  # of the compute time, behind which copies to and from the host can hide
    layer_seconds: float = 5e-5  # fixed cost of a layer's forward pass (launches, small kernels); twice that backward
    host_update_bandwidth: float = 200e9  # bytes/s of a node's RAM that an optimizer step on the CPU reaches
    indifference: float = 0.02  # the search takes the simpler of two ways whose times differ by less
    causal: bool = True  # attention computes half of the scores

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = RANGES.get(field.name, (0.01, 1.0))
            if field.name != "causal":
                check_number(field.name, getattr(self, field.name), low, high, whole=False)


RANGES = {
    "indifference": (0.0, 1.0),
    "communication_overlap": (0.0, 1.0),
    "offload_overlap": (0.0, 1.0),
    "layer_seconds": (0.0, 1.0),
    "host_update_bandwidth": (1e9, 1e13),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest GPU, each part without what hides behind another."""

    compute: float  # forward and backward
    recompute: float  # activations computed again
    overhead: float  # fixed cost of the layers
    tensor_parallel: float  # all-reduces (or reduce-scatters and all-gathers) in the layers
    expert_parallel: float  # all-to-alls around the experts
    pipeline: float  # bubble and transfers between stages
    data_parallel: float  # gathers and reductions that do not hide behind compute
    offload: float  # copies to and from the host that do not hide behind compute
    optimizer: float  # the update, and on the host the sums of micro-batches' gradients

    @property
    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(model: Model, job: Job, hardware: Hardware, assumptions: Assumptions | None = None) -> StepTime:
    """The time of job's optimizer step: all its micro-batches and the update."""
    a = assumptions or Assumptions()
    peak = hardware.flops_32bit if job.precision == "fp32" else hardware.flops_16bit
    rate = peak * a.matmul_efficiency
    micro_steps = job.accumulation
    # Stages hold whole layers: the one with most sets the pace.
    uneven = -(-model.layers // job.pipeline_parallel) * job.pipeline_parallel / model.layers
    share = micro_steps * uneven / (job.tensor_parallel * job.pipeline_parallel)
    forward = forward_flops(model, job, causal=a.causal)
    compute = share * (forward + backward_flops(model, job, forward)) / rate
    recompute = _recompute(model, job, hardware, a, share * forward / rate)
    passes = 4 if job.recompute == "layer" else 3
    overhead = micro_steps * passes * a.layer_seconds * model.layers * uneven / job.pipeline_parallel
    tensor = _tensor_parallel(model, job, hardware, a) * share * job.tensor_parallel
    expert = _expert_parallel(model, job, hardware, a) * share
    busy = compute + recompute + overhead + tensor + expert
    hidden = compute + recompute + overhead  # links and copy engines are free meanwhile
    data = data_parallel_bytes(model, job) / (_data_parallel_link(job, hardware) * a.link_efficiency)
    copies = offload_bytes(model, job) / (hardware.host_link * a.host_link_efficiency)
    return StepTime(
        compute=compute,
        recompute=recompute,
        overhead=overhead,
        tensor_parallel=tensor,
        expert_parallel=expert,
        pipeline=_pipeline(model, job, hardware, a, busy),
        data_parallel=max(0.0, data - a.communication_overlap * hidden),
        offload=max(0.0, copies - a.offload_overlap * hidden),
        optimizer=_optimizer(model, job, hardware, a),
    )


def tokens(job: Job) -> int:
    """Tokens of one optimizer step over all ranks."""
    return job.micro_batch * job.sequence * job.accumulation * job.data_parallel


# ---- compute ---------------------------------------------------------------------------------------------------------
def _recompute(model: Model, job: Job, hardware: Hardware, a: Assumptions, forward_seconds: float) -> float:
    """`layer` does each forward pass again; `selective` is bound by memory: it writes and reads what was dropped."""
    if job.recompute == "layer":
        return forward_seconds
    if job.recompute == "none":
        return 0.0
    dropped = saved_bytes(model, job, "none") - saved_bytes(model, job, job.recompute)
    return job.accumulation * 2 * dropped / (hardware.memory_bandwidth * a.memory_efficiency)


def saved_bytes(model: Model, job: Job, recompute: str) -> int:
    """Bytes that one micro-batch keeps on a GPU for backward."""
    # Only what activations depend on, so that a search meets the same jobs again.
    return _saved_bytes(
        model,
        Job(
            micro_batch=job.micro_batch,
            sequence=job.sequence,
            precision=job.precision,
            optimizer="fp32" if job.precision in ("fp32", "amp-bf16") else "master",
            recompute=recompute,
            attention=job.attention,
            attention_mask=job.attention_mask,
            loss=job.loss,
            data_parallel=job.expert_parallel,
            tensor_parallel=job.tensor_parallel,
            sequence_parallel=job.sequence_parallel,
            pipeline_parallel=job.pipeline_parallel,
            expert_parallel=job.expert_parallel,
        ),
    )


_saved_bytes = lru_cache(maxsize=4096)(kept_activations)


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Share of a step that a stage waits: (p - 1) / (m + p - 1) (Huang et al. 2019, GPipe; 1F1B has the same)."""
    return (stages - 1) / (micro_batches + stages - 1)


def _pipeline(model: Model, job: Job, hardware: Hardware, a: Assumptions, busy: float) -> float:
    stages = job.pipeline_parallel
    if stages == 1 or not isinstance(model, ModelShape):
        return 0.0
    waiting = bubble_fraction(stages, job.accumulation)
    within = job.tensor_parallel * job.data_parallel * stages <= hardware.gpus_per_node
    link = hardware.in_node if within else hardware.between_nodes
    boundary = job.micro_batch * job.sequence * model.hidden * compute_bytes(job) / job.tensor_parallel
    transfers = 2 * (job.accumulation + stages - 1) * boundary / (link * a.link_efficiency)
    return busy * waiting / (1 - waiting) + transfers


# ---- links -----------------------------------------------------------------------------------------------------------
def data_parallel_elements(zero: int, parameters: int, accumulation: int = 1) -> int:
    """Elements that a rank sends in a step: 2 Psi for plain data parallelism and ZeRO 1 and 2, 3 Psi for ZeRO 3.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7; there without accumulation. With it, sharded gradients are
    reduced and sharded parameters gathered for each micro-batch; FSDP2 shards parameters again after each backward.
    """
    gathers, reductions = micro_step_volumes(zero, accumulation)
    return (gathers + reductions) * parameters


def micro_step_volumes(zero: int, accumulation: int) -> tuple[int, int]:
    """How often all parameters are gathered and all gradients reduced in a step, in units of one pass over a ring."""
    return {0: (0, 2), 1: (accumulation, 1), 2: (accumulation, accumulation), 3: (2 * accumulation, accumulation)}[zero]


def data_parallel_bytes(model: Model, job: Job) -> float:
    """Bytes that a GPU sends to its data-parallel group in a step; a ring of N sends (N - 1) / N of the elements."""
    ranks = job.data_parallel
    gathers, reductions = micro_step_volumes(job.zero, job.accumulation)
    # FSDP2 reduces in float32 (MixedPrecisionPolicy.reduce_dtype in the script), DDP what accumulation sums up.
    reduced = 4 if job.zero or job.accumulation > 1 else MODES[job.optimizer].gradient_bytes
    local = local_parameters(model, job)
    trainable = local * model.trainable_parameters / model.parameters
    return (ranks - 1) / ranks * (gathers * local * compute_bytes(job) + reductions * trainable * reduced)


def local_parameters(model: Model, job: Job) -> float:
    """Parameters of one GPU before ZeRO shards them."""
    experts = model.parts["ffn"] if isinstance(model, ModelShape) and model.experts else 0
    whole = (model.parameters - experts) + experts / job.expert_parallel
    return whole / (job.tensor_parallel * job.pipeline_parallel)


def compute_bytes(job: Job) -> int:
    """Bytes of a number in the passes."""
    return 4 if job.precision == "fp32" else 2


def _data_parallel_link(job: Job, hardware: Hardware) -> float:
    """Tensor-parallel ranks lie side by side, the data-parallel group over them (Narayanan et al. 2021, section 3).

    Over several nodes NCCL runs a ring through each network card, so a group has the cards of all its GPUs in a node
    (nccl-tests, PERFORMANCE.md: bus bandwidth).
    """
    if job.tensor_parallel * job.data_parallel <= hardware.gpus_per_node:
        return hardware.in_node
    in_a_node = max(1, hardware.gpus_per_node // job.tensor_parallel)
    return min(hardware.in_node, in_a_node * hardware.between_nodes)


def _tensor_parallel(model: Model, job: Job, hardware: Hardware, a: Assumptions) -> float:
    """Seconds for one micro-batch and all layers: 2 all-reduces forward, 2 backward, 2 in a recomputation.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3. Sequence parallelism sends the same bytes (Korthikanti 2022).
    """
    ranks = job.tensor_parallel
    if ranks == 1 or not isinstance(model, ModelShape):
        return 0.0
    link = hardware.in_node if ranks <= hardware.gpus_per_node else hardware.between_nodes
    ring = 2 * (ranks - 1) / ranks * job.micro_batch * job.sequence * model.hidden * compute_bytes(job)
    times = 6 if job.recompute == "layer" else 4
    return times * ring * model.layers / (link * a.link_efficiency)


def _expert_parallel(model: Model, job: Job, hardware: Hardware, a: Assumptions) -> float:
    """Seconds for one micro-batch and all layers: tokens go to their experts and back, forward and backward."""
    ranks = job.expert_parallel
    if ranks == 1 or not isinstance(model, ModelShape):
        return 0.0
    link = hardware.in_node if ranks * job.tensor_parallel <= hardware.gpus_per_node else hardware.between_nodes
    sent = (ranks - 1) / ranks * job.micro_batch * job.sequence * model.hidden * compute_bytes(job)
    times = 6 if job.recompute == "layer" else 4
    return times * model.experts_per_token * sent * model.layers / (link * a.link_efficiency)


# ---- host and update -------------------------------------------------------------------------------------------------
def offload_bytes(model: Model, job: Job) -> float:
    """Bytes over one GPU's host link in a step, both directions one after the other."""
    shard = local_parameters(model, job) / (job.data_parallel if job.zero else 1)
    total = 0.0
    if "activations" in job.offload:
        total += 2 * job.accumulation * saved_bytes(model, job, job.recompute)
    if (
        "parameters" in job.offload
    ):  # FSDP2's CPUOffloadPolicy: shards come for each gather, gradients go for each backward
        gathers = micro_step_volumes(job.zero, job.accumulation)[0]
        mode = MODES[job.optimizer]
        total += shard * (gathers * mode.weight_bytes + job.accumulation * mode.gradient_bytes)
    elif "optimizer" in job.offload:  # gradients go once, updated weights come back
        total += shard * (MODES[job.optimizer].gradient_bytes + MODES[job.optimizer].weight_bytes)
    return total


def _optimizer(model: Model, job: Job, hardware: Hardware, a: Assumptions) -> float:
    """Seconds of the update, which is bound by memory: gradients are read twice, the rest read and written.

    Where gradients go to the host, its processors add up those of the micro-batches: a gradient and the sum are read,
    the sum is written.
    """
    mode = MODES[job.optimizer]
    shard = local_parameters(model, job) / (job.data_parallel if job.zero else 1)
    trainable = shard * model.trainable_parameters / model.parameters
    moved = trainable * 2 * (mode.weight_bytes + mode.gradient_bytes + mode.master_bytes + mode.state_bytes)
    if "optimizer" in job.offload:
        on_node = min(hardware.gpus, hardware.gpus_per_node)
        if "parameters" in job.offload and job.accumulation > 1:
            sums = 4 if job.accumulate_in_fp32 else mode.gradient_bytes
            moved += trainable * job.accumulation * (mode.gradient_bytes + 2 * sums)
        return moved * on_node / a.host_update_bandwidth
    return moved / (hardware.memory_bandwidth * a.memory_efficiency)
