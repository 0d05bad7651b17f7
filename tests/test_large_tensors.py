"""Tensors past 2**31 elements: offsets are 64-bit in every operator. (Memory for this: folded_memory.py.)"""

from __future__ import annotations

import sys

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from bits import assert_same_bits

if sys.platform != "linux":
    pytest.skip("memory is folded with memfd_create, which Linux has", allow_module_level=True)

from folded_memory import FoldedZeros

import halfstep as hs
from halfstep.ops import native_cpu, reference_torch
from halfstep.reference import AdamGroup
from halfstep.reference.step import AdamRow, StepInputs

NUMEL = 2**31 + 5
END = torch.tensor([3.0, 4.0, 0.0])  # written over the last elements of what is 0 elsewhere


def test_grad_stats_unscale_and_cast():
    with FoldedZeros(NUMEL, BFLOAT16) as x, FoldedZeros(NUMEL, FLOAT16) as y:
        x[-3:] = END
        norm, found_inf = hs.grad_stats([x])
        assert (norm.item(), found_inf.item()) == (5.0, 0.0)
        found_inf = torch.zeros(())
        hs.unscale_([x], 0.5, found_inf)
        assert x[-4:].tolist() == [0.0, 1.5, 2.0, 0.0]
        hs.cast_([y], [x])
        assert y[-4:].tolist() == [0.0, 1.5, 2.0, 0.0]
        x[-1] = float("inf")
        hs.unscale_([x], 1.0, found_inf)
        assert found_inf == 1
        assert not x[:100].any()
        assert not y[:100].any()


def test_norms_and_accumulation():
    """The sources end in what must be added to the last elements, and to nothing before them."""
    with FoldedZeros(NUMEL, FLOAT32) as x, FoldedZeros(NUMEL, FLOAT16) as y:
        x[-3:], y[-3:] = END, END / 2
        norms, total = hs.l2_norms([torch.tensor([12.0]), x])
        assert (norms.tolist(), total.item()) == ([12.0, 5.0], 13.0)
        hs.accumulate_([x], [y])
        assert x[-4:].tolist() == [0.0, 4.5, 6.0, 0.0]
        assert y[-4:].tolist() == [0.0, 1.5, 2.0, 0.0]
        assert not x[:100].any()


def test_update():
    """The last elements get what they get in a short tensor."""
    group = AdamGroup(0.1, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    with (
        FoldedZeros(NUMEL, BFLOAT16) as p, FoldedZeros(NUMEL, BFLOAT16) as g, FoldedZeros(NUMEL, FLOAT32) as m,
        FoldedZeros(NUMEL, FLOAT32) as v,
    ):  # fmt: skip
        p[-3:], g[-3:] = END, 1 / END
        g[-1] = -1
        row = AdamRow(p, m, v, None, None, torch.tensor(0), group=0, param_id=0, first_index=0)
        short = row._replace(
            param=p[-7:].clone(), exp_avg=m[-7:].clone(), exp_avg_sq=v[-7:].clone(), step=torch.tensor(0)
        )
        for module, rows in ((native_cpu, row), (reference_torch, short)):
            plan = module.AdamPlan([rows])
            plan.set_grads([g[-rows.param.numel() :]])
            plan.update([group], StepInputs())
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(row, name)[-7:], getattr(short, name), name)
        assert row.step == 1
        assert not p[:100].any()
