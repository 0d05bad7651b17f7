"""Numbers with units as people write them, and one-line errors for numbers out of range."""

from __future__ import annotations

import math
import re
from typing import Any

GB = 10**9  # as in data sheets and papers; GiB = 2**30
TB = 10**12
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": GB, "t": TB, "p": 10**15}
_BINARY_PREFIXES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_NUMBER = r"\s*([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*"


def check_number(
    name: str, value: Any, low: float, high: float, unit: str = "", *, whole: bool = True, remedy: str = ""
) -> None:
    """Raises with the field's name, its value and the range unless low <= value <= high."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if whole else "a number"
        raise TypeError(f"{name}={value!r}: expected {kind} in {shown(low, unit)} .. {shown(high, unit)}{remedy}")
    if not low <= value <= high:
        raise ValueError(f"{name}={shown(value, unit)}: expected {shown(low, unit)} .. {shown(high, unit)}{remedy}")


def shown(value: float, unit: str = "") -> str:
    """A number as a person writes it: 80 GB, 450 GB/s, 989 TFLOP/s, 12,288."""
    if not unit:
        return f"{value:,}"
    label = {"bytes": "B", "bytes/s": "B/s"}.get(unit, unit)
    for prefix, factor in (("P", 10**15), ("T", TB), ("G", GB), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{label}"
    return f"{value:.4g} {label}"


def parse_number(value: str, name: str, *, whole: bool = True) -> int | float:
    """A number without a unit."""
    try:
        return int(value.replace(",", "").replace("_", "")) if whole else float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: expected {'a whole number' if whole else 'a number'}") from None


def parse_bytes(value: int | str, name: str = "bytes") -> int:
    """Bytes of 80GB, 80GiB, 640G, 1.5 TB or a whole number; a decimal prefix counts in powers of 1000."""
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"(?:([kmgtp]i?)?b|([kmgtp]i?)|)", value.lower())
        number = _scaled(match.group(1), match.group(2) or match.group(3) or "") if match else None
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"{name}={value!r}: expected a number with a unit of B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, "
                "for example 80GB or 80GiB"
            )
        return round(number)
    return value


def parse_rate(value: float | str, name: str = "rate") -> float:
    """Bytes/s of 450GB/s or, with a small b for bits as networks are sold, 400Gb/s."""
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([KkMmGgTt]i?)?([Bb])(?:/s|ps)", value)
        if match is None:
            raise ValueError(f"{name}={value!r}: expected bytes or bits a second, for example 450GB/s or 400Gb/s")
        number = _scaled(match.group(1), (match.group(2) or "").lower())
        return number / 8 if match.group(3) == "b" else number
    return value


def parse_flops(value: float | str, name: str = "flops") -> float:
    """FLOP/s of 989T, 989TFLOPS or 989 TFLOP/s."""
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([gtp])(?:flops|flop/s)?", value.lower())
        if match is None:
            raise ValueError(f"{name}={value!r}: expected FLOP/s with a prefix, for example 989T or 989TFLOPS")
        return _scaled(match.group(1), match.group(2))
    return value


def parse_global_batch(value: int | str, sequence: int, name: str = "global_batch") -> float:
    """Sequences in a global batch given as 512, 512-sequences or 1M-tokens; not always a whole number of them.

    1M alone is refused: tokens are meant where somebody counts in millions, but sequences where there is no unit.
    """
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kmg]i?)?[\s-]*(tokens?|sequences?|)", value.lower())
        if match is None or not math.isfinite(float(match.group(1).replace("_", ""))):
            raise ValueError(f"{name}={value!r}: expected tokens or sequences, for example 1M-tokens or 512-sequences")
        if match.group(2) and not match.group(3):
            raise ValueError(f"{name}={value!r}: expected a unit, {value}-tokens or {value}-sequences")
        number = _scaled(match.group(1), match.group(2) or "")
        return number / sequence if match.group(3).startswith("token") else number
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected a whole number of sequences or a text, for example 1M-tokens")
    return value


def _scaled(number: str, prefix: str) -> float:
    value = float(number.replace("_", ""))
    return value * (_BINARY_PREFIXES[prefix] if prefix in _BINARY_PREFIXES else _PREFIXES[prefix])
