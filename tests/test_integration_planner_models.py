"""Estimates against training steps that were run: transformers' models under fake tensors, to the byte."""

from __future__ import annotations

import dataclasses
import random
import secrets
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_steps import LOSS, Run, fake
from planner_runs import causal_lm, run_causal_lm
from torch import nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import halfstep as hs
from halfstep.planner.job import Job
from halfstep.planner.memory import Allowance, Estimate, estimate, kept_activations
from halfstep.planner.presets import PRESETS, from_config

pytestmark = pytest.mark.xdist_group("planner oracles")

TENSORS = Allowance(0, 0, 0.0)
# torch.optim.AdamW on 16-bit weights: states of their dtype. Fake tensors make a mask that a real run can do without.
FAKE: dict[str, Any] = dict(
    optimizer="weights-bf16-states", attention_mask=True, device="cpu", step="for-loop", micro_batch=2, sequence=96
)
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1000, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
NO_DROPOUT = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
TINY_GPT2: dict[str, Any] = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**{**SMALL, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(**TINY_GPT2, **NO_DROPOUT),
}
# Other code in the same places, with attention written out: on the CPU torch has no fused one that drops out.
VARIANTS: dict[str, PretrainedConfig] = {
    "dropout": GPT2Config(**TINY_GPT2),
    "gelu": GPT2Config(**TINY_GPT2, **NO_DROPOUT, activation_function="gelu_pytorch_tanh"),
    "relu": GPT2Config(**TINY_GPT2, **NO_DROPOUT, activation_function="relu"),
}


def planned(config: PretrainedConfig, job: Job) -> Estimate:
    return estimate(from_config(config), job, TENSORS)


def during(found: Estimate, *phases: str) -> int:
    return max(found.totals[phase] for phase in phases)


def agree(run: Run, config: PretrainedConfig, job: Job, peaks: float = 0.005) -> None:
    """Counts and bytes exactly; peaks within a fraction."""
    model, found = from_config(config), planned(config, job)
    copies = found.parts.get("autocast_copies", 0)
    assert run.parameters == model.parameters
    assert run.activations == kept_activations(model, job) + copies
    assert run.gradients == found.parts["gradients"]
    assert run.states == found.parts["optimizer_states"]
    assert during(found, "forward", "loss", "backward") == pytest.approx(run.peak, rel=peaks)
    assert during(found, "step") == pytest.approx(run.step_peak, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        *((kind, "none") for kind in CONFIGS),
        ("llama", "layer"), ("gpt2", "layer"), ("mixtral", "layer"), ("qwen3", "selective"), ("gpt2", "selective"),
    ],
)  # fmt: skip
def test_models_of_transformers(kind: str, recompute: str) -> None:
    job = Job(**FAKE, recompute=recompute)
    agree(run_causal_lm(CONFIGS[kind], job), CONFIGS[kind], job)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", *VARIANTS])
def test_matrices_of_scores(kind: str) -> None:
    config, job = {**CONFIGS, **VARIANTS}[kind], Job(**FAKE, attention="eager")
    agree(run_causal_lm(config, job), config, job)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_float32_weights(kind: str, precision: str) -> None:
    job = Job(**{**FAKE, "optimizer": "fp32"}, precision=precision)
    agree(run_causal_lm(CONFIGS[kind], job), CONFIGS[kind], job)


def test_accumulation_adds_gradients_to_the_peak() -> None:
    """With two micro-batches the gradients of the first are there while the second goes forward."""
    config = LlamaConfig(**{**SMALL, "intermediate_size": 400, "vocab_size": 400})
    once, twice = Job(**FAKE), Job(**FAKE, accumulation=2)
    agree(run_causal_lm(config, once), config, once)
    agree(run_causal_lm(config, twice), config, twice)
    more = during(planned(config, twice), "loss") - during(planned(config, once), "loss")
    assert more == 2 * from_config(config).parameters


def test_a_layer_that_rises_above_the_loss() -> None:
    """A small vocabulary: the highest moment is in the backward of a norm."""
    sizes = dict(hidden_size=128, intermediate_size=96, num_attention_heads=8, vocab_size=110, num_hidden_layers=1)
    config, job = LlamaConfig(**{**SMALL, **sizes}), Job(**{**FAKE, "micro_batch": 3}, recompute="layer")
    agree(run_causal_lm(config, job), config, job)
    assert planned(config, job).peak_phase == "backward"


def drawn(seed: int) -> tuple[PretrainedConfig, Job]:
    draw = random.Random(seed)
    heads, head_dim = draw.choice([2, 4, 8]), draw.choice([8, 16, 24])
    kv_heads = draw.choice([k for k in (1, 2, 4, 8) if heads % k == 0])
    sizes: dict[str, Any] = dict(
        hidden_size=heads * head_dim, intermediate_size=8 * draw.randint(2, 40), num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=draw.randint(50, 2000),
    )  # fmt: skip
    changes: dict[str, Any] = dict(
        micro_batch=draw.randint(1, 4), sequence=draw.randint(8, 200), attention=draw.choice(["fused", "eager"]),
        recompute=draw.choice(["none", "layer", "selective"]),
    )  # fmt: skip
    return LlamaConfig(**{**SMALL, **sizes}), Job(**{**FAKE, **changes})


