"""Calls that torch.compile makes in Python, between two graphs. Imported only while it traces: this needs dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = (
    "halfstep keeps books in Python here; call this outside of the compiled function, or compile without fullgraph=True"
)


@torch.compiler.disable(reason=_REASON)  # type: ignore[misc]
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
