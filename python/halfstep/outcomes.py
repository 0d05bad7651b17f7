"""What a step did: results of the device, on their way to the host while both go on working."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .ops import devices

_NOTHING_HEALED, _NOBODY = torch.tensor(0, device="cpu"), torch.tensor(-1, device="cpu")
_SMALL = 1024  # bytes


class HostCopy:
    """A few small tensors, copied to the host behind the work that makes them.

    Those on the CPU are there at once, and are not copied. For those of another device, values() waits for the copy
    alone, not for what was queued after it, which is what tensor.item() would do.
    """

    def __init__(self, *tensors: Tensor) -> None:
        away = {t.device for t in tensors if not devices.is_host(t.device)}
        self._parts = _copied(tensors) if away else [(t, None) for t in tensors]
        # an event on the stream of the copy: torch.Event.record() would take that of the current device
        self._arrivals = [torch.accelerator.current_stream(device).record_event() for device in away]
        self._values: list[Any] | None = None

    def ready(self) -> bool:
        return all(event.query() for event in self._arrivals)

    def values(self) -> list[Any]:
        if self._values is None:
            for event in self._arrivals:
                event.synchronize()
            self._values = [_part(copy, of).tolist() for copy, of in self._parts]
        return self._values


def _copied(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """On the host once the device gets there: (the copy, None), or (a copy of its whole buffer as bytes, the tensor).

    A step's results may be views of one small buffer; then one copy brings all of them.
    """
    buffers: dict[int, Tensor] = {}
    parts: list[tuple[Tensor, Tensor | None]] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes or storage.nbytes() > _SMALL or not tensor.is_contiguous():
            parts.append((tensor.to("cpu", non_blocking=True), None))
            continue
        if storage._cdata not in buffers:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            buffers[storage._cdata] = whole.to("cpu", non_blocking=True)
        parts.append((buffers[storage._cdata], tensor))
    return parts


def _part(copy: Tensor, of: Tensor | None) -> Tensor:
    if of is None:
        return copy
    start = of.storage_offset() * of.itemsize
    return copy[start : start + of.nbytes].view(of.dtype).view(of.shape)


class StepOutcome:
    """Whether a step was skipped, because of whom, and how many masters it healed.

    Of a step that is captured in a CUDA graph the host never learns: nothing is copied, and the answers below raise.

    Args:
        skipped: 0-d bool, kept for who goes on on the device.
        first_bad: 0-d int64 index of the first non-finite gradient, -1 if there is none.
        name_of: what to call the parameter with that index; called only for a message.
        healed: 0-d int64.
    """

    def __init__(
        self, skipped: Tensor, first_bad: Tensor | None = None, name_of: Callable[[int], str] = str,
        healed: Tensor = _NOTHING_HEALED,
    ) -> None:  # fmt: skip
        self.skipped = skipped
        self.captured = devices.is_capturing(skipped.device)
        self._name_of = name_of
        self._copy = None if self.captured else HostCopy(skipped, _NOBODY if first_bad is None else first_bad, healed)

    def ready(self) -> bool:
        """True if the answers below are on the host. Until then each of them waits for this step alone."""
        return self._answers().ready()

    def was_skipped(self) -> bool:
        return self._answers().values()[0]

    def culprit(self) -> str | None:
        """The name of the first parameter whose gradient is not finite."""
        index = self._answers().values()[1]
        return self._name_of(index) if index >= 0 else None

    def healed(self) -> int:
        return self._answers().values()[2]

    def _answers(self) -> HostCopy:
        if self._copy is None:
            raise RuntimeError(
                "the last step was captured in a CUDA graph, so the host has no answer for each replay; read "
                "optimizer.skipped, the tensor that is there right after the capture, when a replay is done"
            )
        return self._copy


def first_of_all(firsts: Sequence[Tensor], places: Sequence[Sequence[int]]) -> Tensor:
    """The first index of a list that lies on several devices, given each device's own answer (waits for them).

    Args:
        firsts: per device, 0-d int64 index into its place, or -1.
        places: per device, which elements of the list lie there, in ascending order.
    """
    if len(firsts) == 1:
        return firsts[0]
    found = [place[int(first)] for first, place in zip(firsts, places, strict=True) if int(first) >= 0]
    return torch.tensor(min(found, default=-1), device="cpu")
