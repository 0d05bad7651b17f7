"""Numbers of bytes as people write and read them: "512MB", "1.5GiB"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from torch import nn

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(("k", "M", "G", "T"), 1)},
    "KB": 1000,
    **{f"{letter}iB": 1024**power for power, letter in enumerate(("K", "M", "G", "T"), 1)},
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def parse_bytes(value: Any, name: str, *, least: int = 1) -> int:
    """`value` as a whole number of bytes, at least `least`: an integer, or a string with a unit of UNITS (kB is 1000
    bytes, KiB 1024). `name` is what errors call it."""
    wanted = f'{name} must be a number of bytes, at least {least}, such as 512_000_000, "512MB" or "1.5GiB"'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        got = type(value).__name__ if isinstance(value, nn.Module) else repr(value)  # a model's repr is pages long
        raise TypeError(f"{wanted}; got {got}")
    if isinstance(value, str):
        written = _WRITTEN.fullmatch(value)
        if written is None or written[2] not in UNITS:
            raise ValueError(f"{wanted} (units: {', '.join(UNITS)}); got {value!r}")
        size = Fraction(written[1]) * UNITS[written[2]]
    else:
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{wanted}; got {value!r}")
        size = Fraction(value)
    if size.denominator != 1:
        raise ValueError(f"{wanted}; got {value!r}, which is no whole number of bytes")
    if size < least:
        raise ValueError(f"{wanted}; got {value!r}")
    return int(size)


def format_bytes(size: int) -> str:
    """Four digits at most, in units of 1000: 999 B, 12.8 MB."""
    if size < 1000:
        return f"{size} B"
    for unit in ("kB", "MB", "GB", "TB"):
        scaled = size / UNITS[unit]
        if scaled < 999.95 or unit == "TB":
            return f"{scaled:.1f} {unit}"
    raise AssertionError("unreachable")
