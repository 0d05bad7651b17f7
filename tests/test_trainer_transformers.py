"""transformers.Trainer with halfstep's optimizer on tiny random language models: as a plain loop, resumed as one run.

The Trainer makes two groups (with and without weight decay), wraps the optimizer with accelerate, clips the gradients
itself and saves model, optimizer and schedule apart. Guards: masters that do not survive its checkpoint, the tied
embedding of GPT-2 counted twice, a group that loses its weight decay, a norm that is taken of something else.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, generator
from loops import assert_same_tree
from optimizer_runs import assert_as_good_as, assert_same, held
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import halfstep as hs

STEPS, ACCUMULATE, LENGTH, VOCABULARY, LR, CLIP = 8, 2, 12, 61, 1e-2, 0.5
pytestmark = pytest.mark.usefixtures("offline", "fresh_accelerate")


class Sequences(Dataset):
    """Sequence t of length LENGTH repeats three random tokens."""

    def __len__(self) -> int:
        return 2 * ACCUMULATE * STEPS

    def __getitem__(self, t: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (3,), generator=generator(t)).repeat(LENGTH // 3)
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def fresh(architecture: Any, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return architecture().to(dtype)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=STEPS, learning_rate=LR,
        per_device_train_batch_size=2, gradient_accumulation_steps=ACCUMULATE, weight_decay=0.1,
        lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1, save_steps=3, seed=1,
        **{"max_grad_norm": CLIP, **options},
    )  # fmt: skip


def trained(model: nn.Module, args: TrainingArguments, resume: str | None = None, **options: Any) -> Trainer:
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dict(trainer.model.named_parameters()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "log": [{k: v for k, v in entry.items() if k in ("loss", "grad_norm", "learning_rate")}
                for entry in trainer.state.log_history if "loss" in entry],
    }  # fmt: skip


MODES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "float32": (FLOAT32, {}, {}),
    "autocast": (FLOAT32, {}, {"bf16": True}),
    "bfloat16": (BFLOAT16, {}, {}),
    "split": (BFLOAT16, {"master": "split", "state_dtype": BFLOAT16}, {}),
    "no master": (BFLOAT16, {"master": None, "stochastic_rounding": True}, {}),
}


@pytest.mark.parametrize("architecture", [gpt2, llama])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_the_run(architecture: Any, mode: str, tmp_path: Path) -> None:
    dtype, options, more = MODES[mode]
    given = {"optimizer_cls_and_kwargs": (hs.AdamW, {"lr": LR, **options})}
    through = trained(fresh(architecture, dtype), arguments(tmp_path / "through", **more), **given)
    stopped = tmp_path / "through" / "checkpoint-3"
    resumed = trained(
        fresh(architecture, dtype), arguments(tmp_path / "resumed", **more), resume=str(stopped), **given
    )  # fmt: skip
    assert not (tmp_path / "resumed" / "checkpoint-3").exists()
    assert type(resumed.optimizer.optimizer) is hs.AdamW
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.1, 0.0]
    assert_same_tree(outcome(resumed), outcome(through))


class Norms(TrainerCallback):
    """What the optimizer found each gradient's norm to be, before it clipped."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.found.append(float(optimizer.optimizer.grad_norm))


@pytest.mark.parametrize("architecture", [gpt2, llama])
@pytest.mark.parametrize("clips", ["the Trainer", "the optimizer"])
def test_rates_norms_and_weights_are_torchs(architecture: Any, clips: str, tmp_path: Path) -> None:
    """float32 errs as with torch's AdamW clipped by the Trainer, against float64."""

    def run(dtype: torch.dtype, cls: Any, clip: float = CLIP, **options: Any) -> tuple[Trainer, Tensor]:
        """The run, and the norms that whoever clipped has found."""
        seen, args = Norms(), arguments(tmp_path, max_grad_norm=clip, save_strategy="no")
        given = {"optimizer_cls_and_kwargs": (cls, {"lr": LR, **options}), "callbacks": [seen] if clip == 0 else []}
        trainer = trained(fresh(architecture, dtype), args, **given)
        found = seen.found or [entry["grad_norm"] for entry in outcome(trainer)["log"]]
        return trainer, torch.tensor(found, dtype=torch.float64)

    own = {} if clips == "the Trainer" else {"clip": 0.0, "max_grad_norm": CLIP}
    (ours, mine), (naive, theirs), (exact, truth) = (
        run(FLOAT32, hs.AdamW, **own),
        run(FLOAT32, torch.optim.AdamW, foreach=False),
        run(torch.float64, torch.optim.AdamW, foreach=False),
    )
    assert_as_good_as(*(list(trainer.model.parameters()) for trainer in (ours, naive, exact)))
    assert_as_good_as([mine], [theirs], [truth])
    assert truth.max() > CLIP
    rates = [[entry["learning_rate"] for entry in outcome(trainer)["log"]] for trainer in (ours, naive)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == STEPS - 1  # the way up and the way down share one


class Shadow(TrainerCallback):
    """A second optimizer that gets the gradients of every step, in a plain loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer, self.schedule = built(self.model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        self.optimizer.step()
        self.schedule.step()


def built(model: nn.Module) -> tuple[hs.AdamW, LambdaLR]:
    optimizer = hs.AdamW(model.named_parameters(), lr=LR, max_grad_norm=CLIP / 2)
    return optimizer, LambdaLR(optimizer, lambda step: 0.8**step)


def test_an_optimizer_and_schedule_of_ones_own(tmp_path: Path) -> None:
    """Given with named parameters: every step is the optimizer's own, under the Trainer's clipping and schedule."""
    model = fresh(gpt2, BFLOAT16)
    shadow = Shadow(model)
    trainer = trained(model, arguments(tmp_path, save_strategy="no"), optimizers=built(model), callbacks=[shadow])
    optimizer = trainer.optimizer.optimizer
    assert optimizer.grad_norm > CLIP / 2
    assert optimizer.state[model.lm_head.weight]["step"] == STEPS
    assert_same(held(optimizer), held(shadow.optimizer))
    assert_same_tree(optimizer.state_dict(), shadow.optimizer.state_dict())
