"""The parameters, buffers and modes with which a block's forward ran, so that its recomputation runs with the same.

A recomputation happens in backward. By then batch normalisation has counted the batch, a spectral norm has moved its
vectors, torch.func.functional_call has put the module's own parameters back, somebody may have called eval(). So
buffers that the forward changes are copied before it; a recomputation gets fresh copies of these copies, and what it
makes of them is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..shards import is_sharded
from . import kept

# Of the modules of a block: which, and whether each is training, without which batch normalisation changes nothing.
Modes = tuple[tuple[int, bool], ...]


@dataclass(eq=False)
class _Place:
    """A parameter or buffer, and the dict of the module that holds it."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor
    version: int
    is_buffer: bool
    copy: Tensor | None = None  # from before the forward, of a buffer

    def changed(self) -> bool:
        return self.holder.get(self.key) is not self.tensor or _version(self.tensor) != self.version


class Changing:
    """Modules whose buffers a block's forward changes, learned from its first forward: the others' need no copies."""

    def __init__(self) -> None:
        self._known: dict[Modes, frozenset[int]] = {}

    def may_change(self, modes: Modes, place: _Place) -> bool:
        return place.is_buffer and (modes not in self._known or id(place.holder) in self._known[modes])

    def learn(self, modes: Modes, places: list[_Place]) -> None:
        """Of each first forward. Batch normalisation writes to two of its buffers without counting it as a write, so
        values are compared, once, and all buffers of a module go with one."""
        if modes not in self._known:
            changed = [place for place in places if place.changed() or not _same_values(place)]
            self._known[modes] = frozenset(id(place.holder) for place in changed if place.is_buffer)


class BlockState:
    """Made right before a forward; `after_forward()` right behind it; then `as_in_forward()` for each recomputation."""

    def __init__(self, module: nn.Module, changing: Changing):
        self._module, self._changing = module, changing
        modules = list(module.modules())
        self._training = [(part, part.training) for part in modules]
        # Batch normalisation changes its buffers in one of them
        self._modes = tuple((id(part), training) for part, training in self._training)
        self._places = [
            _Place(holder, key, tensor, _version(tensor), is_buffer)
            for part in modules
            for holder, is_buffer in ((part._parameters, False), (part._buffers, True))
            for key, tensor in holder.items()
            if tensor is not None
        ]
        copies: dict[int, Tensor] = {}  # one of a buffer that several modules share
        for place in self._places:
            if changing.may_change(self._modes, place):
                if id(place.tensor) not in copies:
                    copies[id(place.tensor)] = _copied(place.tensor)
                place.copy = copies[id(place.tensor)]

    def after_forward(self) -> None:
        """Lets go of copies that nothing needs."""
        self._changing.learn(self._modes, self._places)
        for place in self._places:
            if not self._changing.may_change(self._modes, place):
                place.copy = None
                if place.is_buffer and place.changed():
                    raise RuntimeError(
                        f"the forward of {type(self._module).__name__} changed its buffer {self._name(place)!r}, which "
                        "its first forward under halfstep.checkpoint did not, so no copy was made for the "
                        "recomputation; change it in every forward or outside of the block, or leave this block out "
                        "with blocks="
                    )

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """The block has what its forward had; afterwards what it has now."""
        now: list[tuple[_Place, Any]] = []
        fresh: dict[int, Tensor] = {}
        switched = [(part, training) for part, training in self._training if part.training is not training]
        try:
            for part, training in switched:
                part.training = training
            for place in self._places:
                then = self._then(place, fresh)
                if then is not None:
                    now.append((place, place.holder[place.key]))
                    place.holder[place.key] = then
            yield
        finally:
            for part, training in switched:
                part.training = not training
            for place, tensor in now:
                place.holder[place.key] = tensor

    def _then(self, place: _Place, fresh: dict[int, Tensor]) -> Tensor | None:
        """What the recomputation needs in a place; None if it is there."""
        if place.copy is not None:
            if id(place.copy) not in fresh:
                fresh[id(place.copy)] = _copied(place.copy)
            return fresh[id(place.copy)]
        if _version(place.tensor) != place.version:
            kind = "buffer" if place.is_buffer else "parameter"
            raise RuntimeError(
                f"the {kind} {self._name(place)!r} of a checkpointed {type(self._module).__name__} was written to "
                "between its forward and its backward, so its activations cannot be computed again as they were: run "
                "backward before optimizer.step() or whatever else writes to it (DistributedDataParallel writes to "
                "buffers before each forward, unless broadcast_buffers=False)"
            )
        there = place.holder.get(place.key)
        if there is place.tensor or (not place.is_buffer and _gathered(there, place.tensor)):
            return None
        return place.tensor

    def _name(self, place: _Place) -> str:
        for name, part in self._module.named_modules():
            if place.holder is part._parameters or place.holder is part._buffers:
                return f"{name}.{place.key}" if name else place.key
        return place.key


def _copied(buffer: Tensor) -> Tensor:
    with kept.bookkeeping():
        return buffer.detach().clone()


def _gathered(now: Any, then: Tensor) -> bool:
    """Whether a sharded parameter was exchanged for the whole one, or such a one for a view of a new gathering: for its
    recomputation the wrapper of the block's inner modules has put the right one there."""
    return is_sharded(now) or is_sharded(then) or not isinstance(now, nn.Parameter)


def _version(tensor: Tensor) -> int:
    """What every write in place adds to; tensors made under inference_mode have none, and refuse to be written to."""
    return 0 if torch.is_inference(tensor) else tensor._version


def _same_values(place: _Place) -> bool:
    """Whether a buffer still has the values of its copy; False where that cannot be told."""
    if place.copy is None:
        return True
    if place.tensor.device.type == "meta" or type(place.tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return False
    with kept.bookkeeping():
        return torch.equal(place.tensor, place.copy)
