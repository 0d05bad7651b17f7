"""Frozen dataclasses to what JSON knows, and back by their annotations."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [to_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def from_plain(kind: type[T], found: Any) -> T:
    """A value of the annotated type; fields that the class does not have are an error of its constructor."""
    return _value(kind, found)


def _value(kind: Any, found: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        if found is None:
            return None
        kinds = [each for each in get_args(kind) if each is not type(None)]
        # Of several classes the one that has these fields.
        kind = next((each for each in kinds[1:] if {f.name for f in fields(each)} == set(found)), kinds[0])
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _value(hints.get(name, Any), each) for name, each in found.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict:
        return {key: _value(arguments[1], each) for key, each in found.items()}
    if origin in (tuple, frozenset):
        return origin(_value(arguments[0], each) for each in found)
    return found
