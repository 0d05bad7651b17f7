"""The Triton backend, for GPUs of NVIDIA and AMD: tensors in, tables of addresses to `halfstep.triton_kernels`.

Nothing is compiled at install time, and nothing here waits for the device. Tensors are dense; a row's share one layout.
Results are tensors on the device that the stream's work has yet to fill.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.step import AdamRow
from . import devices, native_cpu, triton_attention
from .attention_call import AttentionCall
from .layout import PlainList
from .native import addresses, codes, make_reader, sizes
from .results import result
from .triton_plan import AdamPlan, kernels
from .triton_tables import HostMemory, Pattern, Words, first_parts, tasks

_LEAST = (8, 0)  # compute capability
_TABLES = 16  # of lists, kept at a time
NOT_INSTALLED = "Triton is not installed (pip install triton)"


def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def why_not(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on this device; None if they can. Nothing is compiled for it."""
    if device.type != "cuda":  # which is what torch calls AMD's GPUs too
        return f"Triton has kernels for GPUs, not for {device.type} tensors"
    if not installed():
        return NOT_INSTALLED
    try:
        import triton

        if kernels().INTERPRETED:
            return "TRITON_INTERPRET is set, and Triton's interpreter cannot follow a GPU's addresses: unset it"
        with torch.cuda.device(device):
            triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever it is: a driver, a C compiler for Triton's own launcher
        return (
            f"Triton does not start here ({type(error).__name__}: {error}); it needs a C compiler (gcc or clang) and "
            "Python's headers at run time"
        )
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _LEAST:
        return f"Triton has no code for this GPU (compute capability {'.'.join(map(str, capability))}, it needs 8.0)"
    return None


class TritonBackend:
    """The operators of one device; for Triton's interpreter that is the CPU."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory(device)
        self.lanes = 32 if device.type == "cpu" else torch.cuda.get_device_properties(device).warp_size
        self._tables: OrderedDict[Any, ListTable] = OrderedDict()
        self._captured: list[ListTable] = []

    @cached_property
    def reader(self) -> Any:
        """C++'s own look at this device's tensors (native.py): the CPU's module has it, which may be missing."""
        try:
            return make_reader(native_cpu._native(), self.device)
        except ImportError:
            return None

    def read_list(self, tensors: list[Tensor]) -> Any:
        """C++'s TensorList of these tensors, or None: see lists.py."""
        return None if self.reader is None else native_cpu._native().read_list(self.reader, tensors)

    def current(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device)

    def grad_stats(self, grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
        _, total, first_bad = self._statistics(grads, scale)
        return total, first_bad

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        each, total, _ = self._statistics(tensors, None)
        return each, total

    def _statistics(self, tensors: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of squares of each tensor, and of all; the first tensor that is not finite, or -1."""
        total, first_bad = result(torch.float64, self.device), result(torch.int64, self.device)
        each = torch.empty(len(tensors), dtype=torch.float64, device=self.device)
        with self.current():
            table = self._table([tensors], kernels().sizes.CHUNK)
            (where,), numels, firsts, work = table.pieces()
            sums = torch.empty(table.parts, dtype=torch.float64, device=self.device)
            kernels().grad_stats(where, numels, firsts, work, scale, sums, self.lanes)
            kernels().finish_stats(sums, firsts, each, total, first_bad, self.lanes)
        return each, total, first_bad

    def unscale_(self, grads: Sequence[Tensor], factor: Tensor) -> Tensor:
        first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)
        with self.current():
            (where,), numels, _, work = self._table([grads], kernels().sizes.SHARE).pieces()
            kernels().scale(where, numels, work, factor, first_bad, self.lanes)
        return first_bad

    def cast_(self, dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
        with self.current():
            (to, of), numels, _, work = self._table([dst, src], kernels().sizes.SHARE).pieces()
            kernels().cast(to, of, numels, work, stochastic, seed, self.lanes)

    def accumulate_(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        with self.current():
            (to, of), numels, _, work = self._table([dst, src], kernels().sizes.SHARE).pieces()
            kernels().accumulate(to, of, numels, work, self.lanes)

    def attention_forward(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        with self.current():
            return triton_attention.forward(call)

    def attention_backward(self, *arguments: Any) -> triton_attention.Gradients:
        with self.current():
            return triton_attention.backward(*arguments)

    def AdamPlan(self, rows: Sequence[AdamRow]) -> AdamPlan:  # noqa: N802 (as the other backends' class)
        return AdamPlan(self, rows)

    def _table(self, lists: list[Sequence[Tensor]], share: int) -> ListTable:
        """Of these tensors, which may have one already: what is in it says all about it."""
        key = (share, *map(_key, lists))
        table = self._tables.pop(key, None)
        if table is None:
            where, lengths, dtypes = zip(*map(_columns, lists), strict=True)
            table = ListTable(where, lengths[0], list(zip(*dtypes, strict=True)), share, self)
        self._tables[key] = table
        if len(self._tables) > _TABLES:
            _, oldest = self._tables.popitem(last=False)
            if oldest.words.captured or devices.is_capturing(self.device):  # see AdamPlan._hold
                self._captured.append(oldest)
        return table


def _columns(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Addresses, sizes and dtype codes."""
    if isinstance(tensors, PlainList):
        return tensors.table.columns()
    return addresses(tensors), sizes(tensors), codes(tensors)


def _key(tensors: Sequence[Tensor]) -> Any:
    """What is the same for two lists of the same columns, read in the same way."""
    return tensors.table.key() if isinstance(tensors, PlainList) else tuple(map(tuple, _columns(tensors)))


class Pieces(NamedTuple):
    addresses: list[Tensor]  # of each list
    numels: Tensor
    firsts: Tensor
    work: list[tuple[Pattern, Tensor]]


class ListTable:
    """Where the tensors of one or two lists are, and the work of each pattern of dtypes."""

    def __init__(
        self, where: Sequence[list[int]], numels: list[int], patterns: list[Pattern], share: int, backend: TritonBackend
    ) -> None:
        work, firsts = tasks(numels, patterns, share), first_parts(numels, share)
        self.parts, self._lists, self._patterns = firsts[-1], len(where), list(work)
        self.words = Words([*where, numels, firsts, *work.values()], backend.memory, backend.device)

    def pieces(self) -> Pieces:
        pieces = self.words.pieces()
        numels, firsts, *work = pieces[self._lists :]
        return Pieces(pieces[: self._lists], numels, firsts, list(zip(self._patterns, work, strict=True)))


@cache
def of_device(device: torch.device) -> TritonBackend:
    return TritonBackend(device)
