"""`optimizer.state`, which knows whose states somebody else may hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, MutableMapping, ValuesView
from typing import Any

import torch
from torch import Tensor


class StateMap(defaultdict):
    """A defaultdict of dicts, as torch.optim's, that remembers which states it has handed out.

    The step has pointers into the state tensors, so it must notice when one is replaced (state["exp_avg"] = ...) or
    moved (.data = ..., resize_). Looking at every tensor in every step costs more than a small step itself; but only
    what somebody got hold of can have changed. halfstep itself reads through the methods called `own_...`, which leave
    no trace. Copies and pickles are plain defaultdicts.
    """

    def __init__(self, states: Any = ()) -> None:
        super().__init__(dict, states)
        self.handed_out: dict[Tensor, None] = dict.fromkeys(
            super().__iter__()
        )  # the caller holds what it gave; a set, in order
        self.changes = 0  # how often states were put in, replaced or taken out

    def own_state(self, param: Tensor) -> dict[str, Any]:
        """The state of a parameter, made if it is missing."""
        found = super().get(param)
        if found is None:
            found = {}
            self.own_put(param, found)
        return found

    def own_put(self, param: Tensor, state: dict[str, Any]) -> None:
        super().__setitem__(param, state)
        self.changes += 1

    def own_items(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        return super().items()

    def own_clear(self) -> None:
        super().clear()
        self.handed_out.clear()
        self.changes += 1

    # ---- what everybody else calls ---------------------------------------------------------------------------------
    def _hand_out(self, *params: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(
                msg="a step in the same graph would not know of reads or writes of states; take them out of the "
                "optimizer outside of the compiled function"
            )
        self.handed_out.update(dict.fromkeys(params or super().__iter__()))

    def _taken_out(self, param: Any) -> None:
        self.handed_out.pop(param, None)  # or the parameter would live as long as the optimizer
        self.changes += 1

    def __missing__(self, param: Tensor) -> dict[str, Any]:
        self._hand_out(param)
        return self.own_state(param)

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        self._hand_out(param)
        return super().__getitem__(param)

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._hand_out(param)
        self.own_put(param, state)

    def __delitem__(self, param: Tensor) -> None:
        self._taken_out(param)
        super().__delitem__(param)

    def __iter__(self) -> Iterator[Tensor]:  # overridden, or dict(self) would copy without asking the methods here
        return super().__iter__()

    def get(self, param: Any, default: Any = None) -> Any:
        return self[param] if param in self else default  # noqa: SIM401 - that would call itself

    def setdefault(self, param: Tensor, default: Any = None) -> Any:
        if param not in self:
            self[param] = default
        return self[param]

    def items(self) -> Any:
        return _Items(self)

    def values(self) -> Any:
        return _Values(self)

    def pop(self, param: Any, *default: Any) -> Any:
        self._taken_out(param)
        return super().pop(param, *default)

    def popitem(self) -> Any:
        param, state = super().popitem()
        self._taken_out(param)
        return param, state

    def clear(self) -> None:
        self.own_clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._hand_out()
        self.changes += 1

    def __ior__(self, other: Any) -> StateMap:  # type: ignore[override]
        self.update(other)
        return self

    def __or__(self, other: Any) -> Any:
        return defaultdict(dict, {**self, **other}) if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return defaultdict(dict, {**other, **self}) if isinstance(other, dict) else NotImplemented

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:  # deepcopy and pickle
        return defaultdict, (dict,), None, None, iter(super().items())


class _Items(ItemsView):
    """Hands a state out when it is reached: who keeps a view also gets the states that are made later."""

    def __contains__(self, item: Any) -> bool:
        return item[0] in self._mapping and super().__contains__(item)  # asking makes no state

    def __reversed__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return ((param, self._mapping[param]) for param in reversed(self._mapping))


class _Values(ValuesView):
    def __reversed__(self) -> Iterator[dict[str, Any]]:
        return (self._mapping[param] for param in reversed(self._mapping))


class BorrowedStates:
    """What a step calls of StateMap, for a mapping that somebody has assigned to `optimizer.state`.

    It stays theirs: they see the states that are made, and may write to it unseen, so every step looks at all of it.
    """

    changes = 0
    handed_out: dict[Tensor, None] = {}  # noqa: RUF012 - nothing is put in

    def __init__(self, states: MutableMapping[Tensor, dict[str, Any]]) -> None:
        self._states = states

    def own_state(self, param: Tensor) -> dict[str, Any]:
        return self._states.setdefault(param, {})

    def own_items(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        return self._states.items()

    def __contains__(self, param: Tensor) -> bool:
        return param in self._states
