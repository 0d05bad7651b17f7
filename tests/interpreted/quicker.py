"""Triton's interpreter in a fraction of its time, with the same results: most goes into what it does again and again.

What is replaced has the same names in Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@contextmanager
def quicker() -> Iterator[None]:
    with ExitStack() as stack:
        _patch_once_a_launch(stack)
        replace = mock.patch.object
        # Sums, differences and products again in 64 bits, for an assertion that nobody makes without debug=True
        stack.enter_context(replace(TritonSemantic, "binary_op_sanitize_overflow_impl", mock.Mock()))
        stack.enter_context(replace(tl.block_type, "__init__", _known_block_type(tl.block_type.__init__)))
        stack.enter_context(replace(tl.tensor, "__init__", _known_tensor_shape(tl.tensor.__init__)))
        stack.enter_context(replace(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype)))
        yield


def _patch_once_a_launch(stack: ExitStack) -> None:
    """A launch patches triton.language and restores it at its end. Each call of a function within a kernel patches it
    again, though a function before it had the same modules patched; here it does not."""
    patched: set[str] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @cache
    def languages(fn: Callable[..., Any]) -> frozenset[str]:
        """What `patch` finds in the function's module."""
        return frozenset(lang.__name__ for lang in (tl, tl.core) if any(x is lang for x in fn.__globals__.values()))

    def patch_what_is_new(fn: Callable[..., Any]) -> Any:
        if languages(fn) <= patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.update(languages(fn))
        return patch(fn)

    def launch_with_nothing_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    stack.enter_context(mock.patch.object(interpreter, "_patch_lang", patch_what_is_new))
    stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launch_with_nothing_patched))


def _by_name(numpy_dtype: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Types of pointers cannot be hashed; their names can."""
    known: dict[str, np.dtype[Any]] = {}

    def of(kind: Any) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = numpy_dtype(kind)
        return known[kind.name]

    return of


def _known_block_type(initialise: Callable[..., None]) -> Callable[..., None]:
    """A type never changes, so those of one element and shape are one in all that they hold."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in getattr(shape, "values", shape)]
        key = (element_ty.name, *sizes)
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return init


def _known_tensor_shape(initialise: Callable[..., None]) -> Callable[..., None]:
    """Nor do the shapes of tensors."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            initialise(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return init
