"""torch.library schemas over the same functions: torch.compile(fullgraph=True), FakeTensor, opcheck.

Eager calls skip the dispatcher and go straight to the functions; both take the backend chosen in backend.py. The
schemas mutate lists in place, have no gradient, and their fake functions only make the shapes of what is returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import cast as cast_ops
from . import optimizer as optimizer_ops
from .optimizer import AdamGroup, AdamRow, AdamStep, StepInputs

_library = torch.library.Library("halfstep", "DEF")


def define(schema: str, implementation: Callable, fake: Callable, tags: tuple[torch.Tag, ...] = ()) -> None:
    """Makes torch.ops.halfstep.<name>; `fake` only makes the results' shapes."""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides, *tags))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfstep::{name}", fake, lib=_library)


def scalar(like: list[Tensor], dtype: torch.dtype) -> Tensor:
    """An empty 0-d tensor where the first of a list is."""
    return torch.empty((), dtype=dtype, device=like[0].device if like else "cpu")


# The dispatcher leaves out arguments that equal their default: the functions repeat the schema's defaults.
def _grad_stats(grads: list[Tensor], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total, first_bad = optimizer_ops.grad_stats(grads, scale)
    return optimizer_ops.norm_from(total), (first_bad >= 0).float()


def _l2_norms(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    return optimizer_ops.l2_norms(tensors)


def _fake_l2_norms(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    total = scalar(tensors, torch.float64)
    return total.new_empty(len(tensors)), total


def _unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    first_bad = optimizer_ops.unscale_(grads, inv_scale)
    found_inf.copy_(torch.maximum(found_inf, (first_bad >= 0).to(found_inf.dtype)))


def _clip_grad_norm_(grads: list[Tensor], max_norm: Tensor) -> Tensor:
    return optimizer_ops.clip_grad_norm_(grads, max_norm)


def _cast_(dst: list[Tensor], src: list[Tensor], stochastic: bool = False, seed: int = 0) -> None:
    cast_ops.cast_(dst, src, stochastic, seed)


def _accumulate_(dst: list[Tensor], src: list[Tensor]) -> None:
    cast_ops.accumulate_(dst, src)


def _adam_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor], masters: list[Tensor], steps: list[Tensor], scale: Tensor | None,
    found_inf: Tensor | None, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
    maximize: bool, max_norm: float | None, skip_nonfinite: bool, seed: int, stochastic_weight: bool, heal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def column(tensors: list[Tensor]) -> list[Tensor | None]:
        return list(tensors) if tensors else [None] * len(params)

    rows = [
        AdamRow(*tensors, group=0, param_id=i, first_index=0)
        for i, tensors in enumerate(
            zip(params, exp_avgs, exp_avg_sqs, column(max_exp_avg_sqs), column(masters), steps, strict=True)
        )
    ]
    names = [f"params[{i}]" for i in range(len(rows))]
    step = AdamStep(rows, names, None, stochastic_weight=stochastic_weight)
    step.set_grads(grads)
    group = AdamGroup(lr, beta1, beta2, eps, weight_decay, decoupled, maximize)
    inputs = StepInputs(scale, None, None, max_norm, skip_nonfinite, found_inf, seed, stochastic_weight, heal)
    return step.run([group], inputs, max_norm is not None or skip_nonfinite)[0]


def _fake_adam_(params: list[Tensor], *args: object) -> tuple[Tensor, Tensor, Tensor]:
    return scalar(params, torch.float64), scalar(params, torch.bool), scalar(params, torch.int64)


define(
    "grad_stats(Tensor[] grads, Tensor? scale=None) -> (Tensor, Tensor)",
    _grad_stats,
    lambda grads, scale=None: (scalar(grads, torch.float64), scalar(grads, torch.float32)),
)
define("l2_norms(Tensor[] tensors) -> (Tensor, Tensor)", _l2_norms, _fake_l2_norms)
define(
    "unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf) -> ()",
    _unscale_,
    lambda grads, inv_scale, found_inf: None,
)
define(
    "clip_grad_norm_(Tensor(a!)[] grads, Tensor max_norm) -> Tensor",
    _clip_grad_norm_,
    lambda grads, max_norm: scalar(grads, torch.float64),
)
define(
    "cast_(Tensor(a!)[] dst, Tensor[] src, bool stochastic=False, SymInt seed=0) -> ()",
    _cast_,
    lambda dst, src, stochastic=False, seed=0: None,
)
define("accumulate_(Tensor(a!)[] dst, Tensor[] src) -> ()", _accumulate_, lambda dst, src: None)
define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] steps, Tensor? scale, Tensor? found_inf, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, "
    "float? max_norm, bool skip_nonfinite, int seed, bool stochastic_weight, bool heal) -> (Tensor, Tensor, Tensor)",
    _adam_,
    _fake_adam_,
)
