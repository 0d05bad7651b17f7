"""hs.attention under torch.compile(fullgraph=True), torch.export and FakeTensorMode: the eager bits, lengths that vary.

Guards: a graph break, a graph for every length, a length or a seed that became a constant, a gradient that is made
though nobody needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from attention_tensors import Asked, drawn, gradients, packed_rows, qkv
from bits import assert_all_same_bits
from compile_twins import graphs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep as hs
from halfstep.ops import backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two calls with operations around them; the second one's lse is used, and queries are as torch lays them out."""
    first = hs.attention(q * 2, k, v, causal=True, softcap=5.0)
    q = (q.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1).unflatten(-1, q.shape[1::2]).transpose(1, 2)
    slopes = torch.ones(q.shape[1], device=q.device)
    second, lse = hs.attention(
        q, k, v, window=(3, 2), alibi_slopes=slopes, dropout_p=0.25, seed=5, scale=0.3, return_lse=True
    )
    return first + second * lse.nan_to_num(neginf=0.0).to(second.dtype)[..., None]


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2], device=q.device) != 1
    return hs.attention(q, k, v, mask=mask, bias=bias * 2)


def results(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = call(*inputs)
    return [out, *gradients(out, [t for t in inputs if t.requires_grad])]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_it_gives_the_eager_bits(dtype):
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_all_same_bits(results(compiled, qkv(dtype)), results(block, qkv(dtype)), "compiled")


def test_lengths_vary_in_one_graph():
    """The first length is a constant, the second makes a graph for all lengths."""
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for queries in (5, 6, 9, 12):
        inputs = qkv(queries=queries)
        assert_all_same_bits(results(compiled, inputs), results(block, inputs), f"{queries} queries")
    assert graphs() == 2


def test_all_sizes_of_lengths_may_be_marked_at_once():
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    for queries, keys in ((5, 7), (9, 4), (3, 3)):
        q, k, v = (drawn((2, h, n, 16), FLOAT32, h).requires_grad_() for h, n in ((4, queries), (2, keys), (2, keys)))
        bias = drawn((4, queries, keys), FLOAT32, 9).requires_grad_()
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
        torch._dynamo.mark_dynamic(bias, 1)
        torch._dynamo.mark_dynamic(bias, 2)
        inputs = [q, k, v, bias]
        assert_all_same_bits(results(compiled, inputs), results(masked, inputs), f"{queries} and {keys}")
    assert graphs() == 1


def test_heads_and_dims_may_vary_too():
    """Each dim makes a graph: the default scale, which follows from it, is a constant of one."""

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hs.attention(q, k, v, causal=True)

    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, heads, dim in ((2, 4, 16), (3, 6, 16), (4, 8, 40)):
        inputs = [drawn((batch, h, 6, dim), FLOAT32, h).requires_grad_() for h in (heads, heads // 2, heads // 2)]
        assert_all_same_bits(results(compiled, inputs), results(causal, inputs), f"{batch}, {heads}, {dim}")
    assert graphs() == 2


@pytest.mark.parametrize("subset", [(0,), (1, 2), (3,)])
def test_only_the_gradients_that_are_needed(subset):
    asked = Asked()
    inputs = [*qkv(grad=False), drawn((4, 5, 7), FLOAT32, 9)]
    for i in subset:
        inputs[i].requires_grad_()
    expected = results(masked, inputs)
    with backend.override(asked):
        got = results(torch.compile(masked, fullgraph=True, backend="aot_eager"), inputs)
    assert asked.needs == [tuple(i in subset for i in range(4))]
    assert asked.d_lse == [None]
    assert_all_same_bits(got, expected, "compiled")


def test_segments():
    def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        return hs.attention_varlen(q, k, v, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True) * 2

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for total, places in ((9, [0, 4, 4, 9]), (12, [0, 12]), (10, [0, 1, 10]), (15, [0, 5, 10, 14, 15])):
        inputs = [drawn((total, h, 16), FLOAT32, h).requires_grad_() for h in (4, 2, 2)]
        ends = torch.tensor(places, dtype=torch.int32)
        got, expected = (
            results(lambda *t, call=call: call(*t, ends, total), inputs)  # noqa: B023
            for call in (compiled, packed)
        )
        assert_all_same_bits(got, expected, f"{total} rows")
    assert graphs() <= 3  # total, segments


def test_rows_whose_number_depends_on_data():
    """Padding is dropped inside the graph."""

    def unpadded(x: Tensor, kept: Tensor) -> Tensor:
        rows = x[kept]
        ends = torch.nn.functional.pad(kept.sum()[None], (1, 0))
        return hs.attention_varlen(rows, rows, rows, ends, ends, causal=True)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(unpadded, fullgraph=True, backend="aot_eager")
        for period in (2, 3, 5):
            x, kept = drawn((10, 4, 16), FLOAT32, 1).requires_grad_(), torch.arange(10) % period != 0
            got, expected = (results(lambda x, call=call: call(x, kept), [x]) for call in (compiled, unpadded))  # noqa: B023
            assert_all_same_bits(got, expected, str(period))
    assert graphs() == 1


def test_wrong_segments_are_refused_when_the_graph_runs():
    compiled = torch.compile(hs.attention_varlen, fullgraph=True, backend="aot_eager")
    (q, k, v), ends = packed_rows(grad=False)
    compiled(q, k, v, ends, ends)
    with pytest.raises(ValueError, match=r"cu_seqlens_q goes from 0 to 10"):
        compiled(q, k, v, torch.where(ends == 9, 10, ends), ends)


def test_a_refusal_is_the_same_in_words():
    q, k, v = qkv(grad=False)
    with pytest.raises(TypeError, match=r"q is torch\.bfloat16, k torch\.float32"):
        torch.compile(hs.attention, backend="aot_eager")(q.bfloat16(), k, v)


def test_dropout_draws_in_the_graph():
    """A new seed at each call, and one that manual_seed decides."""
    inputs = qkv(grad=False)
    compiled = torch.compile(lambda *t: hs.attention(*t, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(*inputs), compiled(*inputs)
    torch.manual_seed(3)
    assert torch.equal(compiled(*inputs), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert_all_same_bits([hs.attention(*inputs, dropout_p=0.5)], [first], "eager")


def test_seeds_and_windows_become_variables():
    """scale, softcap and dropout_p are constants of a graph: each value makes one."""

    def numbers(q: Tensor, k: Tensor, v: Tensor, seed: int, window: int, scale: float) -> Tensor:
        return hs.attention(q, k, v, dropout_p=0.5, seed=seed, window=window, scale=scale)

    compiled = torch.compile(numbers, fullgraph=True, backend="aot_eager")
    for seed, window, scale, made in (
        (3, 2, 0.1, 1),
        (4, 3, 0.1, 2),
        (5, 4, 0.1, 2),
        (2**40, 1, 0.1, 2),
        (5, 4, 7.0, 3),
    ):
        inputs = qkv()
        got, expected = (
            results(lambda *t, call=call: call(*t, seed, window, scale), inputs)  # noqa: B023
            for call in (compiled, numbers)
        )
        assert_all_same_bits(got, expected, f"{seed}, {window}, {scale}")
        assert graphs() == made


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad):
    def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BFLOAT16):
            return hs.attention(q, k, v, causal=True)

    compiled = torch.compile(narrow, fullgraph=True, backend="aot_eager")
    inputs = qkv(grad=grad)
    run = results if grad else (lambda call, given: [call(*given)])
    got, expected = run(compiled, inputs), run(narrow, inputs)
    assert got[0].dtype == BFLOAT16
    assert_all_same_bits(got, expected, "autocast")


# Inductor's own imports warn
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(" " in torch.__file__, reason="torch's inductor does not quote paths: it cannot link here")
def test_inductor(tmp_path, monkeypatch):
    """It calls the operators with the strides of the trace. Views alone lie around it, so no C++ is compiled."""

    def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = hs.attention(q.transpose(1, 2), k, v, causal=True).transpose(1, 2)
        return out.reshape(out.shape[0], out.shape[1], -1)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = qkv()
    inputs[0] = drawn((2, 5, 4, 16), FLOAT32, 0).requires_grad_()
    compiled = torch.compile(between, fullgraph=True, backend="inductor")
    assert_all_same_bits(results(compiled, inputs), results(between, inputs), "inductor")


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block(q, k, v)

    inputs = qkv(grad=False)
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(Model(), tuple(inputs), dynamic_shapes=({2: length}, None, None))
    named = [str(node.target) for node in exported.graph.nodes]
    assert named.count("halfstep.attention.default") == 2
    for queries in (5, 9):
        inputs = qkv(grad=False, queries=queries)
        assert_all_same_bits([exported.module()(*inputs)], [block(*inputs)], f"{queries} queries")


def in_order(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers, its first three dimensions in memory in this order."""
    return t.permute(*order, 3).contiguous().permute(*(order.index(d) for d in range(3)), 3)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_fake_tensors_have_the_real_ones_sizes_and_strides(order):
    inputs = [in_order(t, order).requires_grad_() for t in (*qkv(grad=False), drawn((2, 4, 5, 7), FLOAT32, 9))]
    real = results(masked, inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        out = masked(*fakes)
        faked = [out, *torch.autograd.grad(out, fakes, torch.empty_like(out))]
        with torch.no_grad():
            assert masked(*fakes).stride() == out.stride()
    for got, expected in zip(faked, real, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_operator():
    """Not what a backend did with the lengths of that day, of which kernels on a device would leave no trace at all."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hs.attention(q, k, v, causal=True, window=3)

    traced = torch.jit.trace(call, tuple(qkv()))
    assert "halfstep::attention(" in str(traced.graph)
    for queries in (5, 400):
        inputs = qkv(queries=queries)
        assert_all_same_bits(results(traced, inputs), results(call, inputs), f"{queries} queries")
