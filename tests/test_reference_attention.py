"""The oracle of attention against torch's own attentions in float64, and against what can be computed by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_case import Case
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from halfstep.ops.attention_call import AttentionCall
from halfstep.reference.attention import attention, dropout_words
from halfstep.reference.philox import philox_block

pytestmark = pytest.mark.usefixtures("one_thread")

# float64 against float64: both sides round a sum of at most 65 terms of size 1, of scores of at most 100
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def leaves(call: AttentionCall) -> AttentionCall:
    """The call with leaves that require gradients in place of its floating tensors."""
    inputs = {n: getattr(call, n).detach().clone().requires_grad_() for n in ("q", "k", "v")}
    if call.bias is not None:
        inputs["bias"] = call.bias.detach().clone().requires_grad_()
    return call._replace(**inputs)


def inputs_of(call: AttentionCall) -> list[Tensor]:
    return [x for x in (call.q, call.k, call.v, call.bias) if x is not None]


def explicit_mask(call: AttentionCall) -> Tensor:
    """bool, broadcastable to [B, Hq, Lq, Lk]: what the call's window and mask leave visible, entry by entry."""
    Lq, Lk = call.q.shape[2], call.k.shape[2]
    shift = 0 if call.top_left else Lk - Lq
    left = math.inf if call.left is None else call.left
    right = math.inf if call.right is None else call.right
    window = torch.tensor([[i + shift - left <= j <= i + shift + right for j in range(Lk)] for i in range(Lq)])
    return window if call.mask is None else window & call.mask


def same(ours: AttentionCall, theirs: AttentionCall, out: Tensor, expected: Tensor, d_out: Tensor) -> None:
    """Outputs and every gradient agree."""
    torch.testing.assert_close(out, expected, **CLOSE)
    got = torch.autograd.grad(out, inputs_of(ours), d_out)
    want = torch.autograd.grad(expected, inputs_of(theirs), d_out)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


SDPA = [
    Case("plain", (17, 23)),
    Case("causal", (23, 23), right=0),
    Case("causal, fewer queries", (17, 23), right=0),
    Case("causal, top left, fewer queries", (17, 23), right=0, top_left=True),
    Case("causal, top left, more queries", (23, 17), right=0, top_left=True),
    Case("window", (17, 23), left=3, right=2),
    Case("window, top left", (23, 23), left=3, right=2, top_left=True),
    Case("mask", (17, 23), mask="BHQK"),
    Case("mask of keys and causal", (23, 23), mask="111K", right=5),
    Case("bias", (17, 23), bias="BHQK"),
    Case("broadcast bias", (17, 23), bias="1H1K"),
    Case("bias of -inf and causal", (23, 23), bias="11QK", bias_low="-inf", right=8),
    Case("grouped heads", (17, 23), heads=(4, 2), right=0),
    Case("one key head, negative scale, other dims", (17, 23), heads=(4, 1), dims=(8, 24), scale=-0.7),
    Case("layouts", (23, 23), layout="packed", d_out="expanded"),
]


@pytest.mark.parametrize("case", SDPA, ids=lambda case: case.name)
def test_as_torchs_attention(case: Case) -> None:
    call, d_out, _ = case.draw(torch.float64)
    ours, theirs = leaves(call), leaves(call)
    mask = explicit_mask(call)
    if theirs.bias is not None:
        mask = theirs.bias.masked_fill(~mask, -math.inf)
    expected = F.scaled_dot_product_attention(
        theirs.q, theirs.k, theirs.v, mask, scale=call.scale, enable_gqa=call.q.shape[1] != call.k.shape[1]
    )
    same(ours, theirs, attention(ours)[0], expected, d_out)


def test_is_causal_means_causal() -> None:
    call, d_out, _ = Case("is_causal", (23, 23), right=0).draw(torch.float64)
    ours, theirs = leaves(call), leaves(call)
    expected = F.scaled_dot_product_attention(theirs.q, theirs.k, theirs.v, is_causal=True, scale=call.scale)
    same(ours, theirs, attention(ours)[0], expected, d_out)


FLEX = [
    Case("softcap", (16, 24), softcap=1.5),
    Case("softcap, huge scores", (16, 24), softcap=3.0, scale=40.0),
    Case("ALiBi", (24, 24), alibi="H", right=0),
    Case("ALiBi of each batch element, fewer queries, both directions", (16, 24), alibi="BH"),
    Case("ALiBi, top left, more queries", (24, 16), alibi="H", top_left=True),
    Case("softcap, bias, ALiBi, grouped heads", (16, 24), softcap=2.0, bias="BHQK", alibi="BH", heads=(4, 2)),
]


