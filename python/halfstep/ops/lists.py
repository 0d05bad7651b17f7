"""C++'s look at a whole list at once, which finds it to be the usual case or leaves it to the checks of each tensor.

Those checks name what is wrong, stage what is laid out otherwise, and cost some microseconds of Python a tensor.
A list that is accepted here is one that they would accept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import backend
from .layout import PlainList


def read(tensors: list[Tensor]) -> PlainList | None:
    """The list, if all are plain torch.Tensors or Parameters, contiguous in the memory of one device, of dtypes the
    kernels know.

    None says nothing: a tensor may be of a subclass, of more than five dimensions, strided, or what no call takes; or
    the backend needs no table.
    """
    if torch.compiler.is_compiling() or not tensors:
        return None
    if not isinstance(tensors[0], Tensor) or tensors[0].device.type not in ("cpu", "cuda"):
        return None
    read_list = getattr(backend.choose(tensors[0].device), "read_list", None)
    table = None if read_list is None else read_list(tensors)
    return None if table is None else PlainList(tensors, table)


def read_pairs(dst: list[Tensor], src: list[Tensor]) -> tuple[PlainList, PlainList] | None:
    """Both lists as `read` gives them, if each dst has the shape of its src and all can be written at once.

    That is, no dst shares memory with another, nor with a src unless that is the same object in its own pair.
    """
    targets = read(dst)
    sources = None if targets is None else read(src)
    if targets is None or sources is None or not targets.table.has_shapes_of(sources.table):
        return None
    return (targets, sources) if targets.table.apart(sources.table) else None


def are_float32(tensors: PlainList) -> bool:
    return tensors.table.are_float32()


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """True if these came from `read` and no two share memory. False says nothing."""
    return isinstance(tensors, PlainList) and tensors.table.apart()
