"""Several batches to an update, two ways behind one interface: halfstep's accumulator, and what one writes by hand.

Used as
    accumulation.backward(loss, tokens) for each batch; skipped = accumulation.step(); accumulation.loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import halfstep as hs

from .config import Config


def build(config: Config, optimizer: Any, scaler: Any) -> Any:
    """hs.Accumulator where there is something to add up and halfstep does it: its float32 sums cost memory."""
    if config.optimizer == "halfstep" and config.accumulate > 1:
        return hs.Accumulator(optimizer, config.accumulate, scaler=scaler)
    return ByHand(optimizer, scaler, config.accumulate)


class ByHand:
    """The mean of the batches' means, right since they are of one size; autograd adds the gradients up in the weights'
    dtype, where a 16-bit sum of many loses the last ones."""

    def __init__(self, optimizer: Any, scaler: Any, steps: int):
        self.optimizer, self.scaler, self.steps = optimizer, scaler, steps
        self.loss = torch.tensor(0.0)
        self.batches = 0

    def backward(self, loss: Tensor, tokens: int) -> None:
        if not self.batches:
            self.optimizer.zero_grad()
        part = loss / self.steps
        self.scaler.scale(part).backward()
        self.loss = part.detach() + (self.loss if self.batches else 0)
        self.batches += 1

    def step(self) -> Tensor:
        """Unscales, clips, updates masters and moments, rounds to the weights; returns whether it was skipped."""
        skipped = self.scaler.step(self.optimizer)
        self.scaler.update()
        self.batches = 0
        return skipped

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
