"""The optimizer phase: grad_stats, l2_norms, unscale_, clip_grad_norm_ on lists, and the fused Adam step.

Functions here take validated tensors, settle layouts, choose the backend and call it. `schemas.py` wraps the same
functions for torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..reference import sum_squares
from ..reference.optimizer import AdamGroup, clip_coefficient
from ..reference.step import AdamRow, StepInputs, StepResult
from . import backend, devices
from .layout import DTYPES, PlainList, as_layout, check_tensor, copy_back, dense_or_copy, is_dense, same_layout
from .row_checks import check_dtypes, check_grad, uses_random_words

__all__ = [
    "AdamGroup",
    "AdamRow",
    "AdamStep",
    "StepInputs",
    "StepResult",
    "clip_grad_norm_",
    "grad_stats",
    "l2_norms",
    "norm_from",
    "unscale_",
]


_pointer, _size, _contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
_negated, _nowhere = Tensor.is_neg, Tensor._is_zerotensor
_dtype, _device, _shape = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")
_DTYPE_SET = frozenset(DTYPES)
_Result = TypeVar("_Result")


def grad_stats(grads: Sequence[Tensor], scale: Tensor | None, forced: str | None = None) -> tuple[Tensor, Tensor]:
    """(sum of squares of the unscaled gradients, index of the first non-finite one or -1): 0-d float64, 0-d int64."""
    if not grads:
        device = None if scale is None else scale.device
        return torch.zeros((), dtype=torch.float64, device=device), _nobody(device)
    chosen = backend.choose(grads[0].device, forced)
    return chosen.grad_stats(grads if isinstance(grads, PlainList) else [g.contiguous() for g in grads], scale)


def l2_norms(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm of every tensor, float64 [n]; of all of them together, 0-d float64)."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    chosen = backend.choose(tensors[0].device)
    plain = tensors if isinstance(tensors, PlainList) else [t.contiguous() for t in tensors]
    sums, total = chosen.sums_of_squares(plain)
    return norm_from(sums), norm_from(total)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor) -> Tensor:
    """grad = round(f32(grad) * inv_scale) in place; 0-d int64 index of the first tensor with a non-finite result.

    inv_scale: 0-d float32 on the gradients' device.
    """
    if not grads:
        return _nobody(inv_scale.device)
    chosen = backend.choose(grads[0].device)
    work = grads if isinstance(grads, PlainList) else [dense_or_copy(g) for g in grads]
    first_bad = chosen.unscale_(work, inv_scale)
    copy_back(grads, work)
    return first_bad


def clip_grad_norm_(grads: Sequence[Tensor], max_norm: Tensor | float) -> Tensor:
    """Scales the gradients in place so that their global norm is at most max_norm; returns the norm before."""
    norm = norm_from(grad_stats(grads, None)[0])
    coefficient = clip_coefficient(norm, max_norm)
    # 1 rewrites every gradient with itself: spared where looking at the coefficient costs nothing
    if not devices.is_host(norm.device) or coefficient != 1.0:
        unscale_(grads, coefficient.float())
    return norm


def norm_from(sums: Tensor) -> Tensor:
    """Square roots of a float64 tensor, correctly rounded, without waiting for its device."""
    return sum_squares.norm_from(sums) if devices.is_host(sums.device) else sums.sqrt()


def _nobody(device: torch.device | None) -> Tensor:
    return torch.full((), -1, dtype=torch.int64, device=device)


class AdamStep:
    """The fused step of one optimizer's parameters on one device: rows checked and laid out once, then run many times.

    The layout of a row is that of its exp_avg; a parameter with gaps or in another order is staged in a buffer of its
    own size. Built again by the caller when `stale()`.

    Args:
        rows: one per parameter, all on one device.
        names: what to call them in messages.
        forced: a backend to insist on, or None.
        stochastic_weight: 16-bit weights without a master round stochastically.
    """

    def __init__(
        self, rows: Sequence[AdamRow], names: Sequence[str], forced: str | None, *, stochastic_weight: bool
    ) -> None:
        self.rows, self._names, self._forced = list(rows), list(names), forced
        self.device = rows[0].param.device
        self._params = [row.param for row in rows]
        self._tensors = [t for row in rows for t in row[:5] if isinstance(t, Tensor)]
        self._counters = [row.step for row in rows]
        self._staged: list[tuple[Tensor, Tensor]] = []  # (parameter, dense buffer)
        work = [self._laid_out(row, name, stochastic_weight) for row, name in zip(rows, names, strict=True)]
        self._layouts = [row.exp_avg for row in work]
        self._all_contiguous = all(map(_contiguous, self._layouts))
        self._strided = [t for t in self._tensors if not t.is_contiguous()]
        self._grads_seen = False
        self._facts = self._current()
        self._backend = backend.choose(self.device, forced)
        self._plan = self._backend.AdamPlan(work)

    def stale(self) -> bool:
        """True if a tensor moved or changed size, dtype or layout (p.data = ..., set_, t_), or the backend changed."""
        return self._facts != self._current() or backend.choose(self.device, self._forced) is not self._backend

    def _current(self) -> tuple:
        """Runs every step for every tensor: what costs is each tensor's first touch (a cache miss), hence one pass."""
        tensors = self._tensors
        facts = zip(
            map(_pointer, tensors), map(_size, tensors), map(_dtype, tensors), map(_contiguous, tensors),
            map(_negated, tensors), strict=True,
        )  # fmt: skip
        counters = self._counters
        strides = [(t.shape, t.stride()) for t in self._strided]
        return list(facts), list(map(_pointer, counters)), list(map(_dtype, counters)), strides

    def watch(self, params: list[Tensor], rows: list[int], states: list[dict[str, Any]]) -> bool:
        """From here on `read` may be used. False if this backend or these tensors do not allow it.

        Args:
            params: all parameters of the optimizer, also those without a gradient. rows: which row each is, or -1.
            states: those that somebody else may have changed.
        """
        watch = getattr(self._plan, "watch", None)
        return watch is not None and self._all_contiguous and not self._staged and watch(params, rows, states)

    def read(self, params: list[Tensor]) -> bool:
        """In place of `stale` and `set_grads`, in the usual case: the backend finds nothing changed, and the gradients.

        False if it cannot tell.
        """
        self._grads, self._logical, self._marked = [], None, True
        return backend.choose(self.device, self._forced) is self._backend and self._plan.read(params)

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        """This step's gradients, in the order of the rows; brought into the rows' layout where they differ."""
        if not self._grads_seen or not self._ready(grads):
            for grad, param, name in zip(grads, self._params, self._names, strict=True):
                check_grad(grad, param, name)
            self._grads_seen = True
            laid_out = [as_layout(g, like) for g, like in zip(grads, self._layouts, strict=True)]
        else:
            laid_out = list(grads)
        try:
            self._plan.set_grads(laid_out)
        except ValueError:
            for grad, name in zip(laid_out, self._names, strict=True):
                if grad.numel() and not grad.data_ptr():
                    raise TypeError(
                        f"the gradient of {name} has no memory of its own ({type(grad).__name__}); wait for it or "
                        "unwrap it, and assign a plain tensor"
                    ) from None
            raise
        self._marked = False  # as written in place
        self._grads = laid_out  # alive until the step has run
        self._logical = None if self._all_contiguous else list(grads)

    def _ready(self, grads: Sequence[Tensor]) -> bool:
        """True in the usual case, in bulk: all is contiguous, of a dtype the kernels know, on the device."""
        try:
            return (
                self._all_contiguous
                and all(map(_contiguous, grads))
                and list(map(_shape, grads)) == list(map(_shape, self._params))
                and not any(map(_negated, grads))  # its memory has the other sign
                and not any(map(_nowhere, grads))
                and set(map(_dtype, grads)) <= _DTYPE_SET
                and set(map(_device, grads)) == {self.device}
            )
        except (RuntimeError, TypeError):  # a sparse gradient, or a subclass that does not say; check_grad names it
            return False

    def check_capturable(self) -> None:
        """RuntimeError if the backend reads numbers on the host in a step, which a CUDA graph would keep for ever."""
        if self._backend.name == "reference":
            raise RuntimeError(
                "plain PyTorch runs the step here and waits for the device, so no CUDA graph can capture it; CUDA and "
                "Triton kernels can be captured (`halfstep doctor` says why they are not used)"
            )

    def run(
        self, groups: Sequence[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        """The whole step: the first pass if asked for, then the update. A skipped step leaves every bit as it was.

        Returns the result, and the index of the first row with a non-finite gradient, or -1; None without a first pass.
        """
        whole = getattr(self._plan, "run", None)
        if whole is not None and not (with_stats and self._logical is not None):
            return self._written(lambda: whole(groups, inputs, with_stats))
        first_bad = None
        if with_stats:
            total, first_bad = self.grad_stats(inputs.scale)
            inputs = inputs._replace(sum_squares=total, first_bad=first_bad)
        return self.update(groups, inputs), first_bad

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `grad_stats`, of this step's gradients (the norm's order is that of the logical elements)."""
        if self._logical is not None:
            return grad_stats(self._logical, scale, self._forced)
        return self._plan.grad_stats(scale)

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        """The second half of `run`, for who adds up the first pass of several devices."""
        return self._written(lambda: self._plan.update(groups, inputs))

    def _written(self, update: Callable[[], _Result]) -> _Result:
        """What is around every update: parameters that are staged, and the news that all are written."""
        for param, buffer in self._staged:
            buffer.copy_(param)
        result = update()
        for param, buffer in self._staged:
            param.copy_(buffer)
        if not self._marked:
            increment_version(self._params)  # what autograd may have saved
        return result

    def drop_grads(self) -> None:
        """Lets go of this step's gradients, whatever became of it: the caller may free them."""
        self._grads, self._logical = [], None
        self._plan.drop_grads()

    def _laid_out(self, row: AdamRow, name: str, stochastic_weight: bool) -> AdamRow:
        check_tensor(row.param, name)
        states = [t for t in (row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq, row.master) if t is not None]
        check_dtypes(row, name)
        for state in (*states, row.step):
            if state.device != row.param.device:
                raise RuntimeError(
                    f"{name} is on {row.param.device}, its optimizer state on {state.device}; move the model before "
                    "the first step, or take the state along: optimizer.load_state_dict(optimizer.state_dict())"
                )
        for state in states:
            if state.shape != row.param.shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(row.param.shape)} but a state of shape "
                    f"{tuple(state.shape)}: it changed after the first step; build a new optimizer"
                )
            if not is_dense(state) or not same_layout(state, row.exp_avg):
                raise RuntimeError(
                    f"{name}: its optimizer states have different memory layouts (strides "
                    f"{[tuple(s.stride()) for s in states]}); make them alike, for example with "
                    "optimizer.load_state_dict(optimizer.state_dict())"
                )
        if uses_random_words(row, stochastic_weight) and not row.exp_avg.is_contiguous():
            raise RuntimeError(
                f"{name}: stochastic rounding needs contiguous states, got strides "
                f"{tuple(row.exp_avg.stride())}, which they keep from the first step; bring them into the new order "
                "with optimizer.load_state_dict(optimizer.state_dict())"
            )
        if is_dense(row.param) and same_layout(row.param, row.exp_avg):
            return row
        buffer = torch.empty_strided(
            row.param.shape, row.exp_avg.stride(), dtype=row.param.dtype, device=row.param.device
        )
        self._staged.append((row.param, buffer))
        return row._replace(param=buffer)
