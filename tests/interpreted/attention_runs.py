"""One call of attention on Triton's interpreted kernels: results by name, other tiles, segments looked at a few at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from attention_case import Drawn
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("out", "lse", "log_sum", "dq", "dk", "dv", "dbias")
ALL = (True, True, True, True)


def computed(backend: Any, drawn: Drawn, needs: tuple[bool, bool, bool, bool] = ALL) -> dict[str, Tensor | None]:
    call, d_out, d_lse = drawn
    outputs = backend.attention_forward(call)
    gradients = backend.attention_backward(call, *outputs, d_out, d_lse, needs)
    return dict(zip(NAMES, (*outputs, *gradients), strict=True))


@contextmanager
def sizes(block_m: int | None = None, block_n: int = 32, programs: int | None = None) -> Iterator[None]:
    """Tiles of so many queries and keys; the gradient of a bias shared out to so many programs, at least."""
    from halfstep.triton_kernels.attention import launch
    from halfstep.triton_kernels.attention.tiles import Tile

    with ExitStack() as stack:
        if block_m is not None:
            tile = mock.Mock(return_value=Tile(block_m, block_n, 4, 1, 1))
            stack.enter_context(mock.patch.object(launch, "tile", tile))
        if programs is not None:
            stack.enter_context(mock.patch.object(launch, "_PROGRAMS", programs))
        yield


@contextmanager
def chunks_of(segments: int) -> Iterator[None]:
    import triton.language as tl

    from halfstep.triton_kernels.attention import segments as module

    with mock.patch.object(module, "CHUNK", tl.constexpr(segments)):
        yield
