"""What autograd holds in place of a tensor that it saves: where its bytes are, and how they were a tensor.

torch compares the version of a saved tensor at backward, but not where hooks have a say; so it is compared here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import devices

if TYPE_CHECKING:
    from .tape import Stored


class Stays:
    """The tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def restored(self) -> Tensor:
        if self._version is not None:
            check_version(self._tensor, self._tensor._version, self._version)
        return self._tensor


class Moves:
    """One of the tensors that live in a stored storage.

    Args:
        plain: the tensor or, where its signs are lazy, a copy: what lies in the storage.
    """

    def __init__(self, tensor: Tensor, plain: Tensor, stored: Stored) -> None:
        self._stored = stored
        stored.users.add(self)
        self._geometry = plain.storage_offset(), plain.shape, plain.stride()
        self._version = tensor._version
        # Shares the version and nothing else: the memory may go
        self._versioned = tensor.detach()
        self._versioned.data = tensor.new_empty(0)

    def restored(self) -> Tensor:
        check_version(self._versioned, self._versioned._version, self._version)
        tape = self._stored.tape
        refuse_capture(tape.transfers.device)
        with tape.lock:
            memory = tape.memory(self._stored, self)
        tensor = torch.empty(0, dtype=self._versioned.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), *self._geometry)  # type: ignore[call-overload]


def refuse_capture(device: torch.device) -> None:
    if devices.is_capturing(device):
        raise RuntimeError(
            "offload_activations: a CUDA graph is being captured, and a replay would copy from and to host memory that "
            "has gone to others by then; capture without it, or offload without capturing"
        )


def version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def check_version(tensor: Tensor, now: int, then: int) -> None:
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor saved inside offload_activations is at version {now}; expected version {then} "
            "instead. Do not write into it between forward and backward, or save a clone(); "
            "torch.autograd.set_detect_anomaly(True) names the operator that saved it"
        )
