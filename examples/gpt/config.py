"""A run's settings: everything that changes its numbers, so that a checkpoint can insist on equal ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

Precision = Literal["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
PRESETS: dict[str, dict[str, Any]] = {
    # width, layers and heads of the model; blocks of `context` bytes; `batch` blocks at a time, `accumulate` times
    "small": dict(width=128, layers=4, heads=4, context=128, batch=8, accumulate=1, steps=1200, lr=6e-3, warmup=60),
    "medium": dict(width=384, layers=8, heads=6, context=512, batch=16, accumulate=2, steps=5000, lr=2e-3, warmup=200),
    "large": dict(width=768, layers=12, heads=12, context=1024, batch=8, accumulate=8, steps=8000, lr=1e-3, warmup=200),
}


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    accumulate: int
    steps: int
    lr: float
    warmup: int
    precision: Precision = "bf16"
    optimizer: Literal["halfstep", "torch"] = "halfstep"
    master: Literal["auto", "fp32", "split", "none"] = "auto"
    clip: float = 1.0  # largest global gradient norm; 0 = no clipping
    weight_decay: float = 0.1  # on matrices only
    on_overflow: Literal["retry", "skip"] = "retry"
    init_scale: float = 2.0**16
    growth_interval: int = 200
    seed: int = 0
    matmul: Literal["auto", "native", "upcast"] = "auto"
    attention: Literal["halfstep", "sdpa"] = "sdpa"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"expected a width of heads x an even number, got {self.width} over {self.heads} heads")
        if self.optimizer == "torch" and self.master == "split":
            raise ValueError("--master split is halfstep's; use --optimizer halfstep, or --master fp32 with torch")
        if self.optimizer == "torch" and self.master == "none" and self.precision == "fp16":
            raise ValueError(
                "torch's GradScaler refuses float16 gradients without a float32 master copy; use --master fp32, "
                "--optimizer halfstep or --precision bf16"
            )

    @property
    def weight_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def matmul_dtype(self) -> torch.dtype:
        """What the matrices are multiplied in: the weights' dtype, or autocast's."""
        return {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(self.precision, self.weight_dtype)

    @property
    def scaled(self) -> bool:
        """Whether gradients need a loss scale: float16 ends at 6e-8 and 65,504, bfloat16 has float32's range."""
        return self.matmul_dtype == torch.float16

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context * self.accumulate

    def learning_rate(self, step: int) -> float:
        """Linear warmup, then a cosine down to a tenth; `step` counts updates, so a skipped one does not advance it."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
