"""transformers' models as jobs run them, under fake tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fake_steps import Run, run
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from halfstep.activations import kept, policies
from halfstep.planner.job import Job


def dtype_of(job: Job) -> torch.dtype:
    return torch.bfloat16 if job.precision == "bf16" else torch.float32


def causal_lm(config: PretrainedConfig, job: Job) -> nn.Module:
    """transformers' model as the job runs it."""
    config.use_cache = False  # pyright: ignore[reportAttributeAccessIssue]
    attention = "sdpa" if job.attention == "fused" else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype_of(job))
    model.train()
    if job.recompute != "none":
        options: dict[str, Any] = dict(use_reentrant=False)
        if job.recompute == "selective":
            options["context_fn"] = functools.partial(kept.contexts, policies.keep_products)
        # transformers 5 renames it on the way to 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(options)
    return model


def run_causal_lm(config: PretrainedConfig, job: Job) -> Run:
    return run(
        lambda: causal_lm(config, job), lambda model, ids: model(input_ids=ids, labels=ids).loss, config.vocab_size, job
    )
