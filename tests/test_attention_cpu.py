"""Attention in plain torch operations, as CPU tensors are computed, by the float64 formula and its error budget."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_budget import judge
from attention_case import Case, Drawn
from attention_cases import CASES, CORE
from torch import Tensor

import halfstep as hs
from halfstep.ops import attention_cpu, attention_tiles, attention_torch
from halfstep.ops.attention_call import empty_like_order
from halfstep.reference.attention import attention

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("out", "lse", "log_sum", "dq", "dk", "dv", "dbias")
Needs = tuple[bool, bool, bool, bool]
ALL: Needs = (True, True, True, True)


def computed(drawn: Drawn, needs: Needs = ALL) -> dict[str, Tensor | None]:
    call, d_out, d_lse = drawn
    outputs = attention_torch.attention_forward(call)
    gradients = attention_torch.attention_backward(call, *outputs, d_out, d_lse, needs)
    return dict(zip(NAMES, (*outputs, *gradients), strict=True))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and blocks for the small cases, and torch's fused kernel for none."""
    monkeypatch.setattr(attention_tiles, "TILE_SCORES", 512)
    monkeypatch.setattr(attention_tiles, "MAX_ROWS", 12)
    monkeypatch.setattr(attention_tiles, "MIN_ROWS", 5)
    monkeypatch.setattr(attention_cpu, "expresses", lambda _: False)


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    drawn = case.draw(dtype)
    judge(drawn, computed(drawn))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tiles_within_the_budget(case: Case) -> None:
    drawn = case.draw(torch.float32)
    judge(drawn, computed(drawn))


@pytest.mark.parametrize("tiles", ["whole", "small"])
def test_float64_is_the_formula(tiles: str, request: pytest.FixtureRequest) -> None:
    """Sums of at most 500 terms of size 1, of scores of at most 100, rounded in float64."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    for case in (case for case in CORE if not case.same_qk):  # whose scores are of 10^5
        call, d_out, d_lse = case.draw(torch.float64)
        result = computed(Drawn(call, d_out, d_lse))
        names = [name for name in ("q", "k", "v", "bias") if getattr(call, name) is not None]
        leaves = {name: getattr(call, name).detach().clone().requires_grad_() for name in names}
        out, lse, log_sum = attention(call._replace(**leaves))
        total = (out * d_out).sum()
        if d_lse is not None:
            total = total + (lse * d_lse).where(lse > -math.inf, 0).sum()
        truth = dict(zip((f"d{name}" for name in names), torch.autograd.grad(total, [*leaves.values()]), strict=True))
        truth |= {"out": out, "lse": lse} | ({"log_sum": log_sum} if call.bias is not None else {})
        for name, want in truth.items():
            got = result[name]
            assert got is not None
            error = (got - want).abs().where(want.isfinite(), 0) / (1 + want.abs())
            allowed = max(1e-11, torch.finfo(got.dtype).eps)  # a float32 bias has a gradient in float32
            assert got.numel() == 0 or error.max() < allowed, f"{case.name}, {name}"


# ---- what is asked for, and where it goes ----------------------------------------------------------------------------
@pytest.mark.parametrize("tiles", ["whole", "small"])
@pytest.mark.parametrize(
    "case",
    [
        Case("subset", (33, 33), heads=(4, 2), right=0),
        Case("subset, bias", (33, 17), bias="1HQK", softcap=2.0, d_lse=True),
        Case("subset, segments", q_lengths=(17, 0, 9), k_lengths=(17, 5, 20), dropout_p=0.2),
    ],
    ids=lambda case: case.name,
)
def test_what_is_not_needed_is_none_and_changes_nothing(case: Case, tiles: str, request: pytest.FixtureRequest) -> None:
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    drawn = case.draw(torch.float32)
    everything = computed(drawn)
    for needs in itertools.product([False, True], repeat=4):
        some = computed(drawn, needs)
        for name, need in zip(NAMES[3:], needs, strict=True):
            want, got = everything[name], some[name]
            assert (got is None) == (want is None or not need)
            assert got is None or (want is not None and torch.equal(got, want))


def test_memory_order_is_the_inputs() -> None:
    for case in CORE:
        drawn = case.draw(torch.bfloat16)
        result = computed(drawn)
        call = drawn.call
        given = {"out": call.q, "dq": call.q, "dk": call.k, "dv": call.v}
        for name, like in given.items():
            got = result[name]
            assert got is not None
            assert got.stride() == empty_like_order(like, got.shape).stride(), f"{case.name}, {name}"
        lse = result["lse"]
        assert lse is not None
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32


def test_inputs_are_left_alone() -> None:
    for case in CORE:
        drawn = case.draw(torch.float32)
        given = [x for x in (*drawn.call, drawn.d_out, drawn.d_lse) if isinstance(x, Tensor)]
        before = [x.clone() for x in given]
        computed(drawn)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True)), case.name


@pytest.mark.parametrize("tiles", ["whole", "small"])
def test_the_same_bits_again(tiles: str, request: pytest.FixtureRequest) -> None:
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    for case in CORE:
        drawn = case.draw(torch.float32)
        for name, got in computed(drawn).items():
            again = computed(drawn)[name]
            assert (got is None and again is None) or torch.equal(got, again), f"{case.name}, {name}"  # type: ignore


def test_dropout_is_the_same_in_any_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With v the identity, out shows what was dropped."""
    case = Case("tiles", (70, 64), dims=(8, 64), dropout_p=0.4)
    call = case.draw(torch.float32).call
    call = call._replace(v=torch.eye(64).expand(2, 2, 64, 64))
    dropped = attention_torch.attention_forward(call)[0] == 0
    assert 0.35 < dropped.double().mean() < 0.45
    monkeypatch.setattr(attention_tiles, "TILE_SCORES", 700)
    monkeypatch.setattr(attention_tiles, "MAX_ROWS", 13)
    assert torch.equal(attention_torch.attention_forward(call)[0] == 0, dropped)


