"""Bytes per parameter of each way to keep weights, gradients, masters and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .model import Weight

# int8 states: one float32 scale for each block of 128 elements.
INT8_STATE_BYTES = 1 + 4 / 128


@dataclass(frozen=True)
class Mode:
    """One optimizer mode. Bytes are for each trainable parameter; a frozen one has its weight alone."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int  # a float32 master, or the 16-bit remainder of a split one
    state_bytes: float  # m and v; 0 for factored states, which depend on the shapes
    settings: str  # what to write
    available: bool = True
    reason: str = ""  # why it is not available
    factored: bool = False  # one row and one column of second moments for each matrix

    @property
    def bytes_per_parameter(self) -> float:
        """Weight, gradient, master and states (the factored ones, about 0.01, left out)."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.state_bytes

    @property
    def rounds_stochastically(self) -> bool:
        """16-bit weights of hs.AdamW with nothing beside them that keeps their low bits."""
        return self.weight_bytes == 2 and self.master_bytes == 0 and not self.factored


_NO_INT8 = "block-quantised int8 states are not available in this version"
_BF16 = "state_dtype=torch.bfloat16"
MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("master", 2, 2, 4, 8, 'hs.AdamW(params, master="fp32")'),
        Mode("split", 2, 2, 2, 8, 'hs.AdamW(params, master="split")'),
        Mode("master-bf16-states", 2, 2, 4, 4, f'hs.AdamW(params, master="fp32", {_BF16})'),
        Mode("split-bf16-states", 2, 2, 2, 4, f'hs.AdamW(params, master="split", {_BF16})'),
        Mode("weights-fp32-states", 2, 2, 0, 8, "hs.AdamW(params, master=None, stochastic_rounding=True)"),
        Mode("weights-bf16-states", 2, 2, 0, 4, f"hs.AdamW(params, master=None, stochastic_rounding=True, {_BF16})"),
        Mode("split-int8-states", 2, 2, 2, 2 * INT8_STATE_BYTES, 'hs.AdamW(params, master="split", state_dtype="int8")',
             available=False, reason=_NO_INT8),
        Mode("weights-int8-states", 2, 2, 0, 2 * INT8_STATE_BYTES, 'hs.AdamW(params, master=None, state_dtype="int8")',
             available=False, reason=_NO_INT8),
        Mode("adafactor", 2, 2, 0, 0, "torch.optim.Adafactor(params)", factored=True),
        Mode("fp32", 4, 4, 0, 8, "hs.AdamW(params)"),
    )
}  # fmt: skip


def suits(optimizer: str, precision: str) -> bool:
    """Whether the mode's weights have the precision's type; a split master is a bfloat16 and the rest of a float32."""
    float32 = precision in ("fp32", "amp-bf16")
    return (MODES[optimizer].weight_bytes == 4) == float32 and not (
        precision == "fp16" and optimizer.startswith("split")
    )


def factored_state_elements(weights: Iterable[Weight]) -> int:
    """Second moments of Adafactor: rows + columns of a matrix, every element of a vector (Shazeer & Stern, "Adafactor",
    ICML 2018, section 3); there are no first moments."""
    trained = (w for w in weights if w.trainable)
    return sum(w.copies * (w.shape[0] + w.matrices * w.shape[1] if len(w.shape) == 2 else w.elements) for w in trained)
