"""What a checkpointed block keeps for backward: the policies of `checkpoint`, and what a policy has to offer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from . import kept

# What torch.utils.checkpoint takes as `context_fn`: the first context is around the forward, the second around each
# recomputation.
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
PolicyFn = Callable[..., Any]


class Everything:
    """The type of EVERYTHING."""


EVERYTHING: Final = Everything()  # an answer of Policy.contexts(): this block runs without a checkpoint


@runtime_checkable
class Policy(Protocol):
    """What `checkpoint` asks. Blocks are known by their names in the model, which a copy of the model keeps."""

    watches_model: (
        bool  # begin() and end() are called around each forward of the model; torch.compile cannot trace that
    )

    def bind(self, names: Sequence[str]) -> Policy:
        """The policy for one model, whose blocks have these names, in the model's order. May hold what it measures: it
        is copied and pickled with the model."""
        ...

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model starts, with these arguments; with or without gradients."""
        ...

    def end(self, model: nn.Module, completed: bool) -> None:
        """It is over; not completed: by an exception."""
        ...

    def contexts(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ContextFn | Everything | None:
        """For one eager forward of a block that records gradients: what torch.utils.checkpoint takes as `context_fn`
        (`kept.contexts(decide)` keeps the results of chosen operators), None to keep the inputs alone, EVERYTHING to
        run without a checkpoint."""
        ...

    def traced_context_fn(self) -> ContextFn | None:
        """The same under torch.compile, once for all blocks; raises what the user reads if it cannot be."""
        ...


class KeepInputs:
    """Policy "layer"."""

    watches_model = False

    def bind(self, names: Sequence[str]) -> Policy:
        return self

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def end(self, model: nn.Module, completed: bool) -> None: ...

    def contexts(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return None

    def traced_context_fn(self) -> None:
        return None


class KeepResults(KeepInputs):
    """Keeps the results of the operators that a function chooses, as torch's selective checkpointing asks it."""

    def __init__(self, policy_fn: PolicyFn):
        self.policy_fn = policy_fn

    def contexts(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContextFn:
        return functools.partial(kept.contexts, self.policy_fn)

    def traced_context_fn(self) -> ContextFn:
        return functools.partial(kept.traced_contexts, self.policy_fn)


# Products with weights, and convolutions. What an operator is called here is what autograd's decompositions leave.
_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv", "_grouped_mm"),
    *("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_int_mm", "_weight_int8pack_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
}
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_KEPT = {f"aten::{name}" for name in _PRODUCTS}
_ATTENTION = (
    *("aten::_scaled_dot_product_", "aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
    *("aten::_cudnn_attention_forward", "halfstep::attention", "flex_attention"),
)


@functools.cache
def _kind(op: Any) -> Literal["attention", "product", "batched"] | None:
    name = op.name().split(".")[0]
    if name.startswith(_ATTENTION) and "backward" not in name:
        return "attention"
    if name in _BATCHED:
        return "batched"
    return "product" if name in _KEPT else None


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy "selective": products, convolutions and attention are kept. A batched product that is larger than both
    its operands together is not: the scores of attention written out, [heads, length, length], would be."""
    kind = _kind(op)
    if kind is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if kind == "batched":
        a, b = [operand for operand in args if isinstance(operand, Tensor)][-2:]
        if a.shape[0] * a.shape[1] * b.shape[2] > a.numel() + b.numel():
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def resolve(policy: Any) -> Policy:
    """The policy that a user's argument of `checkpoint` names."""
    if policy == "layer":
        return KeepInputs()
    if policy == "selective":
        return KeepResults(keep_products)
    if isinstance(policy, Policy) and not isinstance(policy, type):  # ByteBudget itself has all that one has
        return policy
    if callable(policy) and not isinstance(policy, (type, nn.Module, torch.Tensor)):
        return KeepResults(policy)
    raise TypeError(
        'policy must be "layer", "selective", a ByteBudget, a function (ctx, op, *args, **kwargs) that returns a '
        f"torch.utils.checkpoint.CheckpointPolicy, or None to undo; got {policy!r}"
    )
