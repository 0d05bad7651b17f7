"""The native CUDA backend: tensors in, device addresses to `halfstep._cuda`. Nothing here waits for the device.

Tensors are dense; a row's share one layout. Results are tensors on the device that the stream's work has yet to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..reference.optimizer import AdamGroup
from ..reference.step import AdamRow, StepInputs, StepResult
from . import devices
from .native import Rows, addresses, columns, make_reader, pair_columns
from .results import result, step_results


class CudaBackend:
    """The operators of one native module: halfstep._cuda, or in tests the same kernels under the emulator.

    Under the emulator the "device" is the host: its tensors are CPU tensors, its device number 0, its stream 0.
    """

    name = "native"

    def __init__(self, module: Any) -> None:
        self.module = module
        self._readers: dict[str, Any] = {}

    def grad_stats(self, grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
        device = grads[0].device
        total, first_bad = result(torch.float64, device), result(torch.int64, device)
        with self.workspace(device) as allocate:
            where = addresses([scale, None, total, first_bad])
            self.module.grad_stats(*columns(grads), *where, allocate, *queue(device))
        return total, first_bad

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        device = tensors[0].device
        each = torch.empty(len(tensors), dtype=torch.float64, device=device)
        total, first_bad = result(torch.float64, device), result(torch.int64, device)
        with self.workspace(device) as allocate:
            where = addresses([None, each, total, first_bad])
            self.module.grad_stats(*columns(tensors), *where, allocate, *queue(device))
        return each, total

    def unscale_(self, grads: Sequence[Tensor], factor: Tensor) -> Tensor:
        device = grads[0].device
        first_bad = result(torch.int64, device)
        with self.workspace(device) as allocate:
            self.module.scale_(*columns(grads), *addresses([factor, first_bad]), allocate, *queue(device))
        return first_bad

    def cast_(self, dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
        self.module.cast_(*pair_columns(dst, src), stochastic, seed, *queue(dst[0].device))

    def accumulate_(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        self.module.accumulate_(*pair_columns(dst, src), *queue(dst[0].device))

    def AdamPlan(self, rows: Sequence[AdamRow]) -> AdamPlan:  # noqa: N802 (as the other backends' class)
        return AdamPlan(self, rows)

    def read_list(self, tensors: list[Tensor]) -> Any:
        """The module's TensorList of these tensors, or None: see lists.py."""
        reader = self.reader(tensors[0].device)
        return None if reader is None else self.module.read_list(reader, tensors)

    def reader(self, device: torch.device) -> Any:
        if device.type not in self._readers:
            self._readers[device.type] = make_reader(self.module, device)
        return self._readers[device.type]

    def workspace(self, device: torch.device) -> Workspace:
        return Workspace(device)


class Workspace:
    """Device memory of one call, from torch's caching allocator, which hands it on only to later work on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._kept = device, []

    def __enter__(self) -> Callable[[int], int]:
        return self.allocate

    def __exit__(self, *_: object) -> None:
        self._kept.clear()

    def allocate(self, size: int) -> int:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._kept.append(buffer)
        return buffer.data_ptr()


class AdamPlan(Rows):
    """As reference.step.AdamPlan, with `run`: statistics, prologue and update.

    Launches: three for up to 580 tensors of one usual kind (dtypes, master), or 406 small ones (16,384 elements) of any
    kinds; at most six for 1,000 small ones, and one more for each usual kind that has large ones among them.
    """

    def __init__(self, backend: CudaBackend, rows: Sequence[AdamRow]) -> None:
        self._device = rows[0].param.device
        self._backend = backend
        super().__init__(backend.module, rows, lambda: backend.reader(self._device))

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        total, first_bad = result(torch.float64, self._device), result(torch.int64, self._device)
        with self._backend.workspace(self._device) as allocate:
            self._plan.grad_stats(*addresses([scale, total, first_bad]), allocate, *queue(self._device))
        return total, first_bad

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        return self.run(groups, inputs, with_stats=False)[0]

    def run(
        self, groups: Sequence[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        """The whole step; with its own first pass it also returns the index of the first non-finite gradient."""
        _, norm, skipped, healed, first_bad = step_results(self._device)
        given = [inputs.scale, inputs.found_inf, inputs.sum_squares, inputs.first_bad]
        where = [*given, norm, skipped, healed, first_bad]
        numbers, rates = _numbers(groups)
        with self._backend.workspace(self._device) as allocate:
            self._plan.run(
                numbers, rates, addresses(where), -1.0 if inputs.max_norm is None else inputs.max_norm,
                inputs.skip_nonfinite, inputs.seed, inputs.stochastic_weight, inputs.heal, with_stats, allocate,
                *queue(self._device),
            )  # fmt: skip
        return StepResult(norm, skipped, healed), first_bad if with_stats else inputs.first_bad


def queue(device: torch.device) -> tuple[int, int]:
    """(device number, the caller's current stream on it)."""
    return device.index or 0, devices.stream(device)


def _numbers(groups: Sequence[AdamGroup]) -> tuple[Sequence[AdamGroup], list[tuple[int, int, bool]]]:
    """The groups' numbers, and (group, address, is float64) of each learning rate that lies on the device."""
    if not any(isinstance(group.lr, Tensor) for group in groups):
        return groups, []
    rates = [
        (i, group.lr.data_ptr(), group.lr.dtype == torch.float64)
        for i, group in enumerate(groups)
        if isinstance(group.lr, Tensor)
    ]
    return [g._replace(lr=0.0) if isinstance(g.lr, Tensor) else g for g in groups], rates


@cache
def of_module(module: Any) -> CudaBackend:
    return CudaBackend(module)


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """True if a module built for `archs` ("80-real,90a-real,120") has code for a device of this compute capability.

    Machine code ("-real") runs on devices of its own major version from its minor version on, PTX (without) is compiled
    by the driver for all later ones. Code with an `a` is for exactly one version, with an `f` for one major version.
    """
    for arch in archs.split(","):
        number, _, kind = arch.partition("-")
        digits = number.rstrip("af")
        built = (int(digits[:-1]), int(digits[-1]))
        if number.endswith("a"):
            runs = built == capability
        elif kind == "real" or number.endswith("f"):
            runs = built[0] == capability[0] and built <= capability
        else:
            runs = built <= capability
        if runs:
            return True
    return False


def arch_names(archs: str) -> list[str]:
    """What `archs` holds, in NVIDIA's words: "90-real,120" -> ["sm_90", "sm_120", "compute_120 (PTX)"]."""
    kinds = [arch.partition("-")[::2] for arch in archs.split(",")]
    machine_code = [f"sm_{number}" for number, kind in kinds if kind != "virtual"]
    return machine_code + [f"compute_{number} (PTX)" for number, kind in kinds if kind != "real"]
