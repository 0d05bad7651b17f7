"""Triton's kernels of attention in the interpreter: the cases of every backend, by the float64 formula and its error
budget; what may not depend on the tiles or on the order of programs.

Guards: a row, key or head too many or too few; a feature that one of the kernels does not have; a rounding too many;
what is written beside a tensor; a dropout mask, or bits, that another tile or order changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_budget import judge, judged
from attention_case import Case, Drawn
from attention_cases import CASES, CORE
from attention_runs import DTYPES, computed, sizes
from bits import assert_same_bits
from interpreter import launches, programs_backwards
from torch import Tensor

from halfstep.ops import backend as backends
from halfstep.ops.attention import attention
from halfstep.reference.attention import dropout_words

pytestmark = pytest.mark.usefixtures("one_thread")

BY_NAME = {case.name: case for case in CASES}
OTHERS = [case for case in CASES if not case.core]


def runs(case: Case, number: int) -> list[Any]:
    """A case in one dtype, a core case in all. On the oldest Triton, whose interpreter rounds an fma twice, a core case
    runs in one of 16 bits."""
    on_both = DTYPES[1 + number % 2] if case.core else None
    dtypes = DTYPES if case.core else [DTYPES[number % 3]]
    return [
        pytest.param(case, dtype, id=f"{case.name}, {dtype}", marks=() if dtype == on_both else (pytest.mark.newest,))
        for dtype in dtypes
    ]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [run for cases in (CORE, OTHERS) for number, case in enumerate(cases) for run in runs(case, number)],
)
def test_within_the_budget(backend, case: Case, dtype: torch.dtype) -> None:
    drawn = case.draw(dtype)
    judge(drawn, computed(backend, drawn))


# ---- in float64 ------------------------------------------------------------------------------------------------------
FEATURES: dict[str, dict[str, Any]] = {
    "plain": dict(heads=(4, 2), right=0, d_lse=True),
    "softcap and ALiBi": dict(softcap=2.0, alibi="BH", scale=1.0),
    "bias and mask": dict(bias="1HQ1", mask="B11K"),
    "bias and dropout": dict(bias="BHQK", dropout_p=0.4, left=3, right=4),
    "varlen": dict(q_lengths=(3, 0, 6), k_lengths=(5, 2, 4), left=2, right=3, dropout_p=0.2),
}


@pytest.mark.newest  # the oldest Triton's interpreter has no products of float64
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_those_of_the_outputs(backend, name: str) -> None:
    """In float64, by differences; the outputs are the formula's."""
    call, d_out, d_lse = Case(name, lengths=(5, 7), dims=(8, 8), **FEATURES[name]).draw(torch.float64)
    inputs = [x if x is None else x.requires_grad_() for x in (call.q, call.k, call.v, call.bias)]

    def outputs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return attention(call._replace(q=q, k=k, v=v, bias=bias))

    with backends.override(backend):
        assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True, check_undefined_grad=False)
    found, truth = backend.attention_forward(call), judged(Drawn(call, d_out, d_lse)).truth
    for got, want in zip(found, (truth["out"], truth["lse"], truth["log_sum"]), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)  # the series in tanh: 2e-9


# ---- tiles and orders ------------------------------------------------------------------------------------------------
TILED = [
    "window to both sides",
    "window, top left, more queries: the last see nothing",
    "grouped heads in threes",
    "bias of keys and heads",
    "varlen, window",
    "dropout, window, ALiBi, softcap",
]


