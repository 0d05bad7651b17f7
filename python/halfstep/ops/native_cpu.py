"""The native CPU backend: tensors in, addresses to `halfstep._cpu`. Tensors are dense; a row's share one layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..reference.optimizer import AdamGroup
from ..reference.step import AdamRow, StepInputs, StepResult
from .native import Rows, columns, make_reader, pair_columns

name = "native"
isa = ""  # "" = the best this machine runs; a test names another


def _native():
    # here, not at import: a build without the module must import, and say so when asked
    from .. import _cpu  # type: ignore[attr-defined]

    return _cpu


@cache
def tensor_reader() -> Any:
    """C++'s own look at tensors, or None where it does not see what Python sees (native.py)."""
    return make_reader(_native(), torch.device("cpu"))


def read_list(tensors: list[Tensor]) -> Any:
    """The _cpu.TensorList of these tensors, or None: see lists.py."""
    reader = tensor_reader()
    return None if reader is None else _native().read_list(reader, tensors)


def _inverse(scale: Tensor | None) -> float:
    return 1.0 if scale is None else _native().inverse(scale.item())


def _real(value: float) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def _whole(value: int) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.int64, device="cpu")


def _exact(value: Tensor) -> float:
    """A 0-d float32 tensor as a number, also on a thread that flushes denormals, for which .item() may give 0."""
    number = value.item()
    if number:
        return number
    bits = int(value.view(torch.int32).item())
    return (bits & 0x7FFFFFFF) * (-(2.0**-149) if bits < 0 else 2.0**-149)


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    total, first_bad = _native().grad_stats(*columns(grads), _inverse(scale), torch.get_num_threads(), isa)
    return _real(total), _whole(first_bad)


def sums_of_squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sums = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
    total = _native().sums_of_squares(*columns(tensors), sums.data_ptr(), len(tensors), torch.get_num_threads(), isa)
    return sums, _real(total)


def unscale_(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    return _whole(_native().scale_(*columns(grads), _exact(factor), torch.get_num_threads(), isa))


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
    _native().cast_(*pair_columns(dst, src), stochastic, seed, torch.get_num_threads(), isa)


def accumulate_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    _native().accumulate_(*pair_columns(dst, src), torch.get_num_threads(), isa)


class AdamPlan(Rows):
    """As reference.step.AdamPlan. The table is built once; the caller makes a new plan when a tensor moves."""

    def __init__(self, rows: Sequence[AdamRow]) -> None:
        super().__init__(_native(), rows, lambda: tensor_reader())  # looked up each time: a test replaces it

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        total, first_bad = self._plan.grad_stats(_inverse(scale), torch.get_num_threads(), isa)
        return _real(total), _whole(first_bad)

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        nonfinite = inputs.first_bad is not None and inputs.first_bad.item() >= 0
        norm, grad_factor, skip = _native().decide(
            float("nan") if inputs.sum_squares is None else inputs.sum_squares.item(),
            1.0 if inputs.scale is None else inputs.scale.item(),
            -1.0 if inputs.max_norm is None else inputs.max_norm,
            nonfinite,
            inputs.skip_nonfinite,
            inputs.found_inf is not None and inputs.found_inf.item() > 0,
        )
        healed = 0
        if not skip:
            healed = self._plan.update(
                groups, grad_factor, inputs.seed, inputs.stochastic_weight, inputs.heal, torch.get_num_threads(), isa
            )
        return StepResult(_real(norm), torch.scalar_tensor(skip, dtype=torch.bool, device="cpu"), _whole(healed))
