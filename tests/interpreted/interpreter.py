"""The Triton backend in the interpreter: its launches, its scratch memory, and which addresses its kernels touch."""

from __future__ import annotations

import importlib
import math
import operator
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    found = pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    return [importlib.import_module(module.name) for module in found]


@contextmanager
def programs_backwards() -> Iterator[None]:
    """The last program of a launch runs first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx
    with mock.patch.object(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z)):
        yield


# ---- scratch memory --------------------------------------------------------------------------------------------------
class Scratch:
    """`torch` for a module whose torch.empty(), empty_like() and empty_strided() return tensors full of NaN, or of a
    senseless integer, among guards."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []
        made = {"empty": self._empty, "empty_like": self._empty_like, "empty_strided": self._empty_strided}
        self.torch = SimpleNamespace(**{**vars(torch), **made})

    def _empty(self, *shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list)) else shape
        return self._guarded(math.prod(sizes), dtype, device).view(sizes)

    def _empty_like(self, like: Tensor) -> Tensor:
        return self._empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _empty_strided(
        self, sizes: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        last = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        return self._guarded(last + 1 if math.prod(sizes) else 0, dtype, device).as_strided(sizes, strides)

    def _guarded(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        bytes_ = numel * dtype.itemsize
        byte = 0xFF if dtype.is_floating_point else 0x5A
        buffer = torch.full((_MARGIN + bytes_ + _MARGIN,), byte, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, byte))
        return buffer[_MARGIN : _MARGIN + bytes_].view(dtype)

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

    spans: list[tuple[int, int]] = []
    elements: list[np.ndarray[Any, Any]] = []  # of tensors with gaps: bytes that belong to an element
    found: list[Access] = []

    def add(t: Tensor) -> None:
        if t.is_contiguous():
            spans.extend(_spans(t))
        elif t.numel():
            elements.append(_bytes_of(t))

    def look(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        wanted, exists = np.broadcast_arrays(np.asarray(pointers.data), np.asarray(mask.data))
        wanted = wanted[exists].astype(np.uint64)
        inside = np.zeros(wanted.shape, dtype=bool)
        for begin, end in spans:
            inside |= (wanted >= begin) & (wanted <= end - size)
        for bytes_ in elements:
            inside |= np.isin(wanted, bytes_) & np.isin(wanted + np.uint64(size - 1), bytes_)
        found.extend(Access(kind, int(address), size) for address in wanted[~inside])

    def watched(name: str, pointers_at: int, mask_at: int) -> Any:
        original = getattr(builder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            look(name.removeprefix("create_").removeprefix("masked_"), args[pointers_at], args[mask_at])
            return original(*args, **kwargs)

        return mock.patch.object(builder, name, call)

    def arguments(given: Any) -> None:
        for value in given:
            if isinstance(value, Tensor):
                add(value)
            elif isinstance(value, tuple):
                arguments(value)

    arguments(tuple(tensors))

    with (
        launches(before=arguments), watched("create_masked_load", 0, 1), watched("create_masked_store", 0, 2),
        watched("create_atomic_rmw", 1, 3),
    ):  # fmt: skip
        yield found


def _spans(tensor: Tensor) -> list[tuple[int, int]]:
    begin = tensor.data_ptr()
    return [(begin, begin + tensor.numel() * tensor.element_size())] if tensor.numel() else []


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    offsets = np.zeros((), dtype=np.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * step
    first = np.unique(offsets) * tensor.element_size() + tensor.data_ptr()
    return (first[:, None] + np.arange(tensor.element_size())).ravel().astype(np.uint64)


@contextmanager
def no_overflow() -> Iterator[None]:
    """Sums, differences and products of less than 64 bits fail if they do not fit; but for those of kernels that say
    sanitize_overflow=False."""
    from triton.language.semantic import TritonSemantic

    with mock.patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", _assert_no_overflow):
        yield


def _assert_no_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    assert kind == rhs.type.scalar
    exact = getattr(operator, binary_op.__name__)(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    message = f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
    assert exact.min() >= kind.get_int_min_value(), message
    assert exact.max() <= kind.get_int_max_value(), message
