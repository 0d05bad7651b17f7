"""hs.attention and hs.attention_varlen as torch's autograd, modes and utilities see them.

Guards: gradients that nobody asked for, or that go missing; memory kept beyond what is promised; autocast that rounds
inside; dropout that differs when a checkpoint runs again; a refusal that became a wrong answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adversarial import BFLOAT16, FLOAT16, FLOAT32, ordinary
from attention_tensors import HEADS, QUERIES, SHAPES, Asked, drawn, gradients, packed_rows, qkv, written_out
from bits import assert_all_same_bits, assert_same_bits
from no_sync import forbid_waits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.ops import backend

FLOAT64 = torch.float64


def leaves(dtype: torch.dtype = FLOAT32) -> list[Tensor]:
    """q, k, v and a bias."""
    return [*qkv(dtype), drawn(SHAPES["bias"], dtype, 5).requires_grad_()]


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return hs.attention(q, k, v, bias=bias, causal=True)


# ---- results ---------------------------------------------------------------------------------------------------------
def test_it_is_attention():
    q, k, v, bias = leaves(FLOAT64)
    out, lse = hs.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    expected = written_out(q, k, v, bias=bias, causal=True)
    assert (out - expected).abs().max() < 1e-14
    assert lse.shape == out.shape[:3]
    inputs = [q, k, v, bias]
    for got, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert (got - wanted).abs().max() < 1e-13


@pytest.mark.parametrize("function", [hs.attention, hs.attention_varlen])
def test_settings_reach_the_backend(function):
    dense = function is hs.attention
    arguments, ends = (qkv(), []) if dense else (packed_rows()[0], [packed_rows()[1]] * 2)
    slopes = torch.ones(2 if dense else 3, HEADS)
    asked = Asked()

    def call(**settings: Any) -> tuple[Any, ...]:
        with backend.override(asked):
            function(*arguments, *ends, **settings)
        return tuple(asked.calls[-1])

    assert call()[8:] == (None, 16**-0.5, 0.0, None, None, False, 0.0)
    assert call(scale=2, softcap=3, alibi_slopes=slopes)[5] is slopes
    assert [repr(number) for number in asked.calls[-1][9:11]] == ["2.0", "3.0"]
    for settings, expected in [
        ({"causal": True}, (None, 0, False)),
        ({"causal": "bottom-right", "window": 3}, (3, 0, False)),
        ({"causal": "top-left", "window": (3, -1)}, (3, 0, True)),
        ({"window": (-1, -1)}, (None, None, False)),
        ({"window": [None, 2]}, (None, 2, False)),
        ({"window": 0}, (0, 0, False)),
    ]:
        assert call(**settings)[11:14] == expected, settings
    for seed, expected in [(7, 7), (-1, -1), (2**64 - 1, -1), (2**63, -(2**63)), (torch.tensor(5), 5)]:
        got = call(dropout_p=0.25, seed=seed)
        assert (got[8].tolist(), got[14]) == ([expected], 0.25)


@pytest.mark.parametrize("shape", [(QUERIES, 7), (2, 1, 1, 7), (4, 1, 7), (7,), (), (1, 4, 5, 1)])
def test_masks_and_biases_broadcast_without_a_copy(shape):
    q, k, v = qkv(FLOAT64)
    mask, bias = ordinary(shape, FLOAT32, 3) > -1, drawn(shape, FLOAT64, 4).requires_grad_()
    asked = Asked()
    with backend.override(asked):
        out = hs.attention(q, k, v, mask=mask, bias=bias)
    (call,) = asked.calls
    for given, taken in ((mask, call.mask), (bias, call.bias)):
        assert taken.data_ptr() == given.data_ptr()
        assert taken.shape == (1,) * (4 - given.ndim) + given.shape
    expected = written_out(q, k, v, bias=bias.masked_fill(~mask, torch.finfo(FLOAT64).min))
    seen = hs.attention(q, k, v, mask=mask, return_lse=True)[1].isfinite()[..., None]
    assert ((out - expected) * seen).abs().max() < 1e-14
    (gradient,) = gradients(out * seen, [bias])
    assert (gradient - gradients(expected * seen, [bias])[0]).abs().max() < 1e-13
    assert gradient.shape == shape


def test_results_lie_in_memory_as_q_does():
    rows = [ordinary((2, n, h, d), FLOAT32, n) for n, h, d in ((5, 4, 16), (7, 2, 16), (7, 2, 24))]
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in rows)
    out = hs.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients(out, [q, k, v]))
    assert hs.attention(q[:, :1].expand(2, 4, 5, 16), k, v).is_contiguous()
    assert hs.attention(*qkv()).is_contiguous()


# ---- autograd --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("subset", [s for n in range(1, 5) for s in itertools.combinations(range(4), n)])
def test_only_the_gradients_that_are_asked_for(subset):
    everything = leaves()
    expected = gradients(with_bias(*everything), everything)
    inputs = [t.detach().requires_grad_(i in subset) for i, t in enumerate(everything)]
    asked = Asked()
    with backend.override(asked):
        got = gradients(with_bias(*inputs), [inputs[i] for i in subset])
    assert asked.needs == [tuple(i in subset for i in range(4))]
    assert_all_same_bits(got, [expected[i] for i in subset], str(subset))


def test_a_gradient_that_no_one_wants_of_two_is_not_made():
    """torch.autograd.grad for q alone still says that k needs one: torch knows no better; frozen layers do."""
    q, k, v = qkv()
    asked = Asked()
    with backend.override(asked):
        hs.attention(q, k.detach(), v.detach()).sum().backward()
    assert asked.needs == [(True, False, False, False)]
    assert q.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_no_gradient_is_needed(mode):
    q, k, v = qkv()
    with mode(), backend.override(Asked()) as counts:
        out = hs.attention(q, k, v)
    assert out.grad_fn is None
    assert counts == {"attention_forward": 1}
    assert hs.attention(*qkv(grad=False)).grad_fn is None
    with mode():
        assert_same_bits(hs.attention(q, k, v), out, "the same")


def kept(call: Callable[[], Any]) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_is_kept_for_backward(dtype):
    """q, k, v, out and 4 bytes a row and head; 8 with a bias, and the bias."""
    q, k, v, bias = leaves(dtype)
    row = HEADS * 2 * QUERIES * 4
    plain = q.nbytes + k.nbytes + v.nbytes + (q.nbytes // 16 * 24) + row
    assert sum(t.nbytes for t in kept(lambda: hs.attention(q, k, v))) == plain
    assert sum(t.nbytes for t in kept(lambda: hs.attention(q, k, v, bias=bias))) == plain + row + bias.nbytes
    (q, k, v), ends = packed_rows(dtype)
    saved = kept(lambda: hs.attention_varlen(q, k, v, ends, ends))
    plain = q.nbytes + k.nbytes + v.nbytes + (q.nbytes // 16 * 24) + HEADS * 9 * 4
    assert sum(t.nbytes for t in saved) == plain + 2 * ends.nbytes


def test_out_alone_and_lse_alone_and_both():
    inputs = qkv(FLOAT64)
    asked = Asked()
    with backend.override(asked):
        out, lse = hs.attention(*inputs, return_lse=True)
        of_out = gradients(out, inputs)
        out, lse = hs.attention(*inputs, return_lse=True)
        of_lse = gradients(lse, inputs[:2])
        out, lse = hs.attention(*inputs, return_lse=True)
        both = gradients(torch.cat([out, lse[..., None]], -1), inputs)
    assert [d is None for d in asked.d_lse] == [True, False, False]
    k = inputs[1].repeat_interleave(2, 1)
    log_sums = (inputs[0] @ k.transpose(-1, -2) / 4).logsumexp(-1)
    both_written_out = torch.cat([written_out(*inputs), log_sums[..., None]], -1)
    wanted = gradients(log_sums, inputs[:2], retain_graph=True)
    for got, expected in zip(of_lse, wanted, strict=True):
        assert (got - expected).abs().max() < 1e-13
    wanted = gradients(both_written_out, inputs)
    for got, expected in zip(both, wanted, strict=True):
        assert (got - expected).abs().max() < 1e-13
    assert_all_same_bits(of_out, gradients(hs.attention(*inputs), inputs), "out alone")


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_views_of_one_packed_tensor(dtype):
    packed = ordinary((2, 5, 3, 4, 16), dtype, 1).requires_grad_()
    out = hs.attention(*(packed[:, :, i].transpose(1, 2) for i in range(3)), causal=True)
    (got,) = gradients(out, [packed])
    apart = [packed.detach()[:, :, i].transpose(1, 2).contiguous().requires_grad_() for i in range(3)]
    wanted = gradients(hs.attention(*apart, causal=True), apart)
    assert_same_bits(got, torch.stack([g.transpose(1, 2) for g in wanted], 2), "packed")


def test_a_second_derivative_is_refused_in_words():
    q, k, v = qkv()
    out = hs.attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    plain = torch.autograd.grad(hs.attention(q, k, v).square().sum(), q)[0]
    assert_same_bits(gradient, plain, "the first is right")
    with pytest.raises(RuntimeError, match=r"hs\.attention has no second derivative: .* Use .*SDPBackend\.MATH"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own import
def test_what_torch_cannot_do_with_it_is_refused():
    """Without a rule of its own a function would have a tangent of zero."""
    q, k, v = qkv(grad=False)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        hs.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(lambda q: hs.attention(q, k, v).sum())(q)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching")
def test_vmap_is_right():
    many = torch.stack([qkv(grad=False, seed=3 * i)[0] for i in range(3)])
    _, k, v = qkv(grad=False)
    got = torch.vmap(lambda q: hs.attention(q, k, v))(many)
    assert_all_same_bits(list(got), [hs.attention(q, k, v) for q in many], "vmap")


# ---- autocast --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_autocast_rounds_the_inputs_and_nothing_inside(dtype):
    q, k, v, bias = leaves()
    narrow = [q.detach().to(dtype).requires_grad_(), k.detach().to(dtype), v.detach().to(dtype)]
    expected = hs.attention(*narrow, bias=bias, causal=True)
    (rounded,) = gradients(expected, narrow[:1])
    with torch.autocast("cpu", dtype=dtype):
        out = hs.attention(q, k.to(dtype), v, bias=bias, causal=True)
        assert_same_bits(out, expected, "out")
        (got,) = gradients(out, [q])  # backward under autocast too
        assert_same_bits(got, rounded.float(), "the gradient, in q's dtype")
    rows, ends = packed_rows()
    with torch.autocast("cpu", dtype=dtype):
        assert hs.attention_varlen(*rows, ends, ends).dtype == dtype
        assert hs.attention(*qkv(FLOAT64)).dtype == FLOAT64
        assert F.scaled_dot_product_attention(q, k, k, enable_gqa=True).dtype == dtype, "as torch's own"
    with torch.autocast("cpu", enabled=False):
        assert hs.attention(q, k, v).dtype == FLOAT32


# ---- dropout ---------------------------------------------------------------------------------------------------------
def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hs.attention(q, k, v, dropout_p=0.5) + hs.attention(q, k, v, dropout_p=0.5)


def test_seeds_come_from_torchs_generator():
    inputs = qkv()
    torch.manual_seed(1)
    first, second = dropped(*inputs), dropped(*inputs)
    torch.manual_seed(1)
    assert_same_bits(dropped(*inputs), first, "the same seed")
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    hs.attention(*inputs)
    hs.attention(*inputs, dropout_p=0.5, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "nothing drawn where nothing is needed"
    given = [hs.attention(*inputs, dropout_p=0.5, seed=seed) for seed in (3, torch.tensor([3]), 3 + 2**64, 4)]
    assert_all_same_bits(given[1:3], [given[0]] * 2, "a seed of any kind")
    assert not torch.equal(given[3], given[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same(reentrant):
    results = []
    for run in (dropped, lambda *inputs: checkpoint(dropped, *inputs, use_reentrant=reentrant)):
        torch.manual_seed(2)
        inputs = qkv()
        out = run(*inputs)
        (out * ordinary(tuple(out.shape), FLOAT32, 99)).sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    assert_all_same_bits(results[1], results[0], "checkpointed")


# ---- modes -----------------------------------------------------------------------------------------------------------
def test_on_meta_nothing_is_computed_and_nothing_waits():
    q, k, v, bias = (t.detach().to("meta").requires_grad_() for t in leaves())
    with forbid_waits("meta"):
        out, lse = hs.attention(q, k, v, bias=bias, dropout_p=0.5, seed=3, return_lse=True)
        grads = torch.autograd.grad([out, lse], [q, k, v, bias], [out, lse])
        hs.attention(q, k, v, dropout_p=0.5)
        ends = torch.zeros(3, dtype=torch.int64, device="meta")
        rows = hs.attention_varlen(q[0], q[0], q[0], ends, ends, dropout_p=0.5)
    assert hs.attention(q.detach(), k, v).is_meta, "with no mode that watches"
    assert (out.shape, lse.shape, rows.shape) == ((2, 4, 5, 24), (2, 4, 5), (4, 5, 16))
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v, bias)]


def test_the_default_device_is_nobodys():
    inputs = qkv()
    rows, ends = packed_rows()

    def everything() -> list[Tensor]:
        out, lse = hs.attention(*inputs, dropout_p=0.5, seed=3, causal=True, return_lse=True)
        return [out, lse, *gradients(out, inputs), hs.attention_varlen(*rows, ends, ends, window=2)]

    expected = everything()
    with torch.device("meta"):
        assert hs.attention(*inputs, dropout_p=0.5).device.type == "cpu"
        assert_all_same_bits(everything(), expected, "everything")


def test_deterministic_mode_changes_nothing():
    """It fills new memory with NaN, which every result must overwrite."""
    inputs = leaves()
    expected = [with_bias(*inputs), *gradients(with_bias(*inputs), inputs)]
    torch.use_deterministic_algorithms(True)
    try:
        got = [with_bias(*inputs), *gradients(with_bias(*inputs), inputs)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_all_same_bits(got, expected, "deterministic")


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    """Which of halfstep's operators go by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "halfstep":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_modes_see_operators_and_change_no_bit():
    """Selective checkpoints and counters of work are such modes."""
    inputs = leaves()
    expected = [with_bias(*inputs), *gradients(with_bias(*inputs), inputs)]
    with Names() as mode:
        out = with_bias(*inputs)
        got = [out, *gradients(out, inputs)]
    assert mode.seen == ["attention", "attention_backward"]
    assert_all_same_bits(got, expected, "under a mode")


