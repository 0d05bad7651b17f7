"""hs.attention_varlen: segments of one buffer are attention of each, and what is behind them is nothing."""

from __future__ import annotations

import torch
from attention_tensors import HEADS, gradients, packed_rows, written_out

import halfstep as hs


def test_segments_are_attention_of_each():
    (q, k, v), ends = packed_rows(torch.float64)
    out, lse = hs.attention_varlen(
        q, k, v, ends, ends.long(), max_seqlen_q=1, max_seqlen_k=torch.tensor(1), causal=True, return_lse=True
    )
    assert (out.shape, lse.shape, out.is_contiguous()) == ((9, HEADS, 24), (HEADS, 9), True)
    pieces = [[t[a:b].transpose(0, 1)[None] for t in (q, k, v)] for a, b in ((0, 4), (4, 9))]
    expected = torch.cat([written_out(*piece, causal=True)[0].transpose(0, 1) for piece in pieces])
    assert (out - expected).abs().max() < 1e-14
    for got, wanted in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        assert (got - wanted).abs().max() < 1e-13


def test_rows_after_the_last_segment():
    """A buffer of fixed size, filled in part: what is behind the segments changes nothing, and gets zeros."""
    q, k, v = (torch.randn(12, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse = hs.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True)
    exact = hs.attention_varlen(q[:9], k[:9], v[:9], ends, ends, causal=True)
    torch.testing.assert_close(out[:9], exact, rtol=0, atol=0)
    assert not out[9:].any()
    assert bool((lse[:, 9:] == -torch.inf).all())
    out.sum().backward()
    for tensor in (q, k, v):
        assert bool(tensor.grad[:9].any())
        assert not tensor.grad[9:].any()
