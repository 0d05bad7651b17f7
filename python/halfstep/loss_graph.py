"""What a loss's autograd graph tells near its end: how the token losses were reduced, and where a 0 / 0 would come in.

The one place that reads torch's private fields of graph nodes: `_input_metadata` (shapes of what a node computed in the
forward pass), `_saved_reduction` and `_saved_other` (what it keeps). A torch without them is told nothing here, and
nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .ops import devices

_REDUCTIONS = {1: "mean", 2: "sum"}  # at::Reduction
_MOST_NODES = 1000  # a loss may be a sum of many scalars, one for each layer or expert
# They hand on a scalar as it is, or add scalars up.
_HANDING_ON = ("ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Alias", "Add", "Expand", "UnsafeView")


def check_reduction(loss: Tensor, reduction: str, steps: int) -> None:
    """ValueError if the graph shows that the loss is the other kind, or a mean that was divided by `steps` by habit.

    It shows nothing where something else than a loss function of torch reduced the token losses, and is not asked to
    guess where the loss was multiplied or divided on the way.
    """
    found, divided = _reductions(loss.grad_fn)
    if {*found} == {_other(reduction)} and not divided:
        raise ValueError(
            f"the loss was made with reduction={_other(reduction)!r}, as its graph shows, but the accumulator expects "
            f"reduction={reduction!r} over the micro-batch's valid tokens. Pass reduction={_other(reduction)!r} to "
            "hs.Accumulator, or change the loss"
        )
    if found == ["mean"] and reduction == "mean" and steps > 1 and divided == [float(steps)]:
        raise ValueError(
            f"the loss is a mean divided by {steps}, the number of micro-batches, as loops do that add gradients up "
            "themselves; the accumulator weighs micro-batches by their tokens. Pass the mean as it is (if the divisor "
            f"belongs to the loss, multiply by {1 / steps:g} instead)"
        )


def check_unscaled(loss: Tensor, scale: Tensor) -> None:
    """ValueError if the graph shows that the loss was multiplied by the tensor that holds the scaler's scale."""
    node = loss.grad_fn
    while node is not None and node.name().startswith(_HANDING_ON) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    other = None if node is None or not node.name().startswith("Mul") else getattr(node, "_saved_other", None)
    if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
        raise ValueError(
            "the loss was scaled already, by scaler.scale(); the accumulator, which has the scaler, does that. Pass "
            "the loss as it is"
        )


def _other(reduction: str) -> str:
    return "sum" if reduction == "mean" else "mean"


def _reductions(start: Any) -> tuple[list[str], list[float | None]]:
    """Of all loss functions the scalar is a sum of: their reductions; numbers that something was divided by on the way.

    "unknown" is among the first where something else is in the sum; None among the second is a number nobody knows.
    """
    found: list[str] = []
    divided: list[float | None] = []
    waiting: list[Any] = [start]
    for _ in range(_MOST_NODES):
        if not waiting:
            return found, divided
        node = waiting.pop()
        if node is None:  # something that needs no gradient was added
            found.append("unknown")
            continue
        name = node.name()
        if hasattr(node, "_saved_reduction"):
            found.append(_REDUCTIONS.get(node._saved_reduction, "unknown"))
        elif name.startswith("MeanBackward") and _is_scalar(node, 0):
            found.append("mean")
        elif name.startswith(("Div", "Mul")):
            divided.append(_divisor(node, name))
            waiting += [following for following, _ in node.next_functions if following is not None]
        elif name.startswith(_HANDING_ON):
            waiting += [following for following, _ in node.next_functions]
        else:
            found.append("unknown")
    return ["unknown"], divided


def _divisor(node: Any, name: str) -> float | None:
    """The number of the program that a scalar was divided by. Factors of 1/2 and the like often belong to a loss."""
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad or not devices.is_host(other.device):
        return None
    return float(other) if name.startswith("Div") else None


def _is_scalar(node: Any, output: int) -> bool:
    shapes = getattr(node, "_input_metadata", None)
    return bool(shapes) and output < len(shapes) and all(size == 1 for size in shapes[output].shape)


@contextmanager
def silenced(loss: Tensor, none_valid: Tensor) -> Iterator[None]:
    """While inside, backward() of the loss passes exact zeros into the model where `none_valid` (0-d bool) is true.

    A mean over no token is 0 / 0, whose gradient stays NaN whatever it is multiplied with. So the first gradients that
    are no scalars any more are replaced, on the device: no one waits, and parameters' gradients need no second look.
    """
    handles = []

    def replace(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.masked_fill(none_valid.to(g.device), 0) for g in gradients)

    try:
        handles += [node.register_prehook(replace) for node in _first_behind_scalars(loss.grad_fn)]
        yield
    finally:
        for handle in handles:  # the nodes that add to parameters' gradients may outlive the graph
            handle.remove()


def _first_behind_scalars(start: Any) -> list[Any]:
    """Nodes that compute no scalar, of which scalars were made; and where gradients of scalar parameters end."""
    seen, found, waiting = {start}, [], [] if start is None else [start]
    while waiting and len(seen) < _MOST_NODES:
        for following, output in waiting.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            goes_on = _is_scalar(following, output) and following.next_functions
            (waiting if goes_on else found).append(following)
    return found + waiting
