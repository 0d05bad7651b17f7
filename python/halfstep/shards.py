"""DTensor parameters: their local part, and where it lies in the whole. The one place that knows about sharding."""

from __future__ import annotations

import math
import sys

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """True for a torch.distributed.tensor.DTensor (without importing torch.distributed.tensor)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(tensor: Tensor, name: str) -> None:
    """Raise TypeError for a DTensor: a list function would see the local part alone, or no memory at all."""
    if is_sharded(tensor):
        raise TypeError(f"{name} is a DTensor; pass its local part (tensor.to_local()) and reduce over the mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor on this rank, sharing its memory; the tensor itself if it is not a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def ranks(tensor: Tensor) -> int:
    """How many ranks share the tensor; 1 if it is not a DTensor."""
    return tensor.device_mesh.size() if is_sharded(tensor) else 1  # type: ignore[attr-defined]


def first_index(tensor: Tensor) -> int | None:
    """Row-major index, in the whole tensor, of the first local element; None if the local elements are not one run."""
    if not is_sharded(tensor) or all(p.is_replicate() for p in tensor.placements):  # type: ignore[attr-defined]
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    if tuple(shape[1:]) != tuple(tensor.shape[1:]):
        return None
    return offset[0] * math.prod(tensor.shape[1:])
