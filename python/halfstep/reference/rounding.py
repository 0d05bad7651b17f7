"""What it means to round a float32 to bfloat16 or float16, and to split it into two 16-bit halves.

Everything is integer arithmetic on bit patterns, so that nothing depends on how the device or torch rounds.
Patterns are held as magnitude (31 bits) and sign, because rounding is symmetric in the sign. A float32 as integer u:

    NaN        magnitude > 0x7F800000
    Inf        magnitude = 0x7F800000
    otherwise  the magnitude grows with the absolute value, so adding to it and dropping low bits rounds it
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
QUIET_NAN = 0x7FC00000
HALF_INF = 0x7C00
HALF_QUIET_NAN = 0x7E00
BFLOAT16_QUIET_NAN = 0x7FC0
# Exponent of the smallest normal float16; below it the grid stays at 2**-24
HALF_MIN_EXPONENT = -14


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, ties to even.

    Args:
        x: float32, any shape.
        dtype: torch.float32 (returns x itself), torch.bfloat16 or torch.float16.

    Returns: tensor of `dtype` and x's shape. NaN stays NaN (quiet), overflow goes to Inf, denormals are kept.

    Raises: TypeError for any other dtype.
    """
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    if dtype == torch.bfloat16:
        # half an ulp less one, plus the last kept bit: a tie carries only into an odd result
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return _assemble(rounded, bits, dtype)
    _require_float16(dtype)
    significand, dropped, base = _half_parts(magnitude)
    dropped = dropped.clamp(max=30)  # from 25 on the result is 0; a larger shift would leave int32
    half = torch.ones_like(dropped) << (dropped - 1)
    rounded = (significand + (half - 1) + ((significand >> dropped) & 1)) >> dropped
    return _assemble((base + rounded).clamp(max=HALF_INF), bits, dtype)


def round_stochastic(x: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """Round up in magnitude with a probability equal to the dropped fraction, else down.

    bfloat16 compares the 16 dropped bits with the low 16 bits of the word: exactly unbiased. float16 drops 13 bits,
    or more below 2**-14, and compares the first 32 of them with the whole word.

    Args:
        x: float32, any shape.
        dtype: torch.float32 (returns x itself, words unused), torch.bfloat16 or torch.float16.
        words: int64 of uint32 values, as many as x has elements, in row-major order.

    Returns: tensor of `dtype` and x's shape. Values on the grid are kept exactly; Inf stays Inf, NaN stays NaN (quiet).
        A value between the largest finite number and the next power of two may go to Inf.

    Raises: TypeError for any other dtype.
    """
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    words = words.reshape(x.shape)
    if dtype == torch.bfloat16:
        # an Inf has no low bits to carry, so it stays
        return _assemble((magnitude + (words & 0xFFFF)) >> 16, bits, dtype)
    _require_float16(dtype)
    significand, dropped, base = _half_parts(magnitude.long())
    # 24 significand bits and 32 fraction bits; from 56 dropped bits on nothing is left, and a shift of 64 is undefined
    fixed = (significand << 32) >> dropped.clamp(max=63)
    rounded = (fixed + words) >> 32
    return _assemble((base + rounded).clamp(max=HALF_INF), bits, dtype)


def split_master(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 master into a visible bfloat16 weight and the 16 bits that are missing in it.

    The weight is the upper half rounded half away in magnitude, so the lower half, read as a signed number, is exactly
    what `join_master` has to add to get the master back: no information is lost for any finite number or Inf. (With
    ties to even a tie could leave +0x8000, which no int16 holds.) The weight of a master next to the largest float32
    is Inf, with a negative remainder. A NaN is stored as a quiet NaN with remainder 0.

    Args:
        x: float32, any shape.

    Returns: (weight bfloat16, remainder int16), both of x's shape.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    weight = _assemble((magnitude + 0x8000) >> 16, bits, torch.bfloat16)
    remainder = torch.where(magnitude > INF, 0, bits & 0xFFFF)
    return weight, remainder.to(torch.int16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master behind a split pair; the inverse of `split_master`.

    Pairs that no split makes arise when somebody writes a weight and leaves the old remainder. They join within half a
    bfloat16 ulp of the weight and never change its sign or class: a zero with a negative remainder stays zero of its
    sign, an Inf with a positive remainder stays Inf (the plain sum of the patterns would be NaN), a NaN with any
    remainder stays NaN.

    Args:
        weight: bfloat16, any shape.
        remainder: int16, same shape.

    Returns: float32 of the same shape.
    """
    upper = weight.view(torch.int16).int()
    magnitude = (upper & 0x7FFF) << 16
    joined = (magnitude + remainder.int()).clamp(min=0, max=INF)
    joined = torch.where(magnitude > INF, QUIET_NAN, joined)
    sign = upper & ~MAGNITUDE  # sign extension has put the weight's sign into bit 31
    return (joined | sign).view(torch.float32)


def _half_parts(magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 magnitudes on the float16 grid.

    Returns: (significand of 24 bits, number of its low bits below the grid (13 or more), pattern to add to the kept
    bits). The kept bits of a normal number include the implicit 1, hence exponent field less one; a carry out of them
    runs into the exponent as it should. Everything past float16's range, Inf and NaN too, ends at or above HALF_INF.
    """
    field = magnitude >> 23
    exponent = field.clamp(min=1) - 127
    significand = (magnitude & 0x7FFFFF) | ((field > 0).to(magnitude.dtype) << 23)
    dropped = torch.where(exponent >= HALF_MIN_EXPONENT, 13, -1 - exponent)
    base = (exponent - HALF_MIN_EXPONENT).clamp(min=0) << 10
    return significand, dropped, base


def _assemble(rounded: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """16-bit magnitudes, with NaN and the sign taken from the float32 patterns `bits`."""
    quiet_nan = BFLOAT16_QUIET_NAN if dtype == torch.bfloat16 else HALF_QUIET_NAN
    magnitude = torch.where((bits & MAGNITUDE) > INF, quiet_nan, rounded)
    sign = (bits >> 16) & 0x8000
    return (magnitude | sign).to(torch.int16).view(dtype)


def _require_float16(dtype: torch.dtype) -> None:
    if dtype != torch.float16:
        raise TypeError(f"expected torch.float32, torch.bfloat16 or torch.float16 to round to, got {dtype}")
