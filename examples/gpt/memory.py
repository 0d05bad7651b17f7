"""What is done about activations, the tensors that forward keeps for backward: recompute them, or move them away.

Neither changes a bit of the run, so these settings are not part of its Config and a resumed run may choose anew.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

import halfstep as hs

POLICIES = ("none", "layer", "selective")
# Tensors from here on move to the host, and so many bytes of the last ones stay: these models are small, and with
# halfstep's defaults nothing would move.
MOVED_BYTES = 2**16


@dataclass(frozen=True)
class Memory:
    """`recompute`: "none", "layer", "selective", or the bytes that the blocks may keep, as "3MB"; `offload`: whether
    what they keep waits in the host's memory."""

    recompute: str = "none"
    offload: bool = False

    def __post_init__(self) -> None:
        self.policy()  # a mistake in it is found before the run

    def policy(self) -> Any:
        """As hs.checkpoint takes it: a name, a budget, or None."""
        if self.recompute in POLICIES:
            return None if self.recompute == "none" else self.recompute
        try:
            return hs.ByteBudget(int(self.recompute) if self.recompute.isdecimal() else self.recompute)
        except ValueError as error:
            raise ValueError(f"--recompute takes {', '.join(POLICIES)} or a number of bytes; {error}") from error

    def apply(self, model: nn.Module) -> Any:
        """What hs.checkpoint returns, or None."""
        policy = self.policy()
        return None if policy is None else hs.checkpoint(model, policy)

    def around_forward(self) -> AbstractContextManager:
        """To be entered for each forward."""
        return hs.offload_activations(MOVED_BYTES, keep_last_bytes=MOVED_BYTES) if self.offload else nullcontext()


KEEP_ALL = Memory()
