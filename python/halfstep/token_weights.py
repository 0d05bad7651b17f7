"""Weights of a window's micro-batches by their valid tokens, and the window's mean loss; all on the loss's device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .loss_graph import check_unscaled
from .loss_scale import LossScale
from .ops import devices

_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenWeights:
    """A micro-batch of n tokens weighs n / c, and in the end all is multiplied by c / N, N the tokens of all.

    c is a power of two, so dividing by it loses no bit and results do not depend on it. It is the one above the tokens
    of a whole window on one rank, as far as they are known before: the most that a window had so far; in the first
    window, its first micro-batch's tokens times `steps`. So 16-bit gradients overflow or vanish where those of the
    whole batch would. It is the same on all ranks: layers may mix their gradients before the window ends.

    Args:
        reduction: "mean" or "sum", of the losses that are weighed.
        steps: micro-batches in a window.
    """

    def __init__(self, reduction: str, steps: int) -> None:
        self._mean = reduction == "mean"
        self._steps = steps
        self.expected: Tensor | None = None  # tokens of a window on a rank, 0-d float64; the same on all ranks
        self.start_window()

    def start_window(self) -> None:
        self._unit: Tensor | None = None  # c
        self._totals: Tensor | None = None  # float64 [sum of token losses, valid tokens], of this rank

    def expect(self, count: Tensor, agree: Callable[[Tensor], Tensor]) -> None:
        """Before the first window's first micro-batch, or its end if it has none, on every rank.

        Args:
            count: the micro-batch's tokens, 0-d float64.
            agree: gives the largest of all ranks' numbers.
        """
        if self.expected is None:
            self.expected = agree(count * self._steps).clamp(min=1)

    def unit(self, device: torch.device) -> Tensor:
        if self._unit is None:
            assert self.expected is not None, "expect() came first"
            expected = _on(device, self.expected)
            self._unit = expected / torch.frexp(expected).mantissa  # exact
        return _on(device, self._unit)

    def weigh(self, loss: Tensor, count: Tensor) -> Tensor:
        """The loss times its weight; 0-d, differentiable, at least float32. `count` is on the loss's device."""
        weight = (count if self._mean else 1.0) / self.unit(count.device)
        return loss.reshape(()) * weight.to(torch.promote_types(loss.dtype, torch.float32))

    def count_in(self, loss: Tensor, count: Tensor) -> None:
        """Adds to the window's loss; one of no token counts nothing, whatever it is."""
        loss = loss.detach().reshape(()).double()
        of_tokens = (loss * count if self._mean else loss).masked_fill(count == 0, 0)
        totals = torch.stack((of_tokens, count))
        self._totals = totals if self._totals is None else self._totals.to(totals.device) + totals

    def totals(self, device: torch.device) -> Tensor:
        """float64 [sum of token losses, valid tokens] of this rank's window; on `device` if it had no micro-batch."""
        return torch.zeros(2, dtype=torch.float64, device=device) if self._totals is None else self._totals

    def factor(self, tokens: Tensor) -> Tensor:
        """c / N, 0-d float64; 0 if the whole window has no token."""
        return torch.where(tokens > 0, self.unit(tokens.device) / tokens.clamp(min=1), 0.0)

    def learn(self, tokens: Tensor) -> None:
        """How many tokens a window had on a rank, on average."""
        assert self.expected is not None, "the window has ended"
        self.expected = torch.maximum(_on(tokens.device, self.expected), tokens)


class WindowScale:
    """The loss scale of a window: that of its first micro-batch for all of them, whatever moves the scaler meanwhile.

    Another optimizer's step may do so in the middle of a window. Nothing is read on the host.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.start_window()

    def start_window(self) -> None:
        self._scale: Tensor | None = None

    def applied(self, loss: Tensor) -> Tensor:
        """The loss, 0-d, times the scale."""
        if self._scaler is None:
            return loss
        if self._scale is None:
            self._scale = self._now(loss.device)
        return loss * self._scale.to(loss.device)

    def check_unscaled(self, loss: Tensor) -> None:
        """ValueError if the loss comes from the scaler's scale()."""
        held = getattr(self._scaler, "_scale", None)  # torch's GradScaler has the tensor there, or None before scale()
        scale = held.tensor(loss.device) if isinstance(held, LossScale) else held
        if isinstance(scale, Tensor):
            check_unscaled(loss, scale)

    def correction(self, device: torch.device) -> Tensor | float:
        """What makes the window's sums carry the scale that the scaler is going to undo."""
        if self._scale is None:
            return 1.0
        return self._now(device).double() / self._scale.to(device)

    def _now(self, device: torch.device) -> Tensor:
        return self._scaler.scale(torch.ones((), device=device))


def _on(device: torch.device, number: Tensor) -> Tensor:
    return devices.scalar_on(number, device, torch.float64, "a token count")


def check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss must be a tensor of one element, got {what}; take the mean or the sum over valid tokens"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss has no gradient: it was computed under no_grad() or of parameters that are all frozen. If a "
            "micro-batch has no valid token, let the model run on it all the same and pass tokens=0, or leave it out"
        )


def token_count(tokens: int | Tensor, device: torch.device) -> Tensor:
    """0-d float64 on the device, exact up to 2**53."""
    if isinstance(tokens, Tensor):
        if tokens.dtype not in _COUNTS or tokens.ndim:
            raise TypeError(
                f"tokens must be one integer, got a tensor of {tokens.dtype} and shape {tuple(tokens.shape)}; pass "
                "(labels != ignore_index).sum()"
            )
        if not devices.is_host(tokens.device):
            return tokens.to(device, torch.float64)
        tokens = int(tokens)
    try:
        whole = None if isinstance(tokens, bool) else operator.index(tokens)  # NumPy's integers too
    except TypeError:
        whole = None
    if whole is None:
        raise TypeError(
            f"tokens={tokens!r}: expected an integer, the number of valid tokens; 1 weighs micro-batches equally"
        )
    tokens = whole
    if tokens < 0:
        raise ValueError(f"tokens={tokens}: expected the number of valid tokens, 0 or more")
    return torch.full((), tokens, dtype=torch.float64, device=device)
