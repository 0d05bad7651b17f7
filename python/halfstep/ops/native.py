"""What the native backends share: tensors as the integers C++ takes, its own look at tensors, the rows of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..reference.step import AdamRow
from .layout import PlainList

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_pointer, _dtype = Tensor.data_ptr, attrgetter("dtype")


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def codes(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_CODES.__getitem__, map(_dtype, tensors)))


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [t.numel() for t in tensors]


def columns(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Where the tensors lie, as the native modules take it."""
    if isinstance(tensors, PlainList):
        return (tensors.table,)
    return addresses(tensors), sizes(tensors), codes(tensors)


def pair_columns(dst: Sequence[Tensor], src: Sequence[Tensor]) -> tuple[Any, ...]:
    """The same of two lists whose tensors have the same sizes in pairs."""
    if isinstance(dst, PlainList) and isinstance(src, PlainList):
        return dst.table, src.table
    return addresses(dst), codes(dst), addresses(src), codes(src), sizes(dst)


@torch.inference_mode(False)  # the probes need version counters
def make_reader(native: Any, device: torch.device) -> Any:
    """C++'s own look at tensors (csrc/module/tensor_reader.h), or None where it does not see what Python sees.

    It depends on how the running torch is built, so it is tried on tensors of every kind first. Without it all works as
    well, and a step costs some microseconds of Python for each tensor.
    """
    if not (2, 10) <= _torch_version() < (3, 0):
        return None
    with torch.device(device):
        base, weight = torch.zeros(4, 6), torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        plain, others = (
            [base, base[1:], base[0, 0], torch.zeros(3, 0), weight],
            [base[:, 2:], base.t(), torch._neg_view(base), base.to("meta")],  # pyright: ignore[reportPrivateImportUsage]
        )
    try:
        libraries = str(Path(torch.__file__).parent / "lib")
        reader = native.TensorReader(libraries, device.type, Tensor, torch.nn.Parameter, base, base._cdata)
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


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Rows:
    """The table of a plan in C++: built once, its gradients set or read anew at each step.

    Args:
        native: the module. find_reader: its TensorReader, or None.
    """

    def __init__(self, native: Any, rows: Sequence[AdamRow], find_reader: Callable[[], Any]) -> None:
        self._native, self._find_reader = native, find_reader
        params = [r.param for r in rows]
        self._plan = native.AdamPlan(
            sizes(params), [r.first_index for r in rows], [r.param_id for r in rows], [r.group for r in rows],
            codes(params), codes([r.exp_avg for r in rows]),
        )  # fmt: skip
        split = [r.master is not None and r.master.dtype == torch.int16 for r in rows]
        self._plan.set_tensors(
            addresses(params),
            addresses([r.exp_avg for r in rows]),
            addresses([r.exp_avg_sq for r in rows]),
            addresses([r.max_exp_avg_sq for r in rows]),
            addresses([None if s else r.master for r, s in zip(rows, split, strict=True)]),
            addresses([r.master if s else None for r, s in zip(rows, split, strict=True)]),
            addresses([r.step for r in rows]),
        )

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        self._plan.set_grads(list(map(_pointer, grads)), codes(grads))

    def watch(self, params: list[Tensor], rows: list[int], states: list[dict[str, Any]]) -> bool:
        """From here on `read` may be used. False if it cannot.

        Args:
            params: all parameters of the optimizer, also those without a gradient. rows: which row each is, or -1.
            states: those that somebody else may have changed.
        """
        reader = self._find_reader()
        if reader is None or any(map(Tensor.is_inference, params)):  # those have no version counter
            return False
        self._plan.watch(reader, params, rows)
        self._states = states
        self._watch = self._native.StateWatch(reader, states) if states else None
        return True

    def read(self, params: list[Tensor]) -> bool:
        """Takes the gradients from the parameters if all tensors are where they were; False says nothing.

        Increments the parameters' version counters: only a step comes after this.
        """
        reader = self._find_reader()
        if self._watch is not None and not self._watch.still(reader, self._states):
            return False
        return self._plan.read(reader, params)

    def moved_grads(self) -> tuple[list[int], list[int]] | None:
        """Addresses and dtype codes of this step's gradients; None if the last call gave the same. Only of _cpu."""
        return self._plan.moved_grads()

    def drop_grads(self) -> None:
        self._plan.drop_grads()
