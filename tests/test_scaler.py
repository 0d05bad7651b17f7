"""LossScaler in a training loop: scaling, skips, several and foreign optimizers, misuse."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from bits import assert_same_bits
from optimizer_runs import (
    assert_same,
    assert_unchanged,
    held,
    overflow,
    parameters,
    params_of,
    set_grads,
    set_scaled_grads,
    skipped_step,
    train,
)
from torch.nn import Parameter

import halfstep as hs


# ---- scale() ---------------------------------------------------------------------------------------------------------
def test_scale_keeps_the_shape_of_what_it_gets():
    scaler, one = hs.LossScaler(init_scale=8.0), torch.ones(())
    assert scaler.scale(one) == 8
    scaled = scaler.scale([one, (2 * one, [3 * one])])
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert (scaled[0], scaled[1][0], scaled[1][1][0]) == (8, 16, 24)
    assert scaler.scale(one * i for i in (1, 2)) == [8, 16]
    assert scaler.scale(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_16_bit_loss_does_not_overflow_in_the_scaling(dtype):
    loss = torch.tensor(4.0, dtype=dtype, requires_grad=True)
    scaled = hs.LossScaler(init_scale=2.0**30).scale(loss)
    assert scaled.dtype is FLOAT32
    assert scaled == 2.0**32


def test_scale_is_differentiable():
    weight = torch.ones(3, requires_grad=True)
    hs.LossScaler(init_scale=16.0).scale(weight.sum()).backward()
    assert weight.grad.tolist() == [16.0] * 3


@pytest.mark.parametrize("wrong", ["loss", {"loss": torch.ones(())}, 1.0, None])
def test_what_cannot_be_scaled(wrong):
    with pytest.raises(
        TypeError, match=rf"scale\(\) takes a tensor or an iterable of tensors, got {type(wrong).__name__}"
    ):
        hs.LossScaler().scale(wrong)


# ---- the step --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scale_that_is_a_power_of_two_leaves_no_trace(dtype, clip, unscale_first):
    """The same bits as without a scaler, with the gradients 1,024 times as large."""
    plain, optimizer = (hs.AdamW(parameters(dtype), max_grad_norm=clip, skip_nonfinite=True) for _ in range(2))
    scaler = hs.LossScaler(init_scale=1024.0)
    for t in range(5):
        train(plain, [t])
        set_scaled_grads(optimizer, scaler, t)
        if unscale_first:
            scaler.unscale_(optimizer)
        assert not scaler.step(optimizer)
        scaler.update()
        assert_same_bits(optimizer.grad_norm, plain.grad_norm, "norm")
    assert_same(held(optimizer), held(plain))


def test_small_gradients_survive_float16():
    """Without the scale the gradient rounds to 0 in float16; with it the step is the exact gradient's."""
    x = torch.tensor([2.0**-20, -(2.0**-22)])
    results = []
    for scale in (1.0, 2.0**12):
        weight = Parameter(torch.ones(2, dtype=FLOAT16))
        optimizer, scaler = hs.AdamW([weight], lr=1e-2, weight_decay=0.0, eps=0.0), hs.LossScaler(init_scale=scale)
        scaler.scale((weight.float() * x).sum() * 2.0**-10).backward()
        results.append(weight.grad.clone())
        scaler.step(optimizer)
        if scale > 1:
            moment = optimizer.state[weight]["exp_avg"]
            assert ((moment / (x * 2.0**-10 * 0.1) - 1).abs() <= 4 * torch.finfo(FLOAT32).eps).all()
    assert results[0].tolist() == [0.0, 0.0]
    assert (results[1] != 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_skip_changes_no_bit_and_is_told_without_waiting(dtype):
    optimizer, scaler = hs.AdamW(parameters(dtype), skip_nonfinite=False), hs.LossScaler(init_scale=64.0)
    set_scaled_grads(optimizer, scaler, 1)
    assert not scaler.step(optimizer)
    scaler.update()
    before = held(optimizer)
    skipped = skipped_step(scaler, optimizer)
    assert (skipped.shape, skipped.dtype, skipped.item()) == ((), torch.bool, True)
    assert skipped is optimizer.skipped
    assert_same(held(optimizer), before)
    scaler.update()
    assert scaler.get_scale() == 32.0


def test_the_check_looks_at_the_unscaled_value():
    """Finite gradients that overflow when they are multiplied with 1 / scale."""
    optimizer, scaler = hs.AdamW(parameters(FLOAT32)), hs.LossScaler(init_scale=2.0**-20, min_scale=2.0**-30)
    set_grads(params_of(optimizer), 1)
    params_of(optimizer)[1].grad.fill_(1e35)
    before = held(optimizer)
    with pytest.warns(RuntimeWarning, match="parameter 1 of group 0"):
        assert scaler.step(optimizer)
    assert_unchanged(optimizer, before)


def test_a_gradient_that_overflows_float16_only_while_scaled_is_a_skip():
    weight = Parameter(torch.ones(1, dtype=FLOAT16))
    optimizer, scaler = hs.AdamW([weight]), hs.LossScaler()
    scaler.scale(weight * 2).backward()
    assert weight.grad.item() == math.inf
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert scaler.step(optimizer)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_unscale_of_16_bit_gradients_is_allowed(dtype):
    """torch.amp.GradScaler refuses float16 here; the master keeps what the gradient loses."""
    optimizer, scaler = hs.AdamW(parameters(dtype)), hs.LossScaler(init_scale=256.0)
    set_grads(params_of(optimizer), 1)
    expected = [p.grad / 256 for p in params_of(optimizer)]
    scaler.unscale_(optimizer)
    assert all(torch.equal(p.grad, e) for p, e in zip(params_of(optimizer), expected, strict=True))
    assert not scaler.step(optimizer)


def test_clip_between_unscale_and_step():
    optimizer, scaler = hs.AdamW(parameters(FLOAT32)), hs.LossScaler(init_scale=256.0)
    plain = hs.AdamW(parameters(FLOAT32))
    set_grads(params_of(plain), 1)
    set_scaled_grads(optimizer, scaler, 1)
    scaler.unscale_(optimizer)
    norms = [torch.nn.utils.clip_grad_norm_(params_of(o), 0.25) for o in (plain, optimizer)]
    assert norms[0] == norms[1]
    scaler.step(optimizer)
    plain.step()
    assert_same(held(optimizer), held(plain))


@pytest.mark.parametrize("ours", [True, False], ids=["halfstep", "foreign"])
def test_gradients_that_become_inf_after_unscale(ours):
    """halfstep's optimizers look again in the step. Others are judged by what unscale_() saw, as documented."""
    params = parameters(FLOAT32)
    optimizer = hs.AdamW(params) if ours else torch.optim.SGD(params, lr=0.1)
    scaler = hs.LossScaler()
    set_grads(params, 1)
    scaler.unscale_(optimizer)
    params[0].grad[0] = math.inf
    if ours:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert scaler.step(optimizer)
        assert all(p.isfinite().all() for p in params)
    else:
        assert not scaler.step(optimizer)
        assert params[0][0].isinf()


def test_an_overflow_seen_by_unscale_skips_though_the_gradients_were_repaired():
    optimizer, scaler = hs.AdamW(parameters(FLOAT16)), hs.LossScaler()
    overflow(optimizer)
    scaler.unscale_(optimizer)
    params_of(optimizer)[0].grad.zero_()
    with pytest.warns(RuntimeWarning, match="found_inf was set"):
        assert scaler.step(optimizer)


# ---- scales at the edge of float32 -----------------------------------------------------------------------------------
FINFO = torch.finfo(FLOAT32)


@pytest.mark.parametrize("scale", [FINFO.tiny, 2.0**-100, 2.0**100, FINFO.max])
@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW], ids=["halfstep", "foreign"])
def test_the_inverse_of_every_scale_within_the_bounds_is_right(cls, scale):
    """1 / FLT_MIN is finite; 1 / FLT_MAX is a denormal of 21 bits, not 0."""
    weight = Parameter(torch.ones(2))
    optimizer = cls([weight], weight_decay=0.0)
    scaler = hs.LossScaler(init_scale=scale, min_scale=FINFO.tiny, max_scale=FINFO.max)
    scaler.scale((weight * torch.tensor([0.5, -0.75])).sum()).backward()
    assert not scaler.step(optimizer)
    wanted = 0.1 * torch.tensor([0.5, -0.75])
    assert ((optimizer.state[weight]["exp_avg"] / wanted - 1).abs() <= 2.0**-21).all()


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW], ids=["halfstep", "foreign"])
def test_a_product_beyond_float32_is_a_skip_until_the_scale_fits(cls):
    """Gradients of 2^40 under a scale of 2^100: it halves until the product is finite; that step is exact."""
    weight, plain = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer, other = cls([weight], lr=0.1), cls([plain], lr=0.1)
    scaler = hs.LossScaler(init_scale=2.0**100, max_scale=2.0**126)
    skips = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="halfstep: .* skipped")
        while True:
            optimizer.zero_grad()
            scaler.scale((weight * 2.0**40).sum()).backward()
            skipped = scaler.step(optimizer).item()
            scaler.update()
            if not skipped:
                break
            skips += 1
    assert (skips, scaler.get_scale()) == (13, 2.0**87)
    plain.grad = torch.full((3,), 2.0**40)
    other.step()
    assert_same(held(optimizer), held(other))


@pytest.mark.parametrize("cls", [hs.AdamW, torch.optim.AdamW], ids=["halfstep", "foreign"])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_product_that_overflows_in_the_unscaling_is_a_skip(cls, unscale_first):
    """Finite gradients, a finite inverse of 2^126, and a product that is neither."""
    optimizer = cls(parameters(FLOAT32))
    scaler = hs.LossScaler(init_scale=FINFO.tiny, min_scale=FINFO.tiny)
    set_grads(params_of(optimizer), 1, spread=8.0)
    before = held(optimizer)
    if unscale_first:
        scaler.unscale_(optimizer)
    with pytest.warns(RuntimeWarning, match="parameter 0 of group 0"):
        assert scaler.step(optimizer)
    assert_unchanged(optimizer, before)
    with pytest.warns(RuntimeWarning, match=r"at its minimum, 1\.17549e-38, .* parameter 0 of group 0"):
        scaler.update()
    assert scaler.get_scale() == FINFO.tiny
