"""Steps that are skipped: every group, counter and bit stays as it was."""

from __future__ import annotations

import math

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from optimizer_runs import ROW_MODES, assert_same, held, parameters, set_grads, train
from torch.nn import Parameter

import halfstep as hs


def test_an_overflow_in_the_first_step_leaves_every_group_fresh():
    def build() -> tuple[list[Parameter], hs.AdamW]:
        params = [p for dtype in FLOATS for p in parameters(dtype, [(5,)])]
        return params, hs.AdamW([{"params": [p], "lr": 10.0 ** -(i + 2)} for i, p in enumerate(params)])

    params, optimizer = build()
    set_grads(params, 1)
    params[1].grad[2] = math.inf
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    assert optimizer.skipped
    assert {int(optimizer.state[p]["step"]) for p in params} == {0}
    _, fresh = build()
    train(optimizer, range(2, 5))
    train(fresh, range(2, 5))
    assert not optimizer.skipped
    assert_same(held(optimizer), held(fresh))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, 1e-45, math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", ROW_MODES, ids=str)
def test_any_found_inf_skips_and_a_skip_changes_no_bit(found_inf, dtype, options):
    """Two devices that both overflow may add up to 2."""
    params = parameters(dtype)
    optimizer = hs.AdamW(params, **options)
    train(optimizer, [1, 2])
    before = held(optimizer)
    set_grads(params, 3)
    grads = [p.grad.clone() for p in params]
    optimizer.found_inf = torch.tensor([found_inf])
    with pytest.warns(RuntimeWarning, match="found_inf was set"):
        optimizer.step()
    assert optimizer.skipped
    assert_same(held(optimizer), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))

    optimizer.found_inf = torch.zeros(1)
    optimizer.step()
    assert not optimizer.skipped
    assert {int(optimizer.state[p]["step"]) for p in params} == {3}


SKIPS = [
    (FLOAT32, {}, False),
    (FLOAT32, {"max_grad_norm": 1.0}, True),
    (FLOAT32, {"skip_nonfinite": True}, True),
    (FLOAT32, {"skip_nonfinite": False, "max_grad_norm": 1.0}, False),
    (BFLOAT16, {}, True),
    (FLOAT16, {"master": None, "stochastic_rounding": True}, True),
    (BFLOAT16, {"skip_nonfinite": False}, False),
]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("dtype", "options", "skips"), SKIPS, ids=str)
def test_what_skips_by_default(dtype, options, skips, bad):
    params = parameters(dtype)
    optimizer = hs.AdamW(params, **options)
    train(optimizer, [1])
    before = held(optimizer)
    set_grads(params, 2)
    params[1].grad[0, 0] = bad
    if skips:
        with pytest.warns(RuntimeWarning, match="skipped"):
            optimizer.step()
        assert_same(held(optimizer), before)
    else:
        optimizer.step()
    assert optimizer.skipped.item() == skips
    assert (optimizer.state[params[0]]["step"] == 2) != skips


def test_nan_propagates_in_float32_as_in_torch():
    ours, theirs = parameters(FLOAT32), parameters(FLOAT32)
    optimizers = hs.AdamW(ours), torch.optim.AdamW(theirs)
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        set_grads(params, 1)
        params[0].grad[:2] = torch.tensor([math.nan, math.inf])
        optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
    assert ours[0].isnan().sum() == 2
    assert not optimizers[0].skipped
