"""Weights of a window's micro-batches by their valid tokens, and the window's mean loss; all on the loss's device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .ops import devices

_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenWeights:
    """A micro-batch of n tokens weighs n / c, and in the end all is multiplied by c / N, N the tokens of all.

    c is a power of two above the largest count that was seen before the window had its first valid token: dividing by
    it loses no bit, so that results do not depend on it, and weights stay near 1, so that 16-bit gradients neither
    overflow nor vanish where those of a mean would not.

    Args:
        reduction: "mean" or "sum", of the losses that are weighed.
    """

    def __init__(self, reduction: str) -> None:
        self._mean = reduction == "mean"
        self.largest = _number(1.0)  # count of all windows
        self.start_window()

    def start_window(self) -> None:
        self._unit = _number(1.0)  # c
        self._seen = _number(0.0)  # tokens, which decide about c
        self._totals: Tensor | None = None  # float64 [sum of token losses, valid tokens], of this rank

    def weigh(self, loss: Tensor, count: Tensor, common: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss times its weight; 0-d, differentiable, at least float32.

        Args:
            loss: of one element.
            count: its tokens, 0-d float64 on the loss's device.
            common: makes a count the largest of the ranks that need the same c.
        """
        device = count.device
        shared = common(count)
        self.largest = torch.maximum(_on(device, self.largest), shared)
        mantissa, _ = torch.frexp(self.largest)
        seen = _on(device, self._seen)
        self._unit = torch.where(seen == 0, self.largest / mantissa, _on(device, self._unit))  # an exact power of two
        self._seen = seen + shared
        weight = torch.where(count == 0, 0.0, (count if self._mean else 1.0) / self._unit)
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
        return torch.where(tokens > 0, _on(tokens.device, self._unit) / tokens.clamp(min=1), 0.0)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


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
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(
            f"tokens={tokens!r}: expected an integer, the number of valid tokens; 1 weighs micro-batches equally"
        )
    if tokens < 0:
        raise ValueError(f"tokens={tokens}: expected the number of valid tokens, 0 or more")
    return torch.full((), tokens, dtype=torch.float64, device=device)
