"""The fused step of one optimizer's parameters on one device, through the Triton kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..reference.optimizer import AdamGroup
from ..reference.step import AdamRow, StepInputs, StepResult
from . import devices, native_cpu
from .native import Rows, addresses, codes, sizes
from .results import result, step_results
from .triton_tables import Pattern, Words, first_parts, tasks

if TYPE_CHECKING:
    from .triton_gpu import TritonBackend

_FLOAT32 = 0
_NOTHING_WIDER, _MASTER, _CHECKED_MASTER, _REMAINDER = range(4)  # how a weight is held: triton_kernels/update.py
_DECOUPLED, _MAXIMIZE, _LR_ON_DEVICE, _LR_IS_DOUBLE = 1, 2, 4, 8  # flags of a group: triton_kernels/layout.py


Grads = tuple[list[int], list[int]]  # addresses, dtype codes


class AdamPlan:
    """As reference.step.AdamPlan, with `run`: statistics, prologue and update.

    Three launches for parameters of one kind (dtypes, master), whatever their number; one update more for each further
    kind, one first pass more for each further dtype of gradients. The table of a plan stays on the device; what changes
    from step to step (learning rates, moved gradients) is copied there without waiting.
    """

    def __init__(self, backend: TritonBackend, rows: Sequence[AdamRow]) -> None:
        self._backend, self._device, self._rows = backend, rows[0].param.device, rows
        self._numels = sizes([r.param for r in rows])
        params, states = codes([r.param for r in rows]), codes([r.exp_avg for r in rows])
        self._kinds = [
            (p, s, _held(row), int(row.max_exp_avg_sq is not None))
            for row, p, s in zip(rows, params, states, strict=True)
        ]
        self._columns = [
            *addresses([r.param for r in rows]), *addresses([r.exp_avg for r in rows]),
            *addresses([r.exp_avg_sq for r in rows]), *addresses([r.max_exp_avg_sq for r in rows]),
            *addresses([r.master for r in rows]), *addresses([r.step for r in rows]), *self._numels,
            *(r.first_index for r in rows), *(r.param_id for r in rows), *(r.group for r in rows),
        ]  # fmt: skip
        self._grads: Grads = ([], [])
        self._reading: Rows | None = None  # C++ that reads gradients
        self._read: Grads = ([], [])  # what it found
        self._fixed: Words | None = None
        self._passes: list[Pattern] = []
        self._updates: list[Pattern] = []
        self._codes: list[int] = []  # that those three are made for
        self._changing: Words | None = None
        self._last: tuple[list[int], list[int]] = ([], [])  # what is in it
        self._captured: list[Words | None] = []

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        where = addresses(grads)
        if len(where) != len(self._numels) or any(n and not a for n, a in zip(self._numels, where, strict=True)):
            raise ValueError(f"expected {len(self._numels)} gradients with memory, got addresses {where}")
        self._grads = where, codes(grads)

    def watch(self, params: list[Tensor], rows: list[int], states: list[dict[str, Any]]) -> bool:
        """As native.Rows: from here on `read` may be used. False if it cannot, also where no C++ is built to read."""
        if self._backend.reader is None:
            return False
        if self._reading is None:
            self._reading = Rows(native_cpu._native(), self._rows, lambda: self._backend.reader)
        return self._reading.watch(params, rows, states)

    def read(self, params: list[Tensor]) -> bool:
        if self._reading is None or not self._reading.read(params):
            return False
        self._read = self._reading.moved_grads() or self._read
        self._grads = self._read
        return True

    def drop_grads(self) -> None:
        self._grads = [], []
        if self._reading is not None:
            self._reading.drop_grads()

    # ---- the two passes --------------------------------------------------------------------------------------------
    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        total, first_bad = result(torch.float64, self._device), result(torch.int64, self._device)
        with self._backend.current():
            columns = self._table()
            _, grads = self._changed(self._last[0])
            sums, firsts, tensor_sums = self._first_pass(columns, grads, scale)
            kernels().finish_stats(sums, firsts, tensor_sums, total, first_bad, self._backend.lanes)
        return total, first_bad

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        return self.run(groups, inputs, with_stats=False)[0]

    def run(
        self, groups: Sequence[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        """The whole step; with its own first pass it also returns the index of the first non-finite gradient."""
        whole, norm, skipped, healed, first_bad = step_results(self._device)
        n, lanes = len(self._numels), self._backend.lanes
        decision = torch.empty(2, dtype=torch.int32, device=self._device)
        records = torch.empty(n * kernels().RECORD_COLUMNS, dtype=torch.float32, device=self._device)
        with self._backend.current():
            columns = self._table()
            settings, grads = self._settings(groups, inputs)
            sums, firsts, tensor_sums = (
                self._first_pass(columns, grads, inputs.scale) if with_stats else (None, None, None)
            )
            kernels().prologue(
                sums, firsts, tensor_sums, inputs.sum_squares, inputs.first_bad, inputs.scale, inputs.found_inf,
                settings, columns[0], n, whole, decision, records, lanes=lanes,
            )  # fmt: skip
            work = zip(self._compiled_for(inputs), columns[2 + len(self._passes) :], strict=True)
            kernels().update(columns[0], grads, n, work, settings, decision, records, whole, lanes=lanes)
        return StepResult(norm, skipped, healed), first_bad if with_stats else inputs.first_bad

    def _first_pass(self, columns: list[Tensor], grads: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n = len(self._numels)
        sums = torch.empty(self._chunks, dtype=torch.float64, device=self._device)
        tensor_sums = torch.empty(n, dtype=torch.float64, device=self._device)
        numels = columns[0][kernels().NUMEL * n : (kernels().NUMEL + 1) * n]
        work = zip(self._passes, columns[2:], strict=False)
        kernels().grad_stats(grads, numels, columns[1], work, scale, sums, self._backend.lanes)
        return sums, columns[1], tensor_sums

    # ---- tables on the device --------------------------------------------------------------------------------------
    def _table(self) -> list[Tensor]:
        """The rows' columns, the numbers of their first chunks, and the work of each pattern of both passes."""
        kinds = self._grads[1]
        if self._fixed is None or kinds != self._codes:
            size = kernels().sizes
            passes = tasks(self._numels, [(code,) for code in kinds], size.CHUNK)
            patterns = [(p, g, *rest) for (p, *rest), g in zip(self._kinds, kinds, strict=True)]
            updates = tasks(self._numels, patterns, size.SHARE)
            firsts = first_parts(self._numels, size.CHUNK)
            self._hold(self._fixed)
            self._fixed = self._words([self._columns, firsts, *passes.values(), *updates.values()])
            self._codes, self._chunks, self._passes, self._updates = kinds, firsts[-1], list(passes), list(updates)
        return self._fixed.pieces()

    def _settings(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> list[Tensor]:
        """The numbers of this step, and where its gradients are: copied when they differ from the last ones."""
        max_norm = -1.0 if inputs.max_norm is None else inputs.max_norm
        settings = [*_bits(max_norm), int(inputs.skip_nonfinite), inputs.seed]
        for group in groups:
            settings += _group_words(group)
        return self._changed(settings)

    def _changed(self, settings: list[int]) -> list[Tensor]:
        changing = settings, self._grads[0]
        if self._changing is None or changing != self._last:
            self._hold(self._changing)
            self._changing, self._last = self._words([*changing]), changing
        return self._changing.pieces()

    def _words(self, lists: list[list[int]]) -> Words:
        return Words(lists, self._backend.memory, self._device)

    def _hold(self, words: Words | None) -> None:
        # freed in a capture, pinned memory would have its events recorded in it
        if words is not None and (words.captured or devices.is_capturing(self._device)):
            self._captured.append(words)

    def _compiled_for(self, inputs: StepInputs) -> list[Pattern]:
        """The update kernel's constants for each pattern (param, grad, state, held, amsgrad)."""
        constants = []
        for param, grad, state, held, amsgrad in self._updates:
            at_random = inputs.stochastic_weight and held == _NOTHING_WIDER and param != _FLOAT32
            checked = held == _MASTER and inputs.heal
            constants.append((param, grad, state, _CHECKED_MASTER if checked else held, amsgrad, int(at_random)))
        return constants


def _held(row: AdamRow) -> int:
    if row.master is None:
        return _NOTHING_WIDER
    return _REMAINDER if row.master.dtype == torch.int16 else _MASTER


def _bits(*numbers: float) -> tuple[int, ...]:
    """float64 numbers as the integers of their bits."""
    return struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))


def _group_words(group: AdamGroup) -> list[int]:
    """As triton_kernels/layout.py has them; of a learning rate that is on the device its address."""
    lr, flags = group.lr, _DECOUPLED * group.decoupled | _MAXIMIZE * group.maximize
    if isinstance(lr, Tensor):
        flags |= _LR_ON_DEVICE | _LR_IS_DOUBLE * (lr.dtype == torch.float64)
        rate = lr.data_ptr()
    else:
        rate = _bits(lr)[0]
    return [rate, *_bits(group.beta1, group.beta2, group.eps, group.weight_decay), flags]


@cache
def kernels() -> Any:
    """halfstep.triton_kernels with its launches: here, not at import, which must not import triton."""
    from ..triton_kernels import launch

    return launch
