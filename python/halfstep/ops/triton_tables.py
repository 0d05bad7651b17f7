"""What the Triton kernels read from device memory: where tensors are, and which program does what part of which.

The words are put together on the host and copied without waiting, and only when they differ from those that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from . import devices

Pattern = tuple[int, ...]  # dtype codes and the like, by which a kernel is compiled


def tasks(numels: Sequence[int], patterns: Sequence[Pattern], share: int) -> dict[Pattern, list[int]]:
    """The work of every pattern's programs: row << 32 | part, for each `share` elements of each row of the pattern."""
    work: dict[Pattern, list[int]] = {}
    for row, (numel, pattern) in enumerate(zip(numels, patterns, strict=True)):
        if numel:
            work.setdefault(pattern, []).extend(range(row << 32, (row << 32) + -(-numel // share)))
    return work


def first_parts(numels: Sequence[int], share: int) -> list[int]:
    """The number of each row's first part, counted over all rows; and last how many parts there are."""
    firsts = [0]
    for numel in numels:
        firsts.append(firsts[-1] + -(-numel // share))
    return firsts


class HostMemory:
    """Pinned memory, from which copies to a device do not wait; also in a capture, when none may be made.

    A graph copies again at every replay: what a capture takes comes from a slab and is never used for anything else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab, self._used, self._largest = _on_host([]), 0, 1 << 14

    def filled(self, words: list[int]) -> Tensor:
        """The words, int64.

        Raises: RuntimeError in a capture that needs more than calls before it did.
        """
        if devices.is_host(self._device):
            return _on_host(words)
        if not devices.is_capturing(self._device):
            self._largest = max(self._largest, len(words))
            if self._slab.numel() - self._used < 4 * self._largest:
                self._slab, self._used = _pinned(8 * self._largest, self._device), 0
            return _pinned(len(words), self._device).copy_(_on_host(words))
        free = self._slab[self._used : self._used + len(words)]
        if free.numel() < len(words):
            raise RuntimeError(
                "a CUDA graph captures a step or list that needs more pinned memory than is set aside; run the "
                "same calls once before the capture"
            )
        self._used += len(words)
        return free.copy_(_on_host(words))


def _on_host(words: list[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64, device="cpu")  # not torch's default device


@torch.inference_mode(False)  # a slab that was made in inference mode could not be written outside of it
def _pinned(count: int, device: torch.device) -> Tensor:
    """torch gives such memory out again only when the copies from it are done."""
    return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


class Words:
    """Lists of int64 words as tensors on a device.

    A CUDA graph that was captured with them copies them itself, at every replay, to memory of its own; both stay for
    as long as this object: `captured` says whether its owner has to keep it.
    """

    captured = False

    def __init__(self, lists: Sequence[Sequence[int]], memory: HostMemory, device: torch.device) -> None:
        self._sizes = [len(one) for one in lists]
        self._host, self._device = memory.filled(list(chain.from_iterable(lists))), device
        self._held: list[list[Tensor]] = []
        self._pieces: list[Tensor] = []
        self._stream: int | None = None

    def pieces(self) -> list[Tensor]:
        """One tensor for each list, there for what comes next on the current stream."""
        if devices.is_capturing(self._device):
            self.captured, self._stream = True, None
            self._held.append(self._upload())
            return self._held[-1]
        stream = devices.stream(self._device)
        if stream != self._stream:  # another stream may come to them before they are there
            self._pieces, self._stream = self._upload(), stream
        return self._pieces

    def _upload(self) -> list[Tensor]:
        return list(self._host.to(self._device, non_blocking=True).split(self._sizes))
