"""One-line errors for fields: name, value, allowed range, what to do."""

from __future__ import annotations

from collections.abc import Iterable


def check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{field}={value!r}: expected an integer >= {least}")


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    if value not in (choices := tuple(choices)):
        raise ValueError(f"{field}={value!r}: expected one of {', '.join(choices)}")


def check_fraction(field: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{field}={value!r}: expected a number in [0, 1)")
