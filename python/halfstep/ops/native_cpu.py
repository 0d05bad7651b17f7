"""The native CPU backend: tensors in, addresses to `halfstep._cpu`. Tensors are dense; a row's share one layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..reference.optimizer import AdamGroup
from ..reference.step import AdamRow, StepInputs, StepResult
from .layout import PlainList

name = "native"
isa = ""  # "" = the best this machine runs; a test names another

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_pointer, _dtype = Tensor.data_ptr, attrgetter("dtype")


def _native():
    # here, not at import: a build without the module must import, and say so when asked
    from .. import _cpu  # type: ignore[attr-defined]

    return _cpu


@cache
def tensor_reader() -> Any:
    """C++'s own look at tensors (csrc/module/tensor_reader.h), or None where it does not see what Python sees.

    It depends on how the running torch is built, so it is tried on tensors of every kind first. Without it all works as
    well, and a step costs some microseconds of Python for each tensor.
    """
    if not (2, 10) <= _torch_version() < (3, 0):
        return None
    base, weight = torch.zeros(4, 6), torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    plain, others = (
        [base, base[1:], base[0, 0], torch.zeros(3, 0), weight],
        [base[:, 2:], base.t(), torch._neg_view(base), base.to("meta")],  # pyright: ignore[reportPrivateImportUsage]
    )
    try:
        reader = _native().TensorReader(
            str(Path(torch.__file__).parent / "lib"), "cpu", Tensor, torch.nn.Parameter, base, base._cdata
        )
        seen = [reader.facts(probe) for probe in plain + others]
        grads = [reader.grad(weight)]
        weight.grad = torch.ones_like(weight)
        grads.append(reader.grad(weight))
        reader.bump_version(weight)
    except RuntimeError:
        return None
    pointers = [fact and (fact[0], fact[2]) for fact in seen]
    truth = [(probe.data_ptr(), list(probe.shape)) for probe in plain] + [None for _ in others]
    if pointers != truth or grads != [0, weight.grad._cdata] or weight._version != 1:
        return None
    kinds = [fact[1] for fact in seen[: len(plain)]]  # all float32 but the last
    return reader if len(set(kinds[:-1])) == 1 and kinds[-1] != kinds[0] else None


def read_list(tensors: list[Tensor]) -> Any:
    """The _cpu.TensorList of these tensors, or None: see lists.py."""
    reader = tensor_reader()
    return None if reader is None else _native().read_list(reader, tensors)


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _inverse(scale: Tensor | None) -> float:
    return 1.0 if scale is None else _native().inverse(scale.item())


def _real(value: float) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.float64)


def _whole(value: int) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.int64)


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _codes(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_CODES.__getitem__, map(_dtype, tensors)))


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [t.numel() for t in tensors]


def _columns(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Where the tensors lie, as halfstep._cpu takes it."""
    if isinstance(tensors, PlainList):
        return (tensors.table,)
    return _addresses(tensors), _sizes(tensors), _codes(tensors)


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    total, first_bad = _native().grad_stats(*_columns(grads), _inverse(scale), torch.get_num_threads(), isa)
    return _real(total), _whole(first_bad)


def unscale_(grads: Sequence[Tensor], factor: float) -> Tensor:
    return _whole(_native().scale_(*_columns(grads), factor, torch.get_num_threads(), isa))


def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
    if isinstance(dst, PlainList) and isinstance(src, PlainList):
        columns = (dst.table, src.table)
    else:
        columns = (_addresses(dst), _codes(dst), _addresses(src), _codes(src), _sizes(dst))
    _native().cast_(*columns, stochastic, seed, torch.get_num_threads(), isa)


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

    def watch(self, params: list[Tensor], rows: list[int], states: list[dict[str, Any]]) -> bool:
        """From here on `read` may be used. False if it cannot.

        Args:
            params: all parameters of the optimizer, also those without a gradient. rows: which row each is, or -1.
            states: those that somebody else may have changed.
        """
        reader = tensor_reader()
        if reader is None or any(map(Tensor.is_inference, params)):  # those have no version counter
            return False
        self._plan.watch(reader, params, rows)
        self._states = states
        self._watch = _native().StateWatch(reader, states) if states else None
        return True

    def read(self, params: list[Tensor]) -> bool:
        """Takes the gradients from the parameters if all tensors are where they were; False says nothing.

        Increments the parameters' version counters: only a step comes after this.
        """
        reader = tensor_reader()
        if self._watch is not None and not self._watch.still(reader, self._states):
            return False
        return self._plan.read(reader, params)

    def drop_grads(self) -> None:
        self._plan.drop_grads()

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
        return StepResult(_real(norm), torch.scalar_tensor(skip, dtype=torch.bool), _whole(healed))
