"""The native CPU backend: tensors in, addresses to `halfstep._cpu`. Tensors are dense; a row's share one layout."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ..reference.optimizer import AdamGroup
from ..reference.step import AdamRow, StepInputs, StepResult

name = "native"
isa = ""  # "" = the best this machine runs; a test names another

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_pointer, _dtype = Tensor.data_ptr, attrgetter("dtype")


def _native():
    # here, not at import: a build without the module must import, and say so when asked
    from .. import _cpu  # type: ignore[attr-defined]

    return _cpu


def _inverse(scale: Tensor | None) -> float:
    return 1.0 if scale is None else _native().inverse(scale.item())


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _codes(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_CODES.__getitem__, map(_dtype, tensors)))


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [t.numel() for t in tensors]


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    total, first_bad = _native().grad_stats(
        _addresses(grads), _sizes(grads), _codes(grads), _inverse(scale), torch.get_num_threads(), isa
    )
    return torch.tensor(total, dtype=torch.float64), torch.tensor(first_bad)


def unscale_(grads: Sequence[Tensor], factor: float) -> Tensor:
    first_bad = _native().scale_(_addresses(grads), _sizes(grads), _codes(grads), factor, torch.get_num_threads(), isa)
    return torch.tensor(first_bad)


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
    _native().cast_(
        _addresses(dst), _codes(dst), _addresses(src), _codes(src), _sizes(dst), stochastic, seed,
        torch.get_num_threads(), isa,
    )  # fmt: skip


class AdamPlan:
    """As reference.step.AdamPlan. The table is built once; the caller makes a new plan when a tensor moves."""

    def __init__(self, rows: Sequence[AdamRow]) -> None:
        params = [r.param for r in rows]
        self._plan = _native().AdamPlan(
            _sizes(params), [r.first_index for r in rows], [r.param_id for r in rows], [r.group for r in rows],
            _codes(params), _codes([r.exp_avg for r in rows]),
        )  # fmt: skip
        split = [r.master is not None and r.master.dtype == torch.int16 for r in rows]
        self._plan.set_tensors(
            _addresses(params),
            _addresses([r.exp_avg for r in rows]),
            _addresses([r.exp_avg_sq for r in rows]),
            _addresses([r.max_exp_avg_sq for r in rows]),
            _addresses([None if s else r.master for r, s in zip(rows, split, strict=True)]),
            _addresses([r.master if s else None for r, s in zip(rows, split, strict=True)]),
            _addresses([r.step for r in rows]),
        )

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        self._plan.set_grads(list(map(_pointer, grads)), _codes(grads))

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        total, first_bad = self._plan.grad_stats(_inverse(scale), torch.get_num_threads(), isa)
        return torch.tensor(total, dtype=torch.float64), torch.tensor(first_bad)

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        norm, grad_factor, skip = _native().decide(
            sum_squares=float("nan") if inputs.sum_squares is None else inputs.sum_squares.item(),
            scale=1.0 if inputs.scale is None else inputs.scale.item(),
            max_norm=-1.0 if inputs.max_norm is None else inputs.max_norm,
            nonfinite=inputs.first_bad is not None and inputs.first_bad.item() >= 0,
            skip_nonfinite=inputs.skip_nonfinite,
            found_inf=inputs.found_inf is not None and inputs.found_inf.item() > 0,
        )
        healed = 0
        if not skip:
            healed = self._plan.update(
                groups, grad_factor, inputs.seed, inputs.stochastic_weight, inputs.heal, torch.get_num_threads(), isa
            )
        return StepResult(torch.tensor(norm, dtype=torch.float64), torch.tensor(skip), torch.tensor(healed))
