"""Between the passes: adds up the chunks, decides, advances the counters and computes each parameter's scalars.

One program, so that nothing has to be agreed upon; the additions in order make it longer the more tensors there are.
"""

import triton
import triton.language as tl

from .adam_math import grad_factor_of, scalars_of
from .elements import float_of
from .layout import (
    BETA1,
    BETA2,
    DECOUPLED,
    EPS,
    FIRST_BAD,
    FLAGS,
    GROUP,
    GROUP_WORDS,
    HEADER_WORDS,
    HEALED,
    LR,
    LR_IS_DOUBLE,
    LR_ON_DEVICE,
    MAX_NORM,
    MAXIMIZE,
    NORM,
    R_SIGN,
    R_T,
    SKIP_NONFINITE,
    SKIPPED,
    STEP_COUNTER,
    WEIGHT_DECAY,
)

_IN_FLIGHT = tl.constexpr(16)  # loads that do not wait for each other


@triton.jit
def _double_at(words):
    return tl.load(words).to(tl.float64, bitcast=True)


# ---- statistics ------------------------------------------------------------------------------------------------------
@triton.jit
def _sum_tensors(chunk_sums, firsts, n, tensor_sums, BLOCK: tl.constexpr):
    """Writes every tensor's sum, its chunks in order; returns the first tensor whose sum is not finite, or n."""
    first_bad = n
    for first in range(0, n, BLOCK):
        tensor = first + tl.arange(0, BLOCK)
        exists = tensor < n
        chunk = tl.load(firsts + tensor, mask=exists, other=0)
        end = tl.load(firsts + tensor + 1, mask=exists, other=0)
        total = tl.zeros((BLOCK,), tl.float64)
        for _ in range(0, tl.max(end - chunk, 0), _IN_FLIGHT):
            for k in tl.static_range(_IN_FLIGHT):
                total = total + tl.load(chunk_sums + chunk + k, mask=chunk + k < end, other=0.0)
            chunk = chunk + _IN_FLIGHT
        tl.store(tensor_sums + tensor, total, mask=exists)
        finite = ((total.to(tl.int64, bitcast=True) >> 52) & 0x7FF) != 0x7FF
        first_bad = tl.minimum(first_bad, tl.min(tl.where(finite, n, tensor), 0))
    tl.debug_barrier()  # the sums are there for all threads
    return first_bad


@triton.jit
def total_of(tensor_sums, n):
    """In the order of the tensors."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, n, _IN_FLIGHT):
        for k in tl.static_range(_IN_FLIGHT):
            total = total + tl.load(tensor_sums + first + k, mask=first + k < n, other=0.0)
    return total


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["firsts", "total", "first_bad"])
def finish_stats_kernel(chunk_sums, firsts, n, tensor_sums, total, first_bad, BLOCK: tl.constexpr):
    """Statistics of a list: tensor_sums float64 [n], total float64 [1], first_bad int64 [1], -1 where all are finite.

    Args:
        chunk_sums, firsts: as grad_stats_kernel leaves and takes them; firsts has n + 1 entries.
    """
    bad = _sum_tensors(chunk_sums, firsts, n, tensor_sums, BLOCK)
    tl.store(first_bad, tl.where(bad == n, -1, bad).to(tl.int64))
    tl.store(total, total_of(tensor_sums, n))


# ---- decision --------------------------------------------------------------------------------------------------------
@triton.jit
def _decide(total, bad, scale, found_inf, settings, results, decision):
    """Writes norm, skip, first bad gradient and factor; returns whether the step is skipped."""
    norm = tl.sqrt(total)
    loss_scale = 1.0 if scale is None else tl.load(scale)
    skip = (tl.load(settings + SKIP_NONFINITE) != 0) & (bad >= 0)
    if found_inf is not None:
        skip = skip | (tl.load(found_inf) > 0.0)
    factor = grad_factor_of(norm, _double_at(settings + MAX_NORM), loss_scale)
    tl.store(results + NORM, norm.to(tl.int64, bitcast=True))
    tl.store(results + SKIPPED, skip.to(tl.int64))
    tl.store(results + HEALED, 0)
    tl.store(results + FIRST_BAD, bad)
    tl.store(decision, factor.to(tl.int32, bitcast=True))
    tl.store(decision + 1, skip.to(tl.int32))
    return skip


# ---- records ---------------------------------------------------------------------------------------------------------
@triton.jit
def _learning_rate(word, flags):
    """float64 of a group's word: the number itself, or what lies on the device at that address."""
    on_device, double = (flags & LR_ON_DEVICE) != 0, (flags & LR_IS_DOUBLE) != 0
    wide = tl.load(word.to(tl.pointer_type(tl.float64)), mask=on_device & double, other=0.0)
    narrow = tl.load(word.to(tl.pointer_type(tl.float32)), mask=on_device & (double == 0), other=0.0)
    there = tl.where(double, wide, narrow.to(tl.float64))
    return tl.where(on_device, there, word.to(tl.float64, bitcast=True))


@triton.jit
def _write_record(out, n, exists, group, t):
    """The scalars of rows whose groups' words are at `group`, at their steps t."""
    flags = tl.load(group + FLAGS)
    lr = _learning_rate(tl.load(group + LR), flags)
    beta1, beta2, decay = _double_at(group + BETA1), _double_at(group + BETA2), _double_at(group + WEIGHT_DECAY)
    s = scalars_of(lr, beta1, beta2, _double_at(group + EPS), decay, (flags & DECOUPLED) != 0, t)
    for column in tl.static_range(R_SIGN):
        tl.store(out + column * n, s[column], mask=exists)
    sign = tl.where((flags & MAXIMIZE) != 0, 0x80000000, 0).to(tl.uint32)
    tl.store(out + R_SIGN * n, float_of(sign), mask=exists)
    tl.store(out + R_T * n, float_of(t.to(tl.uint32)), mask=exists)


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["firsts", "given_total", "given_bad", "scale", "found_inf"],
)
def prologue_kernel(
    chunk_sums, firsts, tensor_sums, given_total, given_bad, scale, found_inf, settings, rows, n, results, decision,
    records, BLOCK: tl.constexpr,
):  # fmt: skip
    """All that lies between the passes of a step of n rows.

    Args:
        chunk_sums, firsts, tensor_sums: of a first pass, as finish_stats_kernel's; null without one. Then:
        given_total, given_bad: null (no norm, nobody bad), or float64 [1], int64 [1].
        scale, found_inf: null, or float32 [1].
        settings, rows, results, records: tables (layout.py). decision: int32 [2], bits of the factor, and skip.
    """
    if chunk_sums is not None:
        first = _sum_tensors(chunk_sums, firsts, n, tensor_sums, BLOCK)
        bad = tl.where(first == n, -1, first).to(tl.int64)
        total = total_of(tensor_sums, n)
    else:
        total = tl.full((), float("nan"), tl.float64) if given_total is None else tl.load(given_total)
        bad = tl.full((), -1, tl.int64) if given_bad is None else tl.load(given_bad)
    skip = _decide(total, bad, scale, found_inf, settings, results, decision)
    advancing = tl.where(skip, 0, n)
    for begin in range(0, n, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        exists = row < n
        group = tl.load(rows + GROUP * n + row, mask=exists, other=0)
        counter = tl.load(rows + STEP_COUNTER * n + row, mask=exists, other=0).to(tl.pointer_type(tl.int64))
        t = tl.load(counter, mask=exists, other=0) + 1
        _write_record(records + row, n, exists, settings + HEADER_WORDS + group * GROUP_WORDS, t)
        tl.store(counter, t, mask=row < advancing)
