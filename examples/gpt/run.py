"""One training run: a model, its optimizer and loss scaler, and the history that travels with them in checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep as hs

from . import accumulation, checkpoint, data, matmul, optimizers, report
from .config import Config
from .memory import KEEP_ALL, Memory
from .model import GPT

EVALUATED_AT_ONCE = 16  # windows of the validation text


@dataclass
class History:
    """What has happened so far."""

    updates: int = 0
    batches: int = 0  # taken from the text: more than updates x accumulate where an overflow skipped its batches
    skipped: int = 0
    overflows: int = 0  # skipped in a row, up to now
    grown: int = 0  # times the loss scale grew
    seconds: float = 0.0  # spent training, over all resumed parts
    losses: list[float] = field(default_factory=list)  # one per update
    validation: list[tuple[int, float]] = field(default_factory=list)  # (updates, loss)
    phases: list[dict[str, float]] = field(default_factory=list)  # seconds, one entry per step


class Run:
    """Everything that a training step touches, made from a Config alone: equal settings start with equal bits."""

    def __init__(self, config: Config, memory: Memory = KEEP_ALL):
        torch.manual_seed(config.seed)
        self.memory = memory
        self.device = torch.device(config.device)
        self.matmul = matmul.choose(self.device, config.matmul_dtype, config.matmul, config.attention)
        self.config = replace(config, matmul=self.matmul.kind)  # a resumed run must multiply as the first part did
        model = GPT(data.VOCABULARY, config.width, config.layers, config.heads, self.matmul)
        self.model = model.to(self.device, config.weight_dtype)
        self.recomputation, self.around_forward = memory.apply(self.model), memory.around_forward()
        self.optimizer, self.scaler = optimizers.build(self.config, self.model)
        self.accumulation = accumulation.build(self.config, self.optimizer, self.scaler)
        self.history = History()
        self.clock = report.Clock(self.device, self.history.phases)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def autocast(self) -> AbstractContextManager:
        if not self.config.precision.startswith("amp"):
            return nullcontext()
        return torch.autocast(self.device.type, self.config.matmul_dtype)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, in nats per token, as a training step computes it."""
        with self.autocast(), self.around_forward:
            return self.model(inputs, targets)

    def measure_activations(self, text: data.Text) -> hs.measure_activations:
        """What the forward of one batch keeps for its backward. The model stays as it is."""
        batch = text.batch(self.config.seed, 0, self.config.batch, self.config.context)
        inputs, targets = (tokens.to(self.device) for tokens in batch)
        self.loss(inputs, targets)  # in which a byte budget makes its plan
        with hs.measure_activations() as self.activations:
            _loss = self.loss(inputs, targets)  # holds on to its graph
        return self.activations

    @torch.no_grad()
    def evaluate(self, text: data.Text, positions: Tensor) -> float:
        """Mean loss, in nats per byte, over the windows of the validation text at `positions`."""
        total = 0.0
        for part in positions.split(EVALUATED_AT_ONCE):
            window = text.validation[part].to(self.device, torch.int64)
            with self.autocast():
                total += self.model(window[:, :-1], window[:, 1:]).item() * len(part)
        return total / len(positions)

    def save(self, path: Path) -> None:
        state = {
            "config": asdict(self.config),
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "accumulation": self.accumulation.state_dict(),
            # nothing here draws after the start; dropout, if you add it, will
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        checkpoint.save(path, state)

    @classmethod
    def resume(cls, path: Path, config: Config, memory: Memory = KEEP_ALL) -> Run:
        state = checkpoint.load(path, config)
        run = cls(Config(**state["config"]), memory)
        run.model.load_state_dict(state["model"])  # before the optimizer: masters must belong to their weights
        run.optimizer.load_state_dict(state["optimizer"])
        run.scaler.load_state_dict(state["scaler"])
        run.accumulation.load_state_dict(state["accumulation"])
        run.history = History(**state["history"])
        run.clock.steps = run.history.phases
        torch.set_rng_state(state["random"].cpu())
        if state["cuda_random"]:
            torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda_random"]])
        return run

    def result(self) -> dict[str, Any]:
        """This run's column of the table and its part of the JSON."""
        return {
            "steps": self.history.updates,
            "val_loss": self.history.validation[-1][1],
            "seconds_per_step": self.clock.medians(),
            "bytes_per_parameter": optimizers.bytes_by_part(
                self.model, self.optimizer, summed=isinstance(self.accumulation, hs.Accumulator)
            ),
        }
