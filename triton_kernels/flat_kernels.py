"""The kernels of flat.py: one tensor, whose address and numbers come by value; float64 numbers as their bits."""

import triton
import triton.language as tl

from .adam_math import inverse, scalars_of
from .elements import size_of
from .elementwise import cast_share, scale_share
from .grad_stats import chunk_sum
from .prologue import total_of
from .update import REMAINDER, update_share


@triton.jit
def _double(bits):
    return tl.full((1,), bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _share(numel, SHARE: tl.constexpr):
    """First element of this program, and how many it has."""
    begin = tl.program_id(0).to(tl.int64) * SHARE
    return begin, tl.minimum(numel - begin, SHARE).to(tl.int32)


@triton.jit
def _scalars(lr, beta1, beta2, eps, decay, DECOUPLED: tl.constexpr, sign, t):
    """As adam_update takes them; every program computes its own."""
    when = tl.full((1,), t, tl.int64)
    s = scalars_of(
        _double(lr),
        _double(beta1),
        _double(beta2),
        _double(eps),
        _double(decay),
        when > 0 if DECOUPLED else when < 0,
        when,
    )
    return (
        tl.sum(s[0], 0), tl.sum(s[1], 0), tl.sum(s[2], 0), tl.sum(s[3], 0), tl.sum(s[4], 0), tl.sum(s[5], 0),
        tl.sum(s[6], 0), tl.sum(s[7], 0), tl.sum(s[8], 0), sign.to(tl.uint32),
    )  # fmt: skip


_ADAM_NUMBERS = [
    "param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "wide", "numel", "lr", "beta1", "beta2", "eps", "decay",
    "sign", "t", "seed", "param_id", "first_index",
]  # fmt: skip


@triton.jit(do_not_specialize=_ADAM_NUMBERS)
def flat_adam_kernel(
    param: tl.int64, grad: tl.int64, exp_avg: tl.int64, exp_avg_sq: tl.int64, max_exp_avg_sq: tl.int64, wide: tl.int64,
    numel: tl.int64, scale, found_inf, healed, lr: tl.int64, beta1: tl.int64, beta2: tl.int64, eps: tl.int64,
    decay: tl.int64, sign: tl.int64, t: tl.int64, seed: tl.int64, param_id: tl.int64, first_index: tl.int64,
    DECOUPLED: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr,
    AMSGRAD: tl.constexpr, AT_RANDOM: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    begin, count = _share(numel, SHARE)
    p, g, s = begin * size_of(PARAM_DTYPE), begin * size_of(GRAD), begin * size_of(STATE)
    w = begin * (2 if HELD == REMAINDER else 4)
    row = (param + p, grad + g, exp_avg + s, exp_avg_sq + s, max_exp_avg_sq + s, wide + w)
    scalars = _scalars(lr, beta1, beta2, eps, decay, DECOUPLED, sign, t)
    random = (param_id.to(tl.uint32), seed.to(tl.uint32), t.to(tl.uint32))
    factor = 1.0 if scale is None else inverse(tl.load(scale))
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) > 0.0, 0, count)
    update_share(
        row, scalars, random, first_index + begin, factor, count, healed,
        PARAM_DTYPE, GRAD, STATE, HELD, AMSGRAD, AT_RANDOM, BLOCK, REST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["address", "numel"])
def flat_scale_kernel(
    address: tl.int64, numel: tl.int64, factor, found_inf,
    DTYPE: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    begin, count = _share(numel, SHARE)
    if scale_share(address + begin * size_of(DTYPE), count, tl.load(factor), DTYPE, BLOCK, REST):
        tl.store(found_inf, 1.0)


@triton.jit(do_not_specialize=["dst", "src", "numel", "seed"])
def flat_cast_kernel(
    dst: tl.int64, src: tl.int64, numel: tl.int64, seed: tl.int64, DST: tl.constexpr, SRC: tl.constexpr,
    AT_RANDOM: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    begin, count = _share(numel, SHARE)
    to, of = dst + begin * size_of(DST), src + begin * size_of(SRC)
    tensor = (begin & 0).to(tl.uint32)  # the first of a list of one
    cast_share(to, of, count, tensor, seed.to(tl.uint32), begin, DST, SRC, AT_RANDOM, BLOCK, REST)


@triton.jit(do_not_specialize=["address", "numel"])
def flat_chunks_kernel(address: tl.int64, numel: tl.int64, scale, sums, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    begin, count = _share(numel, CHUNK)
    factor = 1.0 if scale is None else inverse(tl.load(scale))
    total = chunk_sum(address + begin * size_of(DTYPE), count, factor, DTYPE)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=["chunks"])
def flat_total_kernel(sums, chunks, total):
    tl.store(total, total_of(sums, chunks))
