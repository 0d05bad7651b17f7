"""hs.attention and hs.attention_varlen with Triton's interpreted kernels in the place of every backend.

Guards: an argument that does not reach the kernels, a function that goes past the override, an example that does not
train with them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_budget import judge
from attention_case import Case
from example_runs import Run, real_load, tiny, train_gpt
from interpreter import launches, names

import halfstep as hs
from halfstep.ops import backend as backends

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attention(backend):
    case = Case("public", (9, 12), heads=(4, 2), dims=(16, 8), scale=0.3, softcap=3.0, left=8, right=0, mask="B11K",
                bias="1HQK", alibi="BH", dropout_p=0.25, d_lse=True)  # fmt: skip
    drawn = case.draw(torch.bfloat16)
    call = drawn.call
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v, call.bias)]
    with backends.override(backend), launches() as made:
        out, lse = hs.attention(
            *inputs[:3], mask=call.mask, causal=True, window=(8, 2), scale=0.3, softcap=3.0, bias=inputs[3],
            alibi_slopes=call.alibi_slopes, dropout_p=0.25, seed=call.seed, return_lse=True,
        )  # fmt: skip
        gradients = torch.autograd.grad([out, lse], inputs, [drawn.d_out, drawn.d_lse])
    assert names(made) == ["forward", "delta", "keys", "queries", "bias"]
    judge(drawn, {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))})


def test_attention_of_segments(backend):
    drawn = Case(
        "segments", q_lengths=(5, 0, 12), k_lengths=(3, 4, 12), heads=(4, 2), right=0, alibi="H", dropout_p=0.25
    ).draw(torch.float16)
    call = drawn.call
    rows = [x[0].transpose(0, 1).requires_grad_() for x in (call.q, call.k, call.v)]
    with backends.override(backend), launches() as made:
        out, lse = hs.attention_varlen(
            *rows, call.cu_seqlens_q, call.cu_seqlens_k, causal=True, alibi_slopes=call.alibi_slopes, dropout_p=0.25,
            seed=call.seed, return_lse=True,
        )  # fmt: skip
        gradients = torch.autograd.grad(out, rows, drawn.d_out[0].transpose(0, 1))
    assert names(made) == ["forward", "delta", "keys", "queries"]
    named = {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    judge(drawn, {**{name: x.transpose(0, 1)[None] for name, x in named.items()}, "lse": lse[None]})


def test_the_example_trains(backend):
    """In float32: three steps' losses are those of the CPU's attention."""

    def run() -> list[float]:
        made = Run(tiny(precision="fp32", master="auto", steps=3, attention="halfstep"))
        for _ in range(3):
            train_gpt.train_step(made, real_load())
        return made.history.losses

    on_the_cpu = run()
    with backends.override(backend), launches() as made:
        losses: Any = run()
    assert names(made).count("forward") == names(made).count("queries") == 3
    torch.testing.assert_close(losses, on_the_cpu)
