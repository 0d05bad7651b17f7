"""Attributes that reach an optimizer through a trainer's wrapper around it."""

from __future__ import annotations

from typing import Any

import torch


class PassedOn:
    """An attribute that a wrapper imitating the optimizer's class passes on, in both directions.

    Lightning's and Fabric's wrappers derive from the optimizer's class and hold the optimizer as `.optimizer`:
    isinstance() and reading work, but what is written stays on the wrapper, and the step inside never sees it. A scaler
    would hand over its scale in vain and the gradients would be taken as they are, scaled.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        held = vars(optimizer)
        if self._name not in held:  # the usual case is the optimizer itself; several of these are read in every step
            held = vars(innermost(optimizer))
        if self._name not in held:
            raise AttributeError(f"{type(optimizer).__name__!r} has no {self._name!r} now")
        return held[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from .untraced import call

            call(setattr, optimizer, self._name, value)
            return
        vars(innermost(optimizer))[self._name] = value

    def __delete__(self, optimizer: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from .untraced import call

            call(delattr, optimizer, self._name)
            return
        self.__get__(optimizer)  # an AttributeError if it is not there
        del vars(innermost(optimizer))[self._name]


def innermost(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
