"""How many bytes of tensors a piece of code allocates: exact, so a test needs no margin for the process around it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that operators make inside the `with` block, while they live.

    Files that are mapped are no allocation. What a kernel needs inside itself does not show, nor what deepcopy makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage not in self._counted:
            self._counted.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size: int) -> None:
        self.live -= size
