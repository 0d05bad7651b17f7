"""CUDA kernels past 2**31 elements: offsets are 64-bit in every operator. (Memory for this: folded_memory.py.)

Under the emulator, where only the blocks at both ends of a grid run: the others would do the same to the zeros between.

Guards: a 32-bit index of an element or byte, a quad of random words cut to 32 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from bits import assert_same_bits
from emulated_cuda import EmulatedBackend, ends_only
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("memory is folded with memfd_create, which Linux has", allow_module_level=True)

from folded_memory import FoldedZeros

from halfstep.ops import reference_torch
from halfstep.reference import AdamGroup, round_stochastic, round_to
from halfstep.reference.philox import philox_words
from halfstep.reference.step import AdamRow, StepInputs

NUMEL = 2**31 + 5
END = torch.tensor([3.0, 4.0, 0.0])  # written over the last elements of what is 0 elsewhere
LAST = 7


@pytest.fixture
def backend() -> Iterator[EmulatedBackend]:
    with ends_only(2) as emulated_ends:
        yield emulated_ends


def test_grad_stats_and_unscale(backend):
    with FoldedZeros(NUMEL, BFLOAT16) as x:
        x[-3:] = END
        total, first_bad = backend.grad_stats([x], None)
        assert (total.item(), first_bad.item()) == (25.0, -1)
        assert backend.unscale_([x], torch.tensor(0.5)).item() == -1
        assert x[-4:].tolist() == [0.0, 1.5, 2.0, 0.0]
        assert not x[:100].any()
        x[-1] = float("inf")
        assert backend.grad_stats([x], None)[1].item() == 0
        assert backend.unscale_([x], torch.tensor(1.0)).item() == 0


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_cast(backend, stochastic):
    with FoldedZeros(NUMEL, FLOAT32) as x, FoldedZeros(NUMEL, FLOAT16) as y:
        x[-LAST:] = torch.arange(1, 1 + LAST) / 3
        backend.cast_([y], [x], stochastic=stochastic, seed=5)
        words = philox_words(5, 0, 0, 0, NUMEL - LAST, LAST, "cpu")
        expected = round_stochastic(x[-LAST:], FLOAT16, words) if stochastic else round_to(x[-LAST:], FLOAT16)
        assert_same_bits(y[-LAST:], expected, "cast")
        assert not y[:100].any()


def test_accumulate(backend):
    with FoldedZeros(NUMEL, FLOAT32) as sums, FoldedZeros(NUMEL, BFLOAT16) as x:
        sums[-3:], x[-3:] = 10.0, END
        backend.accumulate_([sums], [x])
        assert sums[-4:].tolist() == [0.0, 13.0, 14.0, 10.0]
        assert not sums[:100].any()


@pytest.mark.parametrize(("weight", "state"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=str)
def test_update(backend, weight, state):
    """The last elements get what they get in a short tensor, also the random words of their place in the whole."""
    group = AdamGroup(0.1, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    with (
        FoldedZeros(NUMEL, weight) as p, FoldedZeros(NUMEL, weight) as g, FoldedZeros(NUMEL, state) as m,
        FoldedZeros(NUMEL, state) as v,
    ):  # fmt: skip
        p[-3:], g[-LAST:] = END, 1 / (1 + torch.arange(LAST)).to(weight)
        row = AdamRow(p, m, v, None, None, torch.tensor(0), group=0, param_id=0, first_index=0)
        short = row._replace(
            param=p[-LAST:].clone(), exp_avg=m[-LAST:].clone(), exp_avg_sq=v[-LAST:].clone(), step=torch.tensor(0),
            first_index=NUMEL - LAST,
        )  # fmt: skip
        for module, rows in ((backend, row), (reference_torch, short)):
            plan = module.AdamPlan([rows])
            plan.set_grads([g[-rows.param.numel() :]])
            plan.update([group], StepInputs(seed=3, stochastic_weight=True))
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert_same_bits(last(row, name), getattr(short, name), name)
            assert not getattr(row, name)[:100].any()
        assert row.step == 1


def last(row: AdamRow, name: str) -> Tensor:
    return getattr(row, name)[-LAST:]
