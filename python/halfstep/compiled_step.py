"""step() inside torch.compile: one opaque operator, which runs the ordinary step.

The graph knows the tensors that other code of the region may read or write: weights, gradients, learning rates. All
else is read by the ordinary step when the graph runs (the groups' numbers, settings, states, counters), so nothing is
compiled again when it changes; what the region itself changes of it before step() ends the graph there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .ops.schemas import define, scalar
from .shards import is_sharded

if TYPE_CHECKING:
    from .fused_adam import FusedAdam

_Result = tuple[Tensor, Tensor, Tensor]

_optimizers: WeakValueDictionary[str, FusedAdam] = WeakValueDictionary()  # by the name that stands for it in graphs
_numbers = count()
_READ = ("state", "param_groups", "stochastic_rounding", "seed", "max_grad_norm", "skip_nonfinite", "on_stale",
         "backend", "grad_scale", "found_inf")  # fmt: skip
_CHANGED = (
    "step() reads {} when the compiled graph runs, before torch.compile writes back what was changed in the same "
    "compiled function; make the change outside of it"
)


class StepView:
    """What a traced step sees of its optimizer, and what it leaves there.

    Attributes:
        name: stands for the optimizer in graphs, since operators take no objects. Keeps nothing alive. (Not a number,
            which dynamo would take for a variable.)
        groups: `optimizer.param_groups`, by a way on which dynamo does not guard every value in them.
        rated: the groups whose lr is a tensor.
        sharded: whether a parameter is a DTensor, which operators do not take. These three are set by every tracing.
        grad_norm, skipped, healed: of the last step, traced or not. (dynamo of torch 2.10 sets no attribute of an
            optimizer itself.)
    """

    grad_norm: Tensor
    skipped: Tensor
    healed: Tensor

    def __init__(self, optimizer: FusedAdam) -> None:
        self.name = str(next(_numbers))
        self.groups: list[dict[str, Any]] = []
        self.rated: list[int] = []
        self.sharded = False
        _optimizers[self.name] = optimizer


# ---- while dynamo traces ---------------------------------------------------------------------------------------------
def step(optimizer: FusedAdam) -> None:
    """`optimizer.update()` as one node of the graph."""
    from torch._dynamo.comptime import comptime

    name = optimizer.view.name
    comptime(_look)
    view = optimizer.view
    if view.sharded:
        from .untraced import call

        call(optimizer.update)
        return
    params = [p for group in view.groups for p in group["params"]]
    places = [i for i, p in enumerate(params) if p.grad is not None]
    active = [params[i] for i in places]
    rates = [view.groups[i]["lr"] for i in view.rated]
    view.grad_norm, view.skipped, view.healed = torch.ops.halfstep.step_(
        active, [p.grad for p in active], rates, places, view.rated, name
    )


def _look(ctx: Any) -> None:
    """Runs while `step` is traced, with dynamo's context: looks at the optimizer as it is outside of the graph."""
    optimizer = _optimizers[ctx.get_local("name").as_python_constant()]
    effects = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    if changed := _changed(optimizer, effects):
        ctx.graph_break(_CHANGED.format(changed))
    view = optimizer.view
    view.groups = optimizer.param_groups
    view.sharded = any(is_sharded(p) for group in view.groups for p in group["params"])
    view.rated = [i for i, group in enumerate(view.groups) if isinstance(group["lr"], Tensor)]


def _changed(optimizer: FusedAdam, effects: Any) -> str:
    """What the region has, or may have, changed of what the ordinary step reads; dynamo writes it back at the end."""
    for variable, attributes in effects.store_attr_mutations.items():
        if getattr(variable, "value", None) is optimizer and (names := [name for name in _READ if name in attributes]):
            return f"the optimizer's {names[0]}"
    groups = optimizer.param_groups
    for part in (groups, *groups, *(group["params"] for group in groups)):
        if part in effects and effects.is_modified(effects[part]):
            return "the parameter groups"
    held = (state for _, state in optimizer.own_states().own_items() if isinstance(state, dict))
    values = [value for group in groups for key, value in group.items() if key not in ("params", "lr")]
    values += (optimizer.max_grad_norm, *chain.from_iterable(state.values() for state in held))
    if any(isinstance(t, Tensor) and t in effects for value in values for t in _each(value)):
        return "the optimizer's states and settings"  # tensors; if they were only read, a graph break is no loss
    return ""


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


# ---- when the graph runs ---------------------------------------------------------------------------------------------
def _step(
    params: list[Tensor], grads: list[Tensor], rates: list[Tensor], places: list[int], rated: list[int], name: str
) -> _Result:
    """The step of the optimizer, for the tensors that the graph has now.

    They are mostly the optimizer's own. A backend that keeps graphs free of writes hands over copies and writes those
    back later; a gradient made in the graph is not yet that of its parameter.
    """
    optimizer = _optimizers[name]
    held = _parameters_as_traced(optimizer)
    given: list[Tensor | None] = [None] * len(held)
    for i, grad in zip(places, grads, strict=True):
        given[i] = grad
    own_rates = [optimizer.param_groups[i]["lr"] for i in rated]
    with torch.no_grad(), _values(rates, own_rates), _values(params, [held[i] for i in places]), _grads(given, held):
        optimizer.update()
    view = optimizer.view
    # copies: a backend may use the memory of results again, and the optimizer keeps its own
    return view.grad_norm.clone(), view.skipped.clone(), view.healed.clone()


def _parameters_as_traced(optimizer: FusedAdam) -> list[Tensor]:
    traced = [p for group in optimizer.view.groups for p in group["params"]]
    if optimizer.param_groups is not optimizer.view.groups:  # somebody assigned another list, which no guard sees
        optimizer.view.groups = optimizer.param_groups
        now = [p for group in optimizer.param_groups for p in group["params"]]
        if len(now) != len(traced) or any(a is not b for a, b in zip(now, traced, strict=True)):
            raise RuntimeError(
                "optimizer.param_groups was replaced by a list of other parameters after step() was compiled; nothing "
                "was updated. Call the compiled function again, which compiles it anew"
            )
    return traced


@contextmanager
def _values(given: Sequence[Tensor], own: Sequence[Tensor]) -> Iterator[None]:
    """The optimizer's own tensors with the given values, and what becomes of them in the given ones."""
    apart = [pair for pair in zip(given, own, strict=True) if not _is_same_memory(*pair)]
    for copy, tensor in apart:
        tensor.copy_(copy)
    yield
    for copy, tensor in apart:
        copy.copy_(tensor)


@contextmanager
def _grads(given: Sequence[Tensor | None], params: Sequence[Tensor]) -> Iterator[None]:
    """The parameters with the given gradients, for the time of a step."""
    before = [(p, p.grad, grad) for p, grad in zip(params, given, strict=True)]
    lent = [one for one in before if not _is_same_memory(*one[1:])]
    for p, _, grad in lent:
        p.grad = grad
    try:
        yield
    finally:
        for p, own, _ in lent:
            p.grad = own


def _is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.data_ptr() == b.data_ptr() and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _fake(params: list[Tensor], *others: object) -> _Result:
    return scalar(params, torch.float64), scalar(params, torch.bool), scalar(params, torch.int64)


define(
    "step_(Tensor(a!)[] params, Tensor[] grads, Tensor[] rates, int[] places, int[] rated, str name) "
    "-> (Tensor, Tensor, Tensor)",
    _step,
    _fake,
    # a recorded graph would go on with the numbers of the step it was recorded in
    tags=(torch.Tag.cudagraph_unsafe,),
)