@pytest.mark.parametrize("number", range(5))
def test_drawn_models(number: int) -> None:
    """Nothing is fitted to the sizes of the other tests: new ones every time."""
    seed = secrets.randbelow(2**32)
    print(f"drawn({seed})")  # for whoever has to look at a failure
    config, job = drawn(seed)
    agree(run_causal_lm(config, job), config, job, peaks=0.02)


# What MemTracker saw of one step at s = 2048, b = 1, in bytes (torch 2.13, transformers 5.24): activations after
# forward, peak of forward and backward, peak of the step.
MEASURED = {
    ("llama-7b", "none"): (12_821_487_632, 53_924_120_212, 54_431_639_184),
    ("llama-7b", "layer"): (871_407_632, 53_924_120_212, 54_431_639_184),
    ("tinyllama-1.1b", "none"): (4_731_559_952, 11_856_139_308, 9_062_552_616),
    ("tinyllama-1.1b", "layer"): (485_007_376, 8_873_567_276, 9_062_552_616),
}


@pytest.mark.parametrize(("name", "recompute"), MEASURED)
def test_whole_models_as_they_were_measured(name: str, recompute: str) -> None:
    job = Job(**{**FAKE, "micro_batch": 1, "sequence": 2048}, recompute=recompute)
    found = estimate(PRESETS[name], job, TENSORS)
    activations, peak, step = MEASURED[name, recompute]
    assert activations - LOSS == kept_activations(PRESETS[name], job)
    assert during(found, "forward", "loss", "backward") == pytest.approx(peak, rel=0.002)
    assert during(found, "step") == pytest.approx(step, rel=0.002)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_layers_of_llama_7b(layers: int, recompute: str) -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32, vocab_size=32000
    )
    job = Job(**{**FAKE, "micro_batch": 1, "sequence": 2048}, recompute=recompute)
    agree(run_causal_lm(config, job), config, job)


def test_saved_bytes_of_a_real_run() -> None:
    """On the CPU, with numbers: what autograd saves, every storage once. There is no mask."""
    job = Job(**{**FAKE, "attention_mask": False, "sequence": 40, "optimizer": "fp32"}, precision="fp32")
    config = CONFIGS["llama"]
    model = causal_lm(config, job)
    ids = torch.randint(0, 1000, (job.micro_batch, job.sequence))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.isfinite()
    # The ids are saved by the embedding.
    assert sum(saved.values()) - ids.nbytes == kept_activations(from_config(config), job)


class Adapted(nn.Module):
    """A frozen product with a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(rank, base.in_features, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_adapters_beside_frozen_weights(targets: str) -> None:
    """Gradients of activations go through all of it, those of weights are the adapters' alone."""
    config, job = CONFIGS["llama"], Job(**FAKE, recompute="layer")
    shape = dataclasses.replace(from_config(config), lora_rank=8, lora_targets=targets)
    with fake():
        model = causal_lm(config, job).requires_grad_(False)
        model.enable_input_require_grads()  # type: ignore[operator]
        for parent in [m for m in model.modules() if type(m).__name__ in ("LlamaAttention", "LlamaMLP")]:
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and (targets == "all" or "Attention" in type(parent).__name__):
                    setattr(parent, name, Adapted(child, 8))
        ids = torch.randint(0, config.vocab_size, (job.micro_batch, job.sequence))
        with hs.measure_activations() as measured:
            loss = model(input_ids=ids, labels=ids).loss
            kept = measured.bytes - LOSS
            loss.backward()
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        assert shape.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = estimate(shape, job, TENSORS)
    there = found.parts["parameters"] + found.parts["optimizer_states"] + found.parts["inputs"]
    assert kept == kept_activations(shape, job)
    assert during(found, "forward", "loss", "backward") - there == pytest.approx(measured.peak, rel=0.005)


def test_a_step_through_all_tensors_at_once() -> None:
    """foreach's temporaries: as much as the weights."""
    config = CONFIGS["llama"]
    job = Job(**{**FAKE, "step": "foreach"})
    run = run_causal_lm(config, job)
    found = planned(config, job)
    assert during(found, "step") == pytest.approx(run.step_peak, rel=0.02)
    assert found.phases["step"]["temporaries"] == 2 * run.parameters


def test_what_is_measured_depends_on_the_job() -> None:
    """Guards the comparison itself: another micro-batch, recomputation or precision is seen."""
    config = CONFIGS["llama"]
    kept = {
        kept_activations(from_config(config), dataclasses.replace(Job(**FAKE), **change))
        for change in (dict(), dict(micro_batch=3), dict(recompute="layer"), dict(attention="eager"))
    }
    assert len(kept) == 4