# ---- which kernel ----------------------------------------------------------------------------------------------------
FUSED = [
    (Case("plain", (17, 33)), True),
    (Case("causal", (33, 33), right=0), True),
    (Case("causal, top left, square", (33, 33), right=0, top_left=True), True),
    (Case("decoding", (1, 33), right=0), True),
    (Case("window wider than the keys", (33, 33), left=40, right=0), True),
    (Case("grouped", (33, 33), heads=(4, 2), right=0), True),
    (Case("causal, fewer queries", (17, 33), right=0), False),
    (Case("causal, top left, fewer queries", (1, 33), right=0, top_left=True), False),
    (Case("window", (33, 33), left=20, right=0), False),
    (Case("negative scale", (33, 33), right=0, scale=-1.0), False),
    (Case("other dims", (33, 33), dims=(16, 8)), False),
    (Case("softcap", (33, 33), softcap=1.0), False),
    (Case("mask", (33, 33), mask="11QK"), False),
    (Case("bias", (33, 33), bias="11QK"), False),
    (Case("ALiBi", (33, 33), alibi="H"), False),
    (Case("dropout", (33, 33), dropout_p=0.1), False),
    (Case("no keys", (33, 0)), False),
]


@pytest.mark.parametrize(("case", "fused"), FUSED, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_torchs_fused_kernel_takes_what_it_can_express(case: Case, fused: bool) -> None:
    assert attention_cpu.expresses(case.draw(torch.float32).call) == fused


# ---- memory ----------------------------------------------------------------------------------------------------------
def extra_bytes(case: Case, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """The most that forward and backward hold at once, without inputs; and the bytes of all score matrices."""
    call, d_out, d_lse = case.draw(dtype)
    with hs.measure_activations() as allocated:
        outputs = attention_torch.attention_forward(call)
        attention_torch.attention_backward(call, *outputs, d_out, d_lse, ALL)
    (B, Hq, Lq), Lk = call.stat_shape, call.k.shape[2]
    return allocated.peak, 4 * B * Hq * Lq * Lk


@pytest.mark.parametrize(
    "settings",
    [
        {"right": 0},
        {"softcap": 5.0, "right": 0},
        {"left": 64, "right": 64},
        {"mask": "B11K", "heads": (4, 2)},
        {"alibi": "H", "d_lse": True},
        {"bias": "111K"},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_memory_grows_with_the_length(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its square: the tile, whose size is bounded, is small here beside what is linear."""
    monkeypatch.setattr(attention_tiles, "TILE_SCORES", 2**12)
    short, _ = extra_bytes(Case("memory", (512, 512), dims=(32, 32), **settings))
    long, matrices = extra_bytes(Case("memory", (1024, 1024), dims=(32, 32), **settings))
    assert long < 2.3 * short
    assert long < matrices / 4


def test_a_tile_has_few_bytes() -> None:
    """Of one score matrix of 64 MB no more than its tiles of 4 MB, of which three or four live at once."""
    case = Case("one long", (2048, 4096), batch=2, heads=(2, 1), dims=(8, 8), softcap=2.0, left=4000)
    peak, matrices = extra_bytes(case)
    assert matrices == 2 * 64 * 2**20
    assert peak < 6 * 4 * 2**20


def test_keys_outside_the_window_are_not_read() -> None:
    """Neither NaN nor what else is there reaches a result."""
    drawn = Case("outside", (300, 600), dims=(8, 8), left=10, right=5).draw(torch.float32)
    clean = computed(drawn)
    call = drawn.call
    poisoned = [x.clone() for x in (call.k, call.v)]
    for x in poisoned:
        x[:, :, :280] = math.nan  # the first query is at key 300, the first one it sees is 290
    result = computed(Drawn(call._replace(k=poisoned[0], v=poisoned[1]), drawn.d_out, None))
    for name in ("out", "lse", "dq"):
        got, want = result[name], clean[name]
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


@pytest.mark.parametrize("tiles", ["whole", "small"])
def test_offsets_beyond_2_to_the_31(tiles: str, request: pytest.FixtureRequest) -> None:
    """The second batch element lies 2^31 elements after the first: 4 GB of addresses, a few pages of memory."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    call, d_out, _ = Case("far", (17, 17), right=0).draw(torch.bfloat16)

    def far(x: Tensor) -> Tensor:
        step = 2**31
        moved = torch.empty(step + x[0].numel(), dtype=x.dtype).as_strided(x.shape, (step, *x.stride()[1:]))
        return moved.copy_(x)

    moved = Drawn(call._replace(q=far(call.q), k=far(call.k), v=far(call.v)), far(d_out), None)
    near = computed(Drawn(call, d_out, None))
    for name, got in computed(moved).items():
        want = near[name]
        assert (got is None and want is None) or torch.equal(got, want)  # type: ignore[arg-type]


# ---- the public functions --------------------------------------------------------------------------------------------
PUBLIC = {
    "plain": {},
    "causal": {"causal": True},
    "causal, top left": {"causal": "top-left"},
    "window and softcap": {"window": (2, 1), "softcap": 1.5},
    "ALiBi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "mask": {"mask": torch.arange(6) % 3 > 0},
    "dropout": {"dropout_p": 0.4, "seed": 3},
}


@pytest.mark.parametrize("settings", PUBLIC.values(), ids=PUBLIC.keys())
def test_derivatives_of_the_public_function(settings: dict) -> None:
    """Against differences along a random direction; without bias and lse it may be torch's fused kernel."""
    shapes = [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (1, 4, 5, 6)]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, bias = tensors
        out, lse = hs.attention(q, k, v, bias=bias, return_lse=True, **settings)
        return out, lse

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(lambda q, k, v: hs.attention(q, k, v, **settings), inputs[:3], fast_mode=True)


def test_derivatives_of_the_public_function_on_segments() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [(7, 4, 8), (9, 2, 8), (9, 2, 8)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    q_ends, k_ends = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 4, 6, 9])

    def function(*tensors: Tensor) -> Tensor:
        return hs.attention_varlen(*tensors, q_ends, k_ends, causal=True, softcap=2.0, dropout_p=0.2, seed=5)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
