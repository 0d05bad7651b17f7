"""Lightning's Trainer with halfstep's optimizer: bit for bit the plain loop, stopped and resumed as the run itself.

Lightning calls step() with the forward and backward pass as its closure. Guards: an update with gradients from before
the closure, a resumed run without its masters or moments, weights that a callback swaps and a master overwrites.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning_runs import CLIP, MARKS, STEPS, Batches, Module, built, fit, optimizer_of, outcome
from loops import assert_same_tree, loss_of, tiny_model
from torch import nn

import halfstep as hs

pytestmark = MARKS


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", FLOAT32), ("bf16-true", BFLOAT16)])
def test_automatic_optimization_is_the_plain_loop(
    precision: str, dtype: torch.dtype, accumulate: int, tmp_path: Path
) -> None:
    module = Module()
    fit(module, tmp_path, STEPS * accumulate, precision=precision, gradient_clip_val=CLIP,
        accumulate_grad_batches=accumulate)  # fmt: skip

    model = tiny_model(dtype)
    optimizer, schedule = built(model.parameters())
    norms = []
    for t in range(STEPS):
        for micro in range(t * accumulate, (t + 1) * accumulate):
            (loss_of(model, micro) / accumulate).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert max(norms) > CLIP
    assert_same_tree(outcome(module), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("32-true", {"amsgrad": True}),
    "bfloat16": ("bf16-true", {"max_grad_norm": CLIP}),
    "split": ("bf16-true", {"master": "split", "state_dtype": BFLOAT16}),
    "no master": ("bf16-true", {"master": None, "stochastic_rounding": True}),
    "autocast": ("bf16-mixed", {"max_grad_norm": CLIP}),
}


@pytest.mark.parametrize("mode", RESUMED)
def test_a_resumed_run_is_the_run(mode: str, tmp_path: Path) -> None:
    """From Lightning's own checkpoint in mid-epoch."""
    precision, options = RESUMED[mode]
    through, resumed = Module(**options), Module(**options)
    fit(through, tmp_path, precision=precision, enable_checkpointing=True, callbacks=[saver(tmp_path)])
    fit(resumed, tmp_path / "resumed", precision=precision, resume=tmp_path / "step=5.ckpt",
        enable_checkpointing=True, callbacks=[saver(tmp_path / "resumed")])  # fmt: skip
    assert not (tmp_path / "resumed" / "step=5.ckpt").exists()
    assert_same_tree(outcome(resumed), outcome(through))


def test_under_autocast_the_optimizer_clips_where_lightning_refuses(tmp_path: Path) -> None:
    """Lightning does not clip for an optimizer that can unscale, not even in bfloat16 without a scaler."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Module(), tmp_path, precision="bf16-mixed", gradient_clip_val=CLIP)

    module = Module(max_grad_norm=CLIP)
    fit(module, tmp_path, precision="bf16-mixed")
    model = tiny_model()
    optimizer, schedule = built(model.parameters(), max_grad_norm=CLIP)
    for t in range(STEPS):
        with torch.autocast("cpu", BFLOAT16, cache_enabled=False):
            loss = loss_of(model, t)
        loss.backward()
        optimizer.step()
        assert optimizer.grad_norm > CLIP
        optimizer.zero_grad()
        schedule.step()
    assert_same_tree(outcome(module), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


# ---- callbacks that reach into weights and groups --------------------------------------------------------------------
class Validated(Module):
    """Counts the validation batches; the average's weights are in the model then."""

    seen = 0

    def validation_step(self, pair: Any, index: int) -> None:
        self.seen += 1


class Ended(pl.Callback):
    """Keeps the outcome from before the averaging callback puts the average into the model for good."""

    found: dict[str, Any]

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.found = {key: {**value} for key, value in outcome(module).items()}
        self.found["model"] = {key: value.clone() for key, value in self.found["model"].items()}


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=["master", "split"])
def test_validating_averaged_weights_leaves_no_trace(options: dict[str, Any], tmp_path: Path) -> None:
    """Swapped in and out every three steps, with a checkpoint whose model is the average: the run is the plain one."""

    def run(module: Module, *callbacks: pl.Callback, **more: Any) -> dict[str, Any]:
        ended = Ended()
        fit(module, tmp_path, precision="bf16-true", callbacks=[ended, *callbacks], **more)
        return ended.found

    plain = run(Module(**options))
    validated = Validated(**options)
    shown = {"validation": Batches(1), "val_check_interval": 3, "enable_checkpointing": True}
    assert_same_tree(run(validated, EMAWeightAveraging(decay=0.5), saver(tmp_path), **shown), plain)
    assert validated.seen == STEPS // 3
    average = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert not torch.equal(average["state_dict"]["net.0.weight"], average["current_model_state"]["net.0.weight"])
    resumed = run(
        Validated(**options), EMAWeightAveraging(decay=0.5), saver(tmp_path / "resumed"),
        resume=tmp_path / "step=5.ckpt", **shown,
    )  # fmt: skip
    assert_same_tree(resumed, plain)


class Finetuned(Module):
    """The first layer is frozen until a callback adds it as a group of its own."""

    @property
    def backbone(self) -> nn.Module:
        return self.net[0]

    def on_train_start(self) -> None:
        if self.current_epoch > 1:  # Lightning leaves what was thawed before a checkpoint frozen
            self.backbone.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return hs.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, **self.options)


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=["master", "split"])
def test_a_backbone_that_is_thawed_in_mid_run(options: dict[str, Any], tmp_path: Path) -> None:
    """The callback calls add_param_group; on resume it replaces param_groups before the states are loaded."""

    def run(folder: Path, **more: Any) -> Finetuned:
        module = Finetuned(**options)
        tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)
        keeper = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        fit(module, folder, 4, precision="bf16-true", max_epochs=4, enable_checkpointing=True,
            callbacks=[tuning, keeper], **more)  # fmt: skip
        return module

    through = run(tmp_path)
    steps = [optimizer_of(through).state[layer.weight]["step"] for layer in (through.net[0], through.net[3])]
    assert steps == [12, 16]
    resumed = run(tmp_path / "resumed", resume=tmp_path / "epoch=1.ckpt")
    assert_same_tree(outcome(resumed), outcome(through))
