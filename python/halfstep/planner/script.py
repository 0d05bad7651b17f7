"""A training script for a plan, ready to edit: it calls only what halfstep, torch and transformers have."""

from __future__ import annotations

from typing import Any

from .job import Job
from .model import ModelShape
from .result import Measured
from .search import NO_MASTER
from .settings import accumulates, accumulator_call, optimizer_call, shard_keywords

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "amp-bf16": "float32"}


def script(model: ModelShape | Measured, job: Job) -> str:
    """Python source of a training loop on random tokens, for torchrun (or plain python on one GPU).

    Raises:
        ValueError: no script for it in this version: pipeline stages, tensor parallelism, adapters or frozen parts, and
            shapes that are of no transformers model.
    """
    if not isinstance(model, ModelShape):
        raise ValueError(
            f"script: model={model.name!r} was measured: expected a preset or a transformers configuration"
        )
    if job.pipeline_parallel > 1 or job.tensor_parallel > 1:
        raise ValueError(
            f"script: tensor_parallel={job.tensor_parallel}, pipeline_parallel={job.pipeline_parallel}: expected 1, 1; "
            "how to split a model over GPUs depends on its modules. The plan's settings name the calls"
        )
    if model.lora_rank or model.frozen:
        raise ValueError(f"script: lora_rank={model.lora_rank}, frozen={sorted(model.frozen)}: expected 0 and none")
    parts = [_head(model, job), _model(model, job), _training(job), _main(job)]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _head(model: ModelShape, job: Job) -> str:
    imports = (
        ["import os", "", "import torch", "import torch.distributed as dist"] if distributed(job) else ["import torch"]
    )
    if job.zero:
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        names = ["MixedPrecisionPolicy"] if job.precision != "fp32" else []
        names += ["CPUOffloadPolicy"] if "parameters" in job.offload else []
        imports.append(f"from torch.distributed.fsdp import {', '.join(sorted([*names, 'fully_shard']))}")
        if splits_experts(model, job):
            imports.append("from torch.distributed.tensor import Shard")
    elif job.data_parallel > 1:
        imports.append("from torch.nn.parallel import DistributedDataParallel")
    kind, _ = transformers_model(model, job.sequence)
    imports += [f"from transformers import {kind}Config, {_causal_lm(kind)}", "", "import halfstep as hs"]
    start = f"torchrun --nproc-per-node {min(job.gpus, 8)} train.py" if distributed(job) else "python train.py"
    note = "\nOn several nodes add torchrun's --nnodes and --rdzv-endpoint." if job.gpus > 8 else ""
    return f'''
"""Trains {model.name} as planned for {job.gpus} GPU{"s" if job.gpus > 1 else ""}: {start}{note}

Random tokens stand in for the data. Set the learning rate, its schedule and the number of steps.
"""

{chr(10).join(imports)}

VOCABULARY = {model.vocabulary}
SEQUENCE = {job.sequence}
MICRO_BATCH = {job.micro_batch}  # sequences at a time on one GPU
ACCUMULATION = {job.accumulation}  # micro-batches for one step
STEPS = 10
LEARNING_RATE = 3e-4

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
'''


def _model(model: ModelShape, job: Job) -> str:
    kind, arguments = transformers_model(model, job.sequence)
    config = ",\n        ".join(f"{name}={value!r}" for name, value in arguments.items())
    implementation = "sdpa" if job.attention == "fused" else "eager"
    layers = "model.transformer.h" if kind == "GPT2" else "model.model.layers"
    lines = [
        f"config = {kind}Config(\n        {config},\n    )",
        f'build = dict(dtype=torch.{_DTYPES[job.precision]}, attn_implementation="{implementation}")',
    ]
    if job.zero:
        offload = "parameters" in job.offload
        keywords = ["mesh=mesh", *shard_keywords(job)]
        if splits_experts(model, job):  # all experts are one tensor, whose first dimension is too short for the ranks
            keywords.append("shard_placement_fn=lambda weight: Shard(1) if weight.ndim == 3 else None")
        sharding = "".join(f"\n        {keyword}," for keyword in keywords)
        sharding = sharding.replace("CPUOffloadPolicy()", 'CPUOffloadPolicy(pin_memory=device.type == "cuda")')
        lines += [
            'with torch.device("meta"):  # no memory before it is sharded',
            f"    model = {_causal_lm(kind)}._from_config(config, **build)",
            "mesh = init_device_mesh(device.type, (dist.get_world_size(),))",
            f"sharding = dict({sharding}\n    )",
            f"for layer in {layers}:",
            "    fully_shard(layer, **sharding)",
            "fully_shard(model, **sharding)",
            f"model.to_empty(device={'torch.device(' + repr('cpu') + ')' if offload else 'device'})",
            "model.init_weights()",
        ]
        if offload:
            lines.append("for buffer in model.buffers():  # of what is offloaded, parameters alone\n"
                         "        buffer.data = buffer.to(device)")  # fmt: skip
    else:
        lines.append(f"model = {_causal_lm(kind)}._from_config(config, **build).to(device)")
    lines.append("model.train()")
    if job.recompute in ("selective", "layer"):
        lines.append(f'hs.checkpoint(model, "{job.recompute}")')
    if job.data_parallel > 1 and not job.zero:
        lines.append("model = DistributedDataParallel(model, gradient_as_bucket_view=True)")
    lines.append("return model")
    return "def build_model() -> torch.nn.Module:\n    " + "\n    ".join(lines)


