"""The tiny model under Lightning's Trainer, and what is left of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from loops import batch, tiny_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import halfstep as hs

STEPS, CLIP = 12, 0.25
MARKS = [
    pytest.mark.usefixtures("offline"),
    # What Lightning does itself on this torch, and its notice that a resumed run writes elsewhere.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]


class Batches:
    """The batches of steps 0 .. size - 1; a loader that a run resumes in mid-epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.start = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.start >= self.size:  # Lightning does not ask for more than there is
            self.start = 0
        while self.start < self.size:
            self.start += 1
            yield batch(self.start - 1)

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


class Module(pl.LightningModule):
    """Automatic optimization of the tiny model, with a schedule that moves lr and betas at every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = tiny_model()
        self.options = options

    def training_step(self, pair: tuple[Tensor, Tensor], index: int) -> Any:
        inputs, classes = pair
        return nn.functional.cross_entropy(self.net(inputs).float(), classes)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = built(self.parameters(), **self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def built(params: Iterable[nn.Parameter], **options: Any) -> tuple[hs.AdamW, OneCycleLR]:
    optimizer = hs.AdamW(params, lr=1e-2, **options)
    return optimizer, OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)


def fit(
    module: pl.LightningModule, folder: Path, size: int = STEPS, *, resume: Path | None = None,
    validation: Batches | None = None, **options: Any,
) -> None:  # fmt: skip
    """`size` batches an epoch; a checkpoint is loaded without pickled code."""
    given = {"max_epochs": 1, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder, **given,
    )  # fmt: skip
    trainer.fit(module, Batches(size), validation, ckpt_path=resume, weights_only=True)


def optimizer_of(module: pl.LightningModule) -> hs.AdamW:
    (optimizer,) = module.trainer.optimizers
    assert type(optimizer) is hs.AdamW
    return optimizer


def outcome(module: Any) -> dict[str, Any]:
    return {"model": module.net.state_dict(), "optimizer": optimizer_of(module).state_dict()}
