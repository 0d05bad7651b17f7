"""The Triton backend in the interpreter: its launches, its scratch memory, and which addresses its kernels touch."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from halfstep import triton_kernels
from halfstep.ops.triton_gpu import TritonBackend

_MARGIN = 256  # bytes on each side


def interpreted() -> TritonBackend:
    return TritonBackend(torch.device("cpu"))


# ---- launches --------------------------------------------------------------------------------------------------------
class Launch(NamedTuple):
    kernel: str  # without "_kernel"
    programs: int
    constants: dict[str, Any]


@contextmanager
def launches(run: bool = True, before: Callable[[Any], None] = lambda arguments: None) -> Iterator[list[Launch]]:
    """The list holds the launches that were made inside.

    Args:
        run: False counts them only.
        before: gets the arguments of each, by position.
    """
    made: list[Launch] = []

    class Counted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name.removesuffix("_kernel"), kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                made.append(Launch(self.name, math.prod(grid), kwargs))
                before(args)
                if run:
                    self.kernel[grid](*args, **kwargs)

            return launch

    with ExitStack() as stack:
        for module in _modules():
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel"):
                    stack.enter_context(mock.patch.object(module, name, Counted(name, kernel)))
        yield made


def names(made: Iterable[Launch]) -> list[str]:
    return [launch.kernel for launch in made]


def _modules() -> list[Any]:
    found = pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    return [importlib.import_module(module.name) for module in found]


# ---- scratch memory --------------------------------------------------------------------------------------------------
class Scratch:
    """`torch` for a module whose torch.empty() returns tensors full of NaN, or of a senseless integer, among guards."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []
        self.torch = SimpleNamespace(**{**vars(torch), "empty": self._empty})

    def _empty(self, *shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list)) else shape
        bytes_ = math.prod(sizes) * dtype.itemsize
        byte = 0xFF if dtype.is_floating_point else 0x5A
        buffer = torch.full((_MARGIN + bytes_ + _MARGIN,), byte, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, byte))
        return buffer[_MARGIN : _MARGIN + bytes_].view(dtype).view(sizes)

    def assert_intact(self) -> None:
        for buffer, byte in self._buffers:
            for margin in (buffer[:_MARGIN], buffer[-_MARGIN:]):
                assert bool((margin == byte).all()), "a kernel wrote beside its scratch memory"


# ---- addresses -------------------------------------------------------------------------------------------------------
class Access(NamedTuple):
    kind: str  # "load", "store" or "atomic_rmw"
    address: int
    size: int


@contextmanager
def strays(tensors: Iterable[Tensor | None]) -> Iterator[list[Access]]:
    """The list holds what kernels touch inside that lies in none of these tensors and in no argument of a launch.

    Loads count, too, which the interpreter does not check and guard values do not show.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    spans = [span for t in tensors if t is not None for span in _spans(t)]
    found: list[Access] = []

    def look(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        wanted, exists = np.broadcast_arrays(np.asarray(pointers.data), np.asarray(mask.data))
        wanted = wanted[exists].astype(np.uint64)
        inside = np.zeros(wanted.shape, dtype=bool)
        for begin, end in spans:
            inside |= (wanted >= begin) & (wanted <= end - size)
        found.extend(Access(kind, int(address), size) for address in wanted[~inside])

    def watched(name: str, pointers_at: int, mask_at: int) -> Any:
        original = getattr(builder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            look(name.removeprefix("create_").removeprefix("masked_"), args[pointers_at], args[mask_at])
            return original(*args, **kwargs)

        return mock.patch.object(builder, name, call)

    def arguments(given: Any) -> None:
        spans.extend(span for value in given if isinstance(value, Tensor) for span in _spans(value))

    with (
        launches(before=arguments), watched("create_masked_load", 0, 1), watched("create_masked_store", 0, 2),
        watched("create_atomic_rmw", 1, 3),
    ):  # fmt: skip
        yield found


def _spans(tensor: Tensor) -> list[tuple[int, int]]:
    begin = tensor.data_ptr()
    return [(begin, begin + tensor.numel() * tensor.element_size())] if tensor.numel() else []