def score_mod(call: AttentionCall) -> Callable[..., Tensor]:
    """The formula of one entry, as FlexAttention takes it; indices are ints or tensors of one element."""
    shift = 0 if call.top_left else call.k.shape[2] - call.q.shape[2]

    def of_entry(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        place = i + shift
        if call.softcap:
            score = call.softcap * torch.tanh(score / call.softcap)
        if call.bias is not None:
            score = score + call.bias[b, h, i, j]
        if call.alibi_slopes is not None:
            slope = call.alibi_slopes[b, h] if call.alibi_slopes.ndim == 2 else call.alibi_slopes[h]
            score = score - slope.double() * abs(place - j)
        return torch.where(torch.as_tensor(j > place), -math.inf, score) if call.right == 0 else score

    return of_entry


def flex(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out and lse, entry by entry."""
    _, Hq, Lq, _ = call.q.shape
    Lk, entry = call.k.shape[2], score_mod(call)
    outs, sums = [], []
    for b in range(call.q.shape[0]):
        for h in range(Hq):
            g = h // (Hq // call.k.shape[1])
            scores = call.q[b, h] @ call.k[b, g].T * call.scale
            rows = [torch.stack([entry(scores[i, j], b, h, i, j) for j in range(Lk)]) for i in range(Lq)]
            outs.append(torch.stack([row.softmax(0) @ call.v[b, g] for row in rows]))
            sums.append(torch.stack([row.logsumexp(0) for row in rows]))
    shape = call.stat_shape
    return torch.stack(outs).view(*shape, -1), torch.stack(sums).view(shape)


@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
def test_as_the_formula_of_one_entry(case: Case) -> None:
    call, d_out, _ = case.draw(torch.float64)
    ours, theirs = leaves(call), leaves(call)
    out, lse, _ = attention(ours)
    expected, expected_lse = flex(theirs)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)
    d_lse = torch.linspace(-1, 1, lse.numel(), dtype=torch.float64).view_as(lse)
    total, expected_total = ((a * d_out).sum() + (b * d_lse).sum() for a, b in ((out, lse), (expected, expected_lse)))
    same(ours, theirs, total, expected_total, torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("case", [FLEX[0], FLEX[2], FLEX[-1]], ids=lambda case: case.name)
def test_as_torchs_flexattention(case: Case) -> None:
    """Itself, whose CPU form has no gradient; the formula above stands in for it where it takes long to start."""
    call, _, _ = case.draw(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without a compiler
        expected, aux = flex_attention(
            call.q, call.k, call.v, score_mod(call), scale=call.scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    out, lse, _ = attention(call)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, aux.lse, **CLOSE)


def test_by_hand() -> None:
    """Two queries, two keys: scores ln 3 and 0, so weights 3/4 and 1/4; the second batch element has them swapped."""
    ln3 = math.log(3)
    q = torch.tensor([[[[1.0], [2.0]]], [[[-1.0], [-2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[ln3], [0.0]]], [[[0.0], [ln3]]]], dtype=torch.float64)
    v = torch.tensor([[[[4.0, 0.0], [8.0, 1.0]]]], dtype=torch.float64).expand(2, 1, 2, 2)
    call = AttentionCall(
        q, k, v, mask=None, bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_k=None, seed=None, scale=1.0,
        softcap=0.0, left=None, right=None, top_left=False, dropout_p=0.0,
    )  # fmt: skip
    out, lse, log_sum = attention(call)
    expected = [[[[5, 1 / 4], [4.4, 1 / 10]]], [[[5, 1 / 4], [4.4, 1 / 10]]]]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), **CLOSE)
    logs = [[[math.log(4), math.log(10)]], [[math.log(4 / 3), math.log(10 / 9)]]]
    torch.testing.assert_close(lse, torch.tensor(logs, dtype=torch.float64), **CLOSE)
    excess = [[[math.log(4 / 3), math.log(10 / 9)]]] * 2
    torch.testing.assert_close(log_sum, torch.tensor(excess, dtype=torch.float64), **CLOSE)
    causal = attention(call._replace(right=0))[0]
    assert causal[:, 0, 0].tolist() == [[4, 0], [4, 0]]


@pytest.mark.parametrize(
    "hidden",
    [
        Case("mask", (17, 23), mask="BHQK", rows=True, d_lse=True),
        Case("bias", (17, 23), bias="BHQK", bias_low="-inf", rows=True, d_lse=True),
        Case("causal", (23, 17), right=0, d_lse=True),
        Case("no keys", (5, 0), d_lse=True),
    ],
    ids=lambda case: case.name,
)
def test_rows_that_see_nothing(hidden: Case) -> None:
    """Others' gradients are what they are without these rows."""
    call, d_out, d_lse = hidden.draw(torch.float64)
    call = leaves(call)
    out, lse, log_sum = attention(call)
    seen = explicit_mask(call) if call.bias is None else explicit_mask(call) & (call.bias > -math.inf)
    nothing = ~seen.expand(*call.stat_shape, -1).any(3)
    assert nothing.any()
    assert (out[nothing] == 0).all()
    assert (lse[nothing] == -math.inf).all()
    assert (log_sum[nothing] == 0).all()
    gradients = torch.autograd.grad((out, lse), inputs_of(call), (d_out, d_lse))
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][nothing] == 0).all()
    cut = (d_out.masked_fill(nothing[..., None], 0), d_lse.masked_fill(nothing, 0))
    for got, want in zip(gradients, torch.autograd.grad(attention(call)[:2], inputs_of(call), cut), strict=True):
        assert torch.equal(got, want)


