"""A job in the words of halfstep and torch: which call sets what."""

from __future__ import annotations

from .job import Job
from .states import MODES


def settings(job: Job) -> dict[str, str]:
    """Topic -> what to write for it."""
    found = {"optimizer": optimizer_call(job)}
    if job.recompute in ("selective", "layer"):
        found["recomputation"] = f'hs.checkpoint(model, "{job.recompute}")'
    if "activations" in job.offload:
        found["activations"] = "with hs.offload_activations(): around the forward pass"
    found["data parallel"] = _data_parallel(job)
    if job.tensor_parallel > 1:
        sequence = ", SequenceParallel norms" if job.sequence_parallel else ""
        found["tensor parallel"] = (
            f"torch.distributed.tensor.parallel.parallelize_module over {job.tensor_parallel} GPUs: ColwiseParallel "
            f"and RowwiseParallel linear layers{sequence}"
        )
    if job.pipeline_parallel > 1:
        found["pipeline"] = (
            f"torch.distributed.pipelining: {job.pipeline_parallel} stages, Schedule1F1B(stage, "
            f"n_microbatches={job.accumulation})"
        )
    found["batch"] = (
        f"micro-batch {job.micro_batch} x {job.data_parallel} ranks x accumulation {job.accumulation} = "
        f"{job.global_batch:,} sequences of {job.sequence:,}"
    )
    if accumulates(job):
        found["accumulation"] = accumulator_call(job)
    elif job.accumulation > 1:
        kind = "float32" if MODES[job.optimizer].gradient_bytes == 4 else "16 bits"
        by = (
            "the schedule's micro-batches"
            if job.pipeline_parallel > 1
            else f"backward() {job.accumulation} times a step"
        )
        found["accumulation"] = f"{by}: torch adds the gradients up in {kind} (hs.Accumulator takes no such parameters)"
    if job.precision == "fp16":
        found["loss scaling"] = "hs.LossScaler()"
    if job.attention == "fused":
        found["attention"] = "hs.attention, torch's scaled_dot_product_attention or flash-attn: scores are never stored"
    return found


def optimizer_call(job: Job) -> str:
    """The optimizer's constructor, with what sharded 16-bit parameters need in this version."""
    call = MODES[job.optimizer].settings
    split = job.zero or job.tensor_parallel > 1 or job.pipeline_parallel > 1
    if split and job.precision in ("bf16", "fp16") and call.startswith("hs."):
        # The overflow flag of shards and stages is not shared between ranks: some would skip a step and others not.
        call = call.removesuffix(")") + ", skip_nonfinite=False)"
    return call


def accumulates(job: Job) -> bool:
    """Whether hs.Accumulator adds up: pipelines do so by their schedule, and it refuses tensor-parallel parameters."""
    return job.accumulation > 1 and job.tensor_parallel == 1 and job.pipeline_parallel == 1


def accumulator_call(job: Job) -> str:
    arguments = ["optimizer", f"steps={job.accumulation}"]
    if job.precision == "fp16":
        arguments.append("scaler=scaler")
    if job.data_parallel > 1:
        arguments.append("model=model")
    if job.zero == 1:
        arguments.append('sync="last"')
    return f"hs.Accumulator({', '.join(arguments)})"


def shard_keywords(job: Job) -> list[str]:
    """FSDP2's keywords: ZeRO 3 gathers parameters again for backward, ZeRO 1 and 2 keep them until it is over."""
    arguments = [f"reshard_after_forward={job.zero == 3}"]
    if job.precision != "fp32":
        kind = "float16" if job.precision == "fp16" else "bfloat16"
        arguments.append(f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{kind}, reduce_dtype=torch.float32)")
    if "parameters" in job.offload:
        arguments.append("offload_policy=CPUOffloadPolicy()")
    return arguments


def _data_parallel(job: Job) -> str:
    if job.zero:
        return f"ZeRO-{job.zero}: fully_shard(each layer, then the model, {', '.join(shard_keywords(job))})"
    if job.data_parallel > 1:
        return "DistributedDataParallel(model, gradient_as_bucket_view=True)"
    return "one replica"
