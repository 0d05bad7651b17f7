"""Second pass: one read and write of everything else. Unscales, clips, updates and casts in registers."""

import triton
import triton.language as tl

from .adam_math import adam_update
from .elements import (
    FLOAT32,
    bits_of,
    float_of,
    join_master,
    load,
    load_half_bits,
    narrowed,
    narrowed_at_random,
    size_of,
    split_remainder,
    split_weight,
    store,
    store_half_bits,
    store_words,
    widened,
)
from .layout import (
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST_INDEX,
    HEALED,
    MAX_EXP_AVG_SQ,
    NUMEL,
    PARAM,
    PARAM_ID,
    R_BETA1,
    R_BETA2,
    R_DECAY,
    R_EPS,
    R_ONE_MINUS_BETA1,
    R_ONE_MINUS_BETA2,
    R_SIGN,
    R_SQRT_CORRECTION2,
    R_STEP_SIZE,
    R_T,
    R_WEIGHT_DECAY,
    SEED,
    WIDE,
)
from .philox import STREAM_EXP_AVG, STREAM_EXP_AVG_SQ, STREAM_MAX_EXP_AVG_SQ, STREAM_WEIGHT, random_words

# How a 16-bit weight is held more exactly
NOTHING_WIDER, MASTER, CHECKED_MASTER, REMAINDER = [tl.constexpr(i) for i in range(4)]


@triton.jit
def _load_weight(param, wide, i, exists, PARAM_DTYPE: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr):
    """The float32 weight that the update starts from, and which elements healed: the weight won over its master."""
    healed = exists & False
    if HELD == NOTHING_WIDER:
        p = load(param, i, exists, PARAM_DTYPE, WHOLE)
    elif HELD == REMAINDER:
        weight = load_half_bits(param, i, exists, WHOLE)
        p = join_master(weight, load_half_bits(wide, i, exists, WHOLE))
    else:
        p = load(wide, i, exists, FLOAT32, WHOLE)
        if HELD == CHECKED_MASTER:
            bits = load_half_bits(param, i, exists, WHOLE)
            weight = widened(bits, PARAM_DTYPE)
            healed = exists & (narrowed(p, PARAM_DTYPE) != bits) & ((p == p) | (weight == weight))
            p = tl.where(healed, weight, p)
    return p, healed