@pytest.mark.newest
@pytest.mark.parametrize("tile", [(16, 16), (64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("name", TILED)
def test_other_tiles(backend, name: str, tile: tuple[int, int]) -> None:
    drawn = BY_NAME[name].draw(torch.float32)
    with sizes(*tile):
        judge(drawn, computed(backend, drawn))


@pytest.mark.newest
@pytest.mark.parametrize("right", [None, 0, 1, 15, 16])
@pytest.mark.parametrize("left", [None, 1, 16])
def test_windows_that_end_with_a_block(backend, left: int | None, right: int | None) -> None:
    """Or one before or after it: of queries, whose blocks lie at 0, 16 and 32, and of keys, with a shift of one."""
    drawn = Case("ends", (34, 33), heads=(2, 1), left=left, right=right).draw(torch.float32)
    with sizes(16, 16):
        judge(drawn, computed(backend, drawn))


ORDERED = {
    "dense": Case("dense", (35, 40), heads=(2, 1), bias="B11K", dropout_p=0.2, right=0),
    "varlen": Case("varlen", q_lengths=(17, 5), k_lengths=(33, 15), heads=(2, 1)),
}


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_programs_changes_no_bit(backend, name: str) -> None:
    drawn = ORDERED[name].draw(torch.float16)
    once = computed(backend, drawn)
    with programs_backwards():
        again = computed(backend, drawn)
    for result, x in once.items():
        if x is not None:
            assert_same_bits(again[result], x, result)


@pytest.mark.parametrize(
    ("name", "programs", "shares"),
    [
        ("bias of keys for all", 2, 1),
        ("bias of keys for all", 5, 3),
        ("bias of keys for all", 512, 8),
        ("one bias", 3, 3),
    ],
)
def test_the_gradient_of_a_bias_is_shared_out(backend, name: str, programs: int, shares: int) -> None:
    """To any number of programs, with the same bits in any order."""
    drawn = BY_NAME[name].draw(torch.float32)
    arguments: list[Any] = []
    with sizes(16, programs=programs), launches(before=arguments.append):
        once = computed(backend, drawn)
    d_bias = arguments[-1][4]
    assert d_bias.shape == (shares, *drawn.call.bias.shape)
    judge(drawn, once)
    with sizes(16, programs=programs), programs_backwards():
        assert_same_bits(computed(backend, drawn)["dbias"], once["dbias"], "dbias")


# ---- dropout ---------------------------------------------------------------------------------------------------------
def masks(backend: Any, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """What forward and backward keep: values and gradients are the identity, so P, or its transpose, comes out."""
    call, _, _ = drawn
    B, Hq, Lq, _ = call.q.shape
    Lk, Dv = call.v.shape[2:]
    call = call._replace(v=torch.eye(Lk, Dv).expand(B, call.v.shape[1], Lk, Dv))
    outputs = backend.attention_forward(call)
    d_out = torch.eye(Lq, Dv).expand(B, Hq, Lq, Dv)
    _, _, dv, _ = backend.attention_backward(call, *outputs, d_out, None, (False, False, True, False))
    return outputs[0][..., :Lk] != 0, dv[..., :Lq].transpose(2, 3) != 0


SEEDS = [0, 0x0123456789ABCDEF, -2]


@pytest.mark.parametrize("seed", SEEDS)
def test_dropout_keeps_what_the_words_say(backend, seed: int) -> None:
    """In forward and backward, whatever the tile. One word is the threshold itself, and is kept."""
    drawn = Case("words", (35, 39), heads=(2, 2), dims=(16, 40), dropout_p=0.5).draw(torch.float32)
    seeds = torch.tensor([seed])
    words = dropout_words(seeds, range(2), range(2), range(35), range(39))
    threshold = int(words.flatten().sort().values[2000])
    call = drawn.call._replace(seed=seeds, dropout_p=threshold / 2**32)
    assert call.drop_below == threshold
    for tile in ((16, 16), (32, 64), (64, 32)):
        with sizes(*tile):
            forward, backward = masks(backend, drawn._replace(call=call))
        assert torch.equal(forward, words >= threshold)
        assert torch.equal(backward, words >= threshold)


@pytest.mark.parametrize("dropout_p", [1e-9, 0.75, 1 - 2**-33])
def test_dropout_of_nothing_and_of_everything(backend, dropout_p: float) -> None:
    drawn = Case("extremes", (17, 20), heads=(2, 2), dims=(16, 24), dropout_p=dropout_p).draw(torch.float32)
    words = dropout_words(drawn.call.seed, range(2), range(2), range(17), range(20))
    for mask in masks(backend, drawn):
        assert torch.equal(mask, words >= drawn.call.drop_below)
