"""Calls that torch.compile makes in Python, between two graphs. Imported only while it traces: this needs dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = (
    "halfstep's functions on one tensor hand addresses to their kernels, which a graph cannot follow; call them "
    "outside of the compiled function, or compile without fullgraph=True"
)


@torch.compiler.disable(reason=_REASON)
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