def test_lazy_signs_are_resolved():
    """A negative view holds the opposite of its values, which a kernel would read."""
    inputs = [t.detach().to(torch.complex64) for t in qkv()]
    views = [(t * 1j).conj().imag.requires_grad_() for t in inputs]
    assert all(t.is_neg() for t in views)
    plain = [t.detach().resolve_neg().requires_grad_() for t in views]
    asked = Asked()
    with backend.override(asked):
        out = hs.attention(*views)
    assert not any(t.is_neg() for t in asked.calls[0][:3])
    assert_same_bits(out, hs.attention(*plain), "out")
    assert_all_same_bits(gradients(out, views), gradients(hs.attention(*plain), plain), "gradients")
    d_out = (out.detach().to(torch.complex64) * 1j).conj().imag
    got = torch.autograd.grad(hs.attention(*plain), plain, d_out)
    assert_all_same_bits(got, torch.autograd.grad(hs.attention(*plain), plain, d_out.resolve_neg()), "from a lazy sign")


def test_zeros_that_have_no_memory_are_zeros():
    """As autograd makes them; a backend would read what is nobody's."""
    q, k, v = qkv()
    asked = Asked()
    with backend.override(asked):
        out = hs.attention(q, k, torch._efficientzerotensor(v.shape))
    assert not asked.calls[0].v._is_zerotensor()
    assert not out.any()
    out = hs.attention(q, k, v)
    for gradient in torch.autograd.grad(out, [q, k, v], torch._efficientzerotensor(out.shape)):
        assert not gradient.any()


def test_a_window_beyond_any_length_is_none():
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    assert_same_bits(hs.attention(q, k, v, window=2**70), hs.attention(q, k, v), "out")
