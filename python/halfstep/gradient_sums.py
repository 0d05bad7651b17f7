"""The gradient sums of a window of micro-batches, in float32 whatever the gradients' dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from .cast import accumulate_, cast_
from .gradients import unscale_
from .ops import devices
from .ops.layout import NARROW
from .reports import parameter_names
from .shards import local

_WIDE = (torch.float32, torch.float64)


class GradientSums:
    """Sums of the gradients of an optimizer's parameters. Between calls every parameter's .grad is None.

    A sum in the gradient's own dtype is lent to the parameter for the backward pass, where autograd adds to it in
    place; 16-bit gradients are added to float32 sums by one kernel for all of them, and freed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.sums: dict[Tensor, Tensor] = {}
        self._lent: list[Tensor] = []
        self._widened: dict[Tensor, torch.dtype | None] = {}  # parameters whose grad_dtype was changed, and from what

    def trainable(self) -> list[Tensor]:
        return [p for p in self._parameters() if p.requires_grad]

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _name(self, param: Tensor) -> str:
        where = next(i for i, p in enumerate(self._parameters()) if p is param)
        return parameter_names(self._optimizer.param_groups)[where]

    # ---- micro-batches ---------------------------------------------------------------------------------------------
    def check_untouched(self) -> None:
        """RuntimeError if a parameter has a gradient that did not come through the accumulator."""
        for p in self._parameters():
            if p.grad is not None:
                raise RuntimeError(
                    f"{self._name(p)} has a gradient that did not come through accumulator.backward(): it would be "
                    "lost or counted with the wrong weight. Call accumulator.backward(loss, tokens) in place of "
                    "loss.backward(), or optimizer.zero_grad() if the gradient is an old one"
                )

    def lend(self) -> None:
        """Before a backward pass: parameters get the sums that autograd can add to."""
        self._lent = [p for p, total in self.sums.items() if p.grad_dtype in (None, total.dtype)]
        for p in self._lent:
            p.grad = self.sums[p]

    def take(self) -> None:
        """After a backward pass: every gradient goes into its sum.

        Raises TypeError, before anything is added, for a sparse gradient or one of another dtype.
        """
        found = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for p, grad in found:
            self._check(p, grad)
        first, more = [], []
        for p, grad in found:
            p.grad = None
            if grad.dtype not in NARROW:
                self.sums[p] = grad
            elif p in self.sums:
                more.append((p, grad))
            else:
                first.append((p, grad))
                self.sums[p] = torch.empty_like(grad, dtype=torch.float32)
        for write, pairs in ((cast_, first), (accumulate_, more)):
            for place in _by_device(pairs):
                write([local(self.sums[p]) for p, _ in place], [local(grad) for _, grad in place])

    def _check(self, param: Tensor, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise TypeError(
                f"{self._name(param)} has a gradient of layout {grad.layout}; sums of dense gradients are kept. Use "
                "sparse=False in its embedding"
            )
        if grad.dtype not in (*NARROW, *_WIDE):
            raise TypeError(
                f"{self._name(param)} has a gradient of {grad.dtype}; expected float32, float64, bfloat16 or float16"
            )

    # ---- the window's end ------------------------------------------------------------------------------------------
    def multiply(self, factor: Tensor) -> None:
        """Every sum times a number, 0-d float64 on any device, rounded once."""
        for place in _by_device(self.sums.items()):
            totals = [local(total) for _, total in place]
            here = devices.scalar_on(factor, totals[0].device, torch.float64, "the factor of the gradient sums")
            unscale_([t for t in totals if t.dtype == torch.float32], here.float(), here.new_zeros(()))
            for total in totals:
                if total.dtype == torch.float64:
                    total.mul_(here)

    def give(self, *, wide: bool) -> None:
        """Parameters get their sums as gradients: in float32, or rounded to the parameter's dtype if not `wide`."""
        rounded = []
        for p, total in self.sums.items():
            if p.grad_dtype in (None, total.dtype):
                p.grad = total
            elif wide:
                self._widened[p] = p.grad_dtype
                p.grad_dtype = total.dtype
                p.grad = total
            else:
                p.grad = torch.empty_like(total, dtype=p.grad_dtype)
                rounded.append((p.grad, total))
        for place in _by_device(rounded):
            cast_([local(grad) for grad, _ in place], [local(total) for _, total in place])

    def check_given(self) -> None:
        """RuntimeError if somebody took all gradients away again."""
        if self.sums and all(p.grad is None for p in self.sums):
            raise RuntimeError(
                "every gradient was cleared between finish() and step(), so the window would be lost; do not call "
                "zero_grad(), or call reset() to drop the window"
            )

    def clear(self) -> None:
        """As before the first micro-batch; gradients are freed."""
        for p in self._parameters():
            p.grad = None
        for p, dtype in self._widened.items():
            p.grad = None  # also of one that has left the optimizer
            p.grad_dtype = dtype
        self._widened.clear()
        self._lent = []
        self.sums.clear()


def _by_device(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The pairs in lists, one for each device of their second tensors: the kernels take one device a call."""
    places: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        places.setdefault(pair[1].device, []).append(pair)
    return list(places.values())