@triton.jit
def _store_weight(
    param, wide, i, p, words, exists,
    PARAM_DTYPE: tl.constexpr, HELD: tl.constexpr, AT_RANDOM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if HELD == REMAINDER:
        store_half_bits(param, i, split_weight(p), exists, WHOLE)
        store_half_bits(wide, i, split_remainder(p), exists, WHOLE)
    elif AT_RANDOM:
        store_half_bits(param, i, narrowed_at_random(p, words, PARAM_DTYPE), exists, WHOLE)
    else:
        store(param, i, p, exists, PARAM_DTYPE, WHOLE)
        if HELD != NOTHING_WIDER:
            store_words(wide, i, p, exists, WHOLE)


@triton.jit
def _store_state(
    address, i, x, exists, first, param_id, stream: tl.constexpr, seed, t,
    STATE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A 16-bit state always rounds at random: nearest would freeze the slow decay of v."""
    if STATE == FLOAT32:
        store_words(address, i, x, exists, WHOLE)
    else:
        words = random_words(first, param_id, stream, seed, t, BLOCK, WHOLE)
        store_half_bits(address, i, narrowed_at_random(x, words, STATE), exists, WHOLE)


@triton.jit
def _update_tile(
    row, scalars, random, grad_factor, i, exists, first,
    PARAM_DTYPE: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, AMSGRAD: tl.constexpr,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Elements i of a share; `first` is the index of the first one in the global parameter. Returns which healed."""
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, wide = row
    param_id, seed, t = random
    p, healed = _load_weight(param, wide, i, exists, PARAM_DTYPE, HELD, WHOLE)
    g = load(grad, i, exists, GRAD, WHOLE) * grad_factor
    m = load(exp_avg, i, exists, STATE, WHOLE)
    v = load(exp_avg_sq, i, exists, STATE, WHOLE)
    max_v = v
    if AMSGRAD:
        max_v = load(max_exp_avg_sq, i, exists, STATE, WHOLE)
    p, m, v, max_v = adam_update(g, p, m, v, max_v, scalars, AMSGRAD)
    words = bits_of(p)
    if AT_RANDOM:
        words = random_words(first, param_id, STREAM_WEIGHT, seed, t, BLOCK, WHOLE)
    _store_weight(param, wide, i, p, words, exists, PARAM_DTYPE, HELD, AT_RANDOM, WHOLE)
    _store_state(exp_avg, i, m, exists, first, param_id, STREAM_EXP_AVG, seed, t, STATE, BLOCK, WHOLE)
    _store_state(exp_avg_sq, i, v, exists, first, param_id, STREAM_EXP_AVG_SQ, seed, t, STATE, BLOCK, WHOLE)
    if AMSGRAD:
        _store_state(
            max_exp_avg_sq, i, max_v, exists, first, param_id, STREAM_MAX_EXP_AVG_SQ, seed, t, STATE, BLOCK, WHOLE
        )
    return healed.to(tl.int32)


@triton.jit
def _update_tiles(
    row, scalars, random, first_index, grad_factor, count, tile, tiles,
    PARAM_DTYPE: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, AMSGRAD: tl.constexpr,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Tiles `tile` to `tiles` of a share; returns how many elements healed, int64."""
    healed = tl.zeros((BLOCK // 4 if WHOLE else BLOCK,), tl.int32)
    for k in range(tile, tiles):
        i = k * BLOCK + tl.arange(0, BLOCK)
        here = _update_tile(
            row, scalars, random, grad_factor, i, i < count, first_index + k * BLOCK,
            PARAM_DTYPE, GRAD, STATE, HELD, AMSGRAD, AT_RANDOM, BLOCK, WHOLE,
        )  # fmt: skip
        if WHOLE:  # those of one lane are one counter
            here = tl.sum(tl.reshape(here, (BLOCK // 4, 4)), 1)
        healed += here
    return tl.sum(healed, 0).to(tl.int64)


@triton.jit
def update_share(
    row, scalars, random, first_index, grad_factor, count, healed_out,
    PARAM_DTYPE: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, AMSGRAD: tl.constexpr,
    AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """`count` elements of one tensor, from the addresses in `row` on.

    first_index: of the first one in the whole parameter.
    """
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, wide = row
    aligned = ((param | grad | exp_avg | exp_avg_sq | max_exp_avg_sq | wide) % 16) == 0
    if AT_RANDOM or STATE != FLOAT32:
        aligned = aligned & (first_index % 4 == 0)  # random words come in fours
    whole = tl.where(aligned, count // BLOCK, 0)
    # The rest in smaller tiles, one element to a thread, because masks take many registers; and first, because what it
    # needs would otherwise be kept in registers beside what the loop over whole tiles needs.
    rest = whole * (BLOCK // REST)
    healed = _update_tiles(
        row, scalars, random, first_index, grad_factor, count, rest, tl.cdiv(count, REST),
        PARAM_DTYPE, GRAD, STATE, HELD, AMSGRAD, AT_RANDOM, REST, False,
    )  # fmt: skip
    healed += _update_tiles(
        row, scalars, random, first_index, grad_factor, count, 0, whole,
        PARAM_DTYPE, GRAD, STATE, HELD, AMSGRAD, AT_RANDOM, BLOCK, True,
    )  # fmt: skip
    if HELD == CHECKED_MASTER:  # noqa: SIM102 (known when it is compiled, unlike the next)
        if healed > 0:
            tl.atomic_add(healed_out, healed)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["grads", "work"])
def update_kernel(
    rows, grads, n, work, settings, decision, records, results,
    PARAM_DTYPE: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, AMSGRAD: tl.constexpr,
    AT_RANDOM: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The update of all rows of one kind, one program per SHARE elements of one row.

    Args:
        rows, settings, records, results: tables (layout.py) of n rows. decision: int32 [2], from the prologue.
        grads: int64 [n], where the gradients are. work: int64 of each program (ops/triton_tables.py): row and share.
    """
    task = tl.load(work + tl.program_id(0))
    r, begin = task >> 32, (task & 0xFFFFFFFF) * SHARE
    at = rows + r
    wide = begin * (2 if HELD == REMAINDER else 4)
    param, grad, state = begin * size_of(PARAM_DTYPE), begin * size_of(GRAD), begin * size_of(STATE)
    addresses = (
        tl.load(at + PARAM * n) + param, tl.load(grads + r) + grad, tl.load(at + EXP_AVG * n) + state,
        tl.load(at + EXP_AVG_SQ * n) + state, tl.load(at + MAX_EXP_AVG_SQ * n) + state, tl.load(at + WIDE * n) + wide,
    )  # fmt: skip
    record = records + r
    scalars = (
        tl.load(record + R_BETA1 * n), tl.load(record + R_ONE_MINUS_BETA1 * n), tl.load(record + R_BETA2 * n),
        tl.load(record + R_ONE_MINUS_BETA2 * n), tl.load(record + R_EPS * n), tl.load(record + R_WEIGHT_DECAY * n),
        tl.load(record + R_DECAY * n), tl.load(record + R_STEP_SIZE * n), tl.load(record + R_SQRT_CORRECTION2 * n),
        bits_of(tl.load(record + R_SIGN * n)),
    )  # fmt: skip
    random = (
        tl.load(at + PARAM_ID * n).to(tl.uint32), tl.load(settings + SEED).to(tl.uint32),
        bits_of(tl.load(record + R_T * n)),
    )  # fmt: skip
    grad_factor = float_of(tl.load(decision))
    skip = tl.load(decision + 1) != 0
    count = tl.where(skip, 0, tl.minimum(tl.load(at + NUMEL * n) - begin, SHARE)).to(tl.int32)
    update_share(
        addresses, scalars, random, tl.load(at + FIRST_INDEX * n) + begin, grad_factor, count, results + HEALED,
        PARAM_DTYPE, GRAD, STATE, HELD, AMSGRAD, AT_RANDOM, BLOCK, REST,
    )  # fmt: skip
