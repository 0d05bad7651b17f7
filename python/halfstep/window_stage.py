"""How far a window of micro-batches is, and what may be called next."""

from __future__ import annotations

import weakref
from typing import NoReturn

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class WindowStage:
    """Counts micro-batches; every method that begins with "check" raises RuntimeError for a call out of turn.

    Args:
        steps: micro-batches in a window.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start()

    def start(self) -> None:
        self.micro_batches = 0
        self.finished = False  # the gradients are divided and with the parameters
        self.stepping = False  # the optimizer's step is the accumulator's

    @property
    def full(self) -> bool:
        return self.micro_batches >= self.steps

    def check_backward(self) -> None:
        if self.finished:
            raise RuntimeError("backward() after finish(): the window has ended; call step() first")
        if self.full:
            raise RuntimeError(
                f"backward() for micro-batch {self.micro_batches + 1} of a window of {self.steps}: call step() when "
                "accumulator.ready is true"
            )

    def check_finish(self, *, alone: bool) -> None:
        """`alone`: no other rank can have a micro-batch."""
        if self.finished:
            raise RuntimeError("finish() was called twice in a window; call step(), which ends it")
        if alone and not self.micro_batches:
            refuse_empty()

    def check_between_windows(self, what: str) -> None:
        if self.micro_batches or self.finished:
            raise RuntimeError(
                f"{what} with {self.micro_batches} of {self.steps} micro-batches in the window, whose gradients are in "
                "no checkpoint; call step(), or reset() to drop them"
            )

    def check_optimizer_step(self) -> None:
        if self.micro_batches and not self.stepping:
            raise RuntimeError(
                "optimizer.step() was called within a window of micro-batches; call accumulator.step(), which divides "
                "the sums, steps the optimizer (through the scaler, if there is one) and clears the gradients"
            )

    def watch(self, optimizer: Optimizer) -> RemovableHandle:
        """Before every step of the optimizer, check_optimizer_step(), for as long as this object exists."""
        reference = weakref.ref(self)

        def check(*_: object) -> None:
            stage = reference()
            if stage is not None:
                stage.check_optimizer_step()

        return optimizer.register_step_pre_hook(check)


def refuse_empty() -> NoReturn:
    raise RuntimeError(
        "step() with no gradient accumulated: call backward(loss, tokens) for each micro-batch first, and "
        "`if accumulator.pending:` before the last, shorter window's step()"
    )
