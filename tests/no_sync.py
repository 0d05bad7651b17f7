"""Whoever waits for a device fails: for code that must queue its work and go on.

A GPU is not needed. Either CPU tensors stand in for the device's (`forbid_waits()`): every read of a tensor is then a
wait. Or the tensors are on the meta device (`forbid_waits("meta")`), which tells host and device apart, so that copies
between the two are seen as well; nothing can compute there, hence `NeverReads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_clock import DeviceClock
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import outcomes
from halfstep.ops import devices
from halfstep.ops.optimizer import AdamGroup, AdamRow, StepInputs, StepResult

_aten = torch.ops.aten
# They return numbers or shapes that depend on values
_READING_OPERATORS = {
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten._unique2,
    _aten.allclose,
}  # fmt: skip
_INDEXING_OPERATORS = {_aten.index, _aten.index_put_, _aten.index_put}  # by a mask, they count it first
# Some never come to the dispatcher: a CPU tensor is read by pointer
_READING_METHODS = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__",
)  # fmt: skip


@contextmanager
def forbid_waits(device: str = "cpu", *, but_for: int = 0) -> Iterator[DeviceClock]:
    """AssertionError where something inside waits for a device of this type ("cpu" or "meta").

    Yields the clock by which copies to the host arrive: not before `finish()`, or until somebody waits for that copy
    alone, which must happen `but_for` times.
    """
    waits: list[str] = []

    def fail(what: str) -> None:
        waits.append(what)
        raise AssertionError(f"{what} waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        clock = DeviceClock(patch)
        if device != "cpu":  # there is a host beside it
            patch.setattr(devices, "is_host", lambda where: where.type == "cpu")
            patch.setattr(outcomes, "_copied", lambda tensors: [(_arrived(t), None) for t in tensors])
        _forbid_methods(patch, device, fail)
        with _Watch(device, fail):
            yield clock
        assert not waits, waits  # also one that somebody has caught
        assert clock.waits == but_for


def _arrived(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _forbid_methods(patch: pytest.MonkeyPatch, device: str, fail: Callable[[str], None]) -> None:
    def guarded(owner: Any, name: str, waits: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if waits(*args, **options):
                fail(name)
            return original(*args, **options)

        patch.setattr(owner, name, call)

    def is_read(tensor: Tensor, *_: Any, **__: Any) -> bool:
        return tensor.device.type == device

    def is_brought(tensor: Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> bool:
        return is_read(tensor) and not non_blocking and "cpu" in (*args[:1], options.get("device"))

    def is_sent(data: Any, *_: Any, device: Any = None, **__: Any) -> bool:
        # from unpinned memory; the host is "cpu" by name, what stands for a device is a torch.device
        return device not in (None, "cpu") and not isinstance(data, Tensor)

    for name in _READING_METHODS:
        guarded(Tensor, name, is_read)
    guarded(Tensor, "to", is_brought)
    guarded(torch, "tensor", is_sent)
    guarded(torch, "as_tensor", is_sent)


class _Watch(TorchDispatchMode):
    def __init__(self, device: str, fail: Callable[[str], None]) -> None:
        super().__init__()
        self._device, self._fail = device, fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.overloadpacket in _READING_OPERATORS and any(t.device.type == self._device for t in given):
            self._fail(str(func))
        if func.overloadpacket in _INDEXING_OPERATORS and _masks(args[1]) and given[0].device.type == self._device:
            self._fail(f"{func} by a mask")
        result = func(*args, **kwargs)
        if func.overloadpacket is _aten._to_copy:
            self._check_copy(func, given[0], result, kwargs.get("non_blocking", False))
        elif func.overloadpacket is _aten.copy_:
            self._check_copy(func, args[1], args[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        return result

    def _check_copy(self, func: Any, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        types = source.device.type, target.device.type
        crosses = sorted(types) == sorted(("cpu", self._device)) and types[0] != types[1]
        # to the device it waits even if it says non_blocking, unless the memory is pinned
        if crosses and not (non_blocking and types[0] == self._device):
            self._fail(f"{func} from {types[0]} to {types[1]}")


def _masks(indices: Sequence[Tensor | None]) -> bool:
    return any(index.dtype is torch.bool for index in indices if index is not None)


@contextmanager
def capturing() -> Iterator[None]:
    """As if every device's stream was captured in a CUDA graph; not the host's, as far as `devices` knows one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: not devices.is_host(device))
        yield


class NeverReads:
    """A backend that computes nothing and reads nothing; it insists that what it is given is on its device.

    Args:
        whole: its plans run a step as one, as those of CUDA do.
    """

    name = "never reads"

    def __init__(self, *, whole: bool = True) -> None:
        self.AdamPlan = WholePlan if whole else Plan

    def grad_stats(self, grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
        _check(scale, torch.float32, grads[0].device)
        return _number(0.0, torch.float64, grads[0]), _number(-1, torch.int64, grads[0])

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return tensors[0].new_zeros(len(tensors), dtype=torch.float64), _number(0.0, torch.float64, tensors[0])

    def unscale_(self, grads: Sequence[Tensor], factor: Tensor) -> Tensor:
        _check(factor, torch.float32, grads[0].device)
        return _number(-1, torch.int64, grads[0])

    def cast_(self, dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
        pass

    def accumulate_(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        pass


class Plan:
    def __init__(self, rows: Sequence[AdamRow]) -> None:
        self.like = rows[0].param
        for row in rows:
            assert {t.device for t in row[:6] if isinstance(t, Tensor)} == {self.like.device}

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        assert {grad.device for grad in grads} == {self.like.device}

    def drop_grads(self) -> None:
        pass

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return NeverReads().grad_stats([self.like], scale)

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        device = self.like.device
        for value, dtype in (
            (inputs.scale, torch.float32),
            (inputs.found_inf, torch.float32),
            (inputs.sum_squares, torch.float64),
            (inputs.first_bad, torch.int64),
        ):
            _check(value, dtype, device)
        for group in groups:
            lr = group.lr
            if isinstance(lr, Tensor):
                assert lr.dtype in (torch.float32, torch.float64)
                _check(lr, lr.dtype, device)
        results = ((0.0, torch.float64), (False, torch.bool), (0, torch.int64))
        return StepResult(*(_number(value, dtype, self.like) for value, dtype in results))


class WholePlan(Plan):
    def run(
        self, groups: Sequence[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        return self.update(groups, inputs), _number(-1, torch.int64, self.like) if with_stats else None


def _number(value: float, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=dtype, device=like.device)


def _check(value: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    if value is not None:
        assert (value.dtype, value.device, value.shape) == (dtype, device, ())