def _training(job: Job) -> str:
    optimizer = optimizer_call(job).replace("(params", "(model.parameters(), lr=LEARNING_RATE")
    setup = [f"optimizer = {optimizer}"]
    if job.precision == "fp16":
        setup.append("scaler = hs.LossScaler(device=device)")
    loss = ["tokens = next_tokens()"]
    forward = "loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss"
    contexts = ["hs.offload_activations()"] if "activations" in job.offload else []
    if job.precision == "amp-bf16" and not job.zero:
        contexts.append("torch.autocast(device.type, dtype=torch.bfloat16)")
    loss += [f"with {', '.join(contexts)}:", f"    {forward}"] if contexts else [forward]
    if accumulates(job):
        setup.append(
            f"accumulator = {accumulator_call(job)}".replace(f"steps={job.accumulation}", "steps=ACCUMULATION")
        )
        # The loss is the mean over all tokens of a sequence but the first, which nothing predicts.
        body = ["for _ in range(ACCUMULATION):", *(f"    {line}" for line in loss)]
        body += ["    accumulator.backward(loss, tokens=tokens[:, 1:].numel())", "accumulator.step()"]
        shown = "accumulator.loss"
    else:
        scaled = "scaler.scale(loss)" if job.precision == "fp16" else "loss"
        step = ["scaler.step(optimizer)", "scaler.update()"] if job.precision == "fp16" else ["optimizer.step()"]
        body = [*loss, f"{scaled}.backward()", *step, "optimizer.zero_grad()"]
        shown = "loss"
    indented = [f"    {line}" for line in body]
    return "\n    ".join(
        [
            "def next_tokens() -> torch.Tensor:",
            "return torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), device=device)",
        ]
    ) + "\n\n\n" + "\n    ".join(
        ["def train(model: torch.nn.Module) -> float:", *setup, "for step in range(STEPS):", *indented,
         *_print(job, shown), f"return {shown}.item()"]
    )  # fmt: skip


_MAIN = """
if __name__ == "__main__":
    train(build_model())
"""


def _print(job: Job, loss: str) -> list[str]:
    line = f'print(f"step {{step}}: loss {{{loss}.item():.4f}}", flush=True)'
    return ["    if dist.get_rank() == 0:", f"        {line}"] if distributed(job) else [f"    {line}"]


def _main(job: Job) -> str:
    if not distributed(job):
        return _MAIN
    # Gradients that are offloaded are summed up and reduced on the host.
    backend = "cpu:gloo,cuda:nccl" if "parameters" in job.offload else "nccl"
    return _MAIN_DISTRIBUTED.replace('"nccl"', f'"{backend}"')


_MAIN_DISTRIBUTED = """
def main() -> float:
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return train(build_model())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def distributed(job: Job) -> bool:
    """Whether there are process groups: FSDP2 needs one even for a single GPU, whose states it then offloads."""
    return job.gpus > 1 or job.zero > 0


def splits_experts(model: ModelShape, job: Job) -> bool:
    """Whether FSDP2 has to cut each expert; stochastic rounding of weights needs the first dimension cut."""
    return bool(model.experts) and job.zero > 0 and job.data_parallel > model.experts and job.optimizer not in NO_MASTER


# ---- transformers ----------------------------------------------------------------------------------------------------
def _causal_lm(kind: str) -> str:
    return "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def transformers_model(model: ModelShape, sequence: int) -> tuple[str, dict[str, Any]]:
    """(family, arguments of its Config) of the transformers model that has this shape."""
    if model.embedding_rank:
        raise ValueError(
            f"script: embedding_rank={model.embedding_rank}: expected 0; no transformers decoder factorises it"
        )
    if model.positions and model.norm == "layer":
        return "GPT2", dict(
            vocab_size=model.vocabulary, n_positions=model.positions, n_embd=model.hidden,
            n_layer=model.layers, n_head=model.heads, n_inner=model.ffn, activation_function=model.activation,
            resid_pdrop=model.dropout, embd_pdrop=model.dropout, attn_pdrop=model.dropout,
            tie_word_embeddings=model.tied,
        )  # fmt: skip
    if model.norm != "rms" or not model.gated or model.positions:
        raise ValueError(
            f"script: norm={model.norm!r}, gated={model.gated}, positions={model.positions}: expected a Llama's shape "
            "(rms, True, 0) or a GPT-2's"
        )
    arguments: dict[str, Any] = dict(
        vocab_size=model.vocabulary, hidden_size=model.hidden, intermediate_size=model.ffn,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, max_position_embeddings=sequence, hidden_act=model.activation,
        tie_word_embeddings=model.tied,
    )  # fmt: skip
    if model.experts:
        arguments |= dict(num_local_experts=model.experts, num_experts_per_tok=model.experts_per_token)
        return "Mixtral", arguments | dict(sliding_window=model.window or None)
    if model.qk_norm:
        return "Qwen3", arguments | dict(attention_bias=model.qkv_bias)
    if model.qkv_bias:
        del arguments["head_dim"]
        return "Qwen2", arguments
    if model.window:
        return "Mistral", arguments | dict(sliding_window=model.window)
    return "Llama", arguments
