"""A CUDA backend for tensors on the host: what a call is given goes to the device, and comes back changed.

Whole storages travel, so a view that is not aligned is none there either, and guard values around it are guarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.reference import AdamGroup
from halfstep.reference.step import AdamRow, StepInputs, StepResult


class Travellers:
    """Tensors' copies on the device. Views of one storage stay views of one storage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[Any, Tensor, Tensor]] = {}  # by address: kept alive, on the host, on the device

    def there(self, tensor: Any) -> Any:
        """The tensor's copy; anything else stays what it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = storage, host, host.to(self._device, copy=True)
        away = self._storages[storage._cdata][2].untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=self._device).set_(away, *place)

    def all_there(self, tensors: Sequence[Any]) -> list[Any]:
        return [self.there(t) for t in tensors]

    def come_back(self) -> None:
        for _, host, away in self._storages.values():
            host.copy_(away)


class Mirror:
    """The backend's operators, for tensors on the host."""

    name = "native"

    def __init__(self, backend: Any, device: torch.device) -> None:
        self.backend, self.device = backend, device

    def _call(self, name: str, *given: Any, **options: Any) -> Any:
        travellers = Travellers(self.device)
        moved = [travellers.all_there(g) if isinstance(g, (list, tuple)) else travellers.there(g) for g in given]
        results = getattr(self.backend, name)(*moved, **options)
        travellers.come_back()
        return _home(results)

    def grad_stats(self, grads: Sequence[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._call("grad_stats", grads, scale)

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._call("sums_of_squares", tensors)

    def unscale_(self, grads: Sequence[Tensor], factor: Tensor) -> Tensor:
        return self._call("unscale_", grads, factor)

    def cast_(self, dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool, seed: int) -> None:
        self._call("cast_", dst, src, stochastic=stochastic, seed=seed)

    def accumulate_(self, dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
        self._call("accumulate_", dst, src)

    def AdamPlan(self, rows: Sequence[AdamRow]) -> MirroredPlan:  # noqa: N802 (as the backends' class)
        return MirroredPlan(self, rows)


class MirroredPlan:
    """A plan of the backend whose rows, gradients and results are on the host."""

    def __init__(self, mirror: Mirror, rows: Sequence[AdamRow]) -> None:
        self._travellers = Travellers(mirror.device)
        self._plan = mirror.backend.AdamPlan([AdamRow(*self._travellers.all_there(row)) for row in rows])

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        self._plan.set_grads(self._travellers.all_there(grads))

    def grad_stats(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return _home(self._plan.grad_stats(self._travellers.there(scale)))

    def update(self, groups: Sequence[AdamGroup], inputs: StepInputs) -> StepResult:
        return self._step("update", groups, inputs)

    def run(
        self, groups: Sequence[AdamGroup], inputs: StepInputs, with_stats: bool
    ) -> tuple[StepResult, Tensor | None]:
        return self._step("run", groups, inputs, with_stats)

    def _step(self, method: str, groups: Sequence[AdamGroup], inputs: StepInputs, *more: Any) -> Any:
        moved = [AdamGroup(*self._travellers.all_there(group)) for group in groups]
        results = getattr(self._plan, method)(moved, StepInputs(*self._travellers.all_there(inputs)), *more)
        self._travellers.come_back()
        return _home(results)


def _home(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results.cpu()
    if isinstance(results, StepResult):
        return StepResult(*map(_home, results))
    return tuple(map(_home, results)) if isinstance(results, tuple) else results