def test_a_row_of_minima_weighs_its_keys_alike() -> None:
    call, d_out, _ = Case("minima", (5, 8), bias="BHQK").draw(torch.float64)
    assert call.bias is not None
    call = leaves(call._replace(bias=torch.full_like(call.bias, torch.finfo(torch.float64).min)))
    out, lse, log_sum = attention(call)
    torch.testing.assert_close(out, call.v.mean(2, keepdim=True).expand(out.shape), **CLOSE)
    torch.testing.assert_close(log_sum, torch.full_like(log_sum, math.log(8)), **CLOSE)
    assert (lse == torch.finfo(torch.float64).min).all()
    (dv,) = torch.autograd.grad(out, call.v, d_out)
    torch.testing.assert_close(dv, (d_out.sum(2, keepdim=True) / 8).expand(dv.shape), **CLOSE)


def test_segments_are_calls_of_their_own() -> None:
    case = Case("segments", q_lengths=(5, 0, 7, 3), k_lengths=(6, 4, 0, 9), heads=(4, 2), left=4, right=2, alibi="BH",
                softcap=2.0, uncovered=(2, 1))  # fmt: skip
    call = case.draw(torch.float64).call
    assert call.alibi_slopes is not None
    out, lse, _ = attention(call)
    for s, (q_start, q_end, k_start, k_end) in enumerate(
        [(2, 7, 2, 8), (7, 7, 8, 12), (7, 14, 12, 12), (14, 17, 12, 21)]
    ):
        rows, keys = slice(q_start, q_end), slice(k_start, k_end)
        alone = call._replace(
            q=call.q[:, :, rows], k=call.k[:, :, keys], v=call.v[:, :, keys], cu_seqlens_q=None, cu_seqlens_k=None,
            alibi_slopes=call.alibi_slopes[s : s + 1],
        )  # fmt: skip
        expected, expected_lse, _ = attention(alone)
        assert torch.equal(out[:, :, rows], expected)
        assert torch.equal(lse[:, :, rows], expected_lse)
    assert (out[:, :, [0, 1, 17]] == 0).all()
    assert (lse[:, :, [0, 1, 17]] == -math.inf).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0x123456789ABCDEF0, -1])
def test_words_go_by_place(seed: int) -> None:
    places = (range(3, 5), range(2), range(1000, 1003), range(6, 17))
    words = dropout_words(torch.tensor([seed]), *places)
    assert words.shape == (2, 2, 3, 11)
    for a, s in enumerate(places[0]):
        for b, h in enumerate(places[1]):
            for c, i in enumerate(places[2]):
                for d, j in enumerate(places[3]):
                    counter = [torch.tensor([x]) for x in (j // 4, i, h, s)]
                    block = philox_block(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
                    assert words[a, b, c, d] == block[0, j % 4]


@pytest.mark.parametrize("empty", range(4))
def test_no_places_have_no_words(empty: int) -> None:
    places = [range(2)] * 4
    places[empty] = range(7, 7)
    assert dropout_words(torch.tensor([1]), *places).shape == tuple(map(len, places))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
def test_how_much_is_kept(p: float) -> None:
    call = Case("kept", (64, 128), heads=(4, 4), dropout_p=p).draw(torch.float64).call
    words = dropout_words(torch.tensor([7]), range(2), range(4), range(64), range(128))
    kept = (words >= call.drop_below).double()
    # six standard deviations of 65,536 coins
    assert abs(kept.mean() - (1 - p)) <= 6 * math.sqrt(p * (1 - p) / words.numel())


def test_what_is_kept_counts_for_what_is_dropped() -> None:
    """Of segment 1 as of all others; the statistics know nothing of it."""
    case = Case("dropout", heads=(4, 2), q_lengths=(5, 7), k_lengths=(9, 11), dropout_p=0.25)
    call = case.draw(torch.float64).call
    assert call.seed is not None
    dropped, plain = attention(call), attention(call._replace(seed=None, dropout_p=0.0))
    keep = dropout_words(call.seed, range(1, 2), range(4), range(7), range(11)) >= 2**30
    q, k, v = call.q[:, :, 5:], *(x[:, :, 9:].repeat_interleave(2, 1) for x in (call.k, call.v))
    weights = (q @ k.transpose(2, 3) * call.scale).softmax(3)
    torch.testing.assert_close(dropped[0][:, :, 5:], (weights * keep / 0.75) @ v, **CLOSE)
    assert torch.equal(dropped[1], plain[1])
