"""The public optimizers, scalers and list functions on the GPU against the CPU's kernels, bit for bit.

Guards: a setting that does not reach the device's kernels, a layout that is read in the wrong order, a state that is on
the wrong device, a skip that changes something.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from adversarial import FLOATS, awkward, ordinary
from bits import assert_all_same_bits, assert_same_bits
from drawn_optimizers import LAYOUTS, laid_out
from optimizer_runs import parameters, saved_and_loaded
from torch.nn import Parameter
from twins import BFLOAT16, FLOAT16, FLOAT32, MODES, SHAPES, Twins, moved, quiet

import halfstep as hs

LENGTHS = [(0,), (1,), (7,), (1023,), (8193,), (16385,), (65537,)]


@pytest.mark.parametrize("cls", [hs.AdamW, hs.Adam])
@pytest.mark.parametrize(("dtype", "options"), MODES.values(), ids=MODES)
def test_steps(gpu: Any, dtype: torch.dtype, options: dict[str, Any], cls: Any) -> None:
    twins = Twins(gpu, dtype, cls=cls, weight_decay=0.1, lr=1e-2, **options)
    for t in range(4):
        twins.step(t)
        twins.assert_same()


def test_groups_have_their_own_settings(gpu: Any) -> None:
    settings = [dict(lr=0.1), dict(lr=1e-3, betas=(0.3, 0.5)), dict(weight_decay=0.0, eps=1e-3, maximize=True)]

    def grouped(params: list[Parameter], **options: Any) -> hs.AdamW:
        return hs.AdamW([{"params": params[i::3], **group} for i, group in enumerate(settings)], **options)

    twins = Twins(gpu, BFLOAT16, cls=grouped, master="split", max_grad_norm=1.0)
    for t in range(3):
        for optimizer in (twins.host, twins.there):
            optimizer.param_groups[0]["lr"] = 0.1 / (t + 1)
        twins.step(t)
        twins.assert_same()


def test_a_large_tensor_among_small_ones(gpu: Any) -> None:
    """Several chunks and blocks."""
    weights = parameters(BFLOAT16, gpu.shapes([(3,), (70001,), (5,), (65536,)]))
    twins = Twins(gpu, BFLOAT16, weights=weights, max_grad_norm=0.1)
    for t in range(2):
        twins.step(t)
        twins.assert_same()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_layouts(gpu: Any, dtype: torch.dtype, layout: str) -> None:
    """Of parameters and of gradients."""
    weights = [laid_out(ordinary(shape, dtype, 3), layout) for shape in gpu.shapes([(4, 6), (2, 3, 4, 5), (300, 7)])]
    twins = Twins(gpu, dtype, weights=weights, max_grad_norm=0.5)
    for t in range(2):
        twins.backward(t)
        if t == 1:
            for p, twin in zip(twins.params, twins.host_params, strict=True):
                twin.grad = laid_out(twin.grad, layout)
                p.grad = moved(twin.grad, gpu.device)
        twins.host.step()
        with gpu.used():
            twins.there.step()
        twins.assert_same()


@pytest.mark.parametrize("options", [{}, {"master": "split", "dtype": BFLOAT16}, {"max_grad_norm": 0.5}], ids=str)
def test_under_the_loss_scaler(gpu: Any, options: dict[str, Any]) -> None:
    """Three clean steps, one that overflows, two more: weights, states and the scale."""
    options = dict(options)
    twins = Twins(gpu, options.pop("dtype", FLOAT16), **options)
    scalers = [hs.LossScaler(init_scale=512.0, growth_interval=2) for _ in "ab"]
    for t in range(6):
        scale = scalers[0].get_scale()
        twins.backward(t, scale, bad=t == 3)
        with quiet():
            scalers[0].scale(torch.ones(()))
            scalers[0].step(twins.host)
            scalers[0].update()
            with gpu.used():
                scalers[1].scale(torch.ones((), device=gpu.device))
                skipped = scalers[1].step(twins.there)
                scalers[1].update()
        assert skipped.device == gpu.device
        assert bool(skipped) == (t == 3)
        twins.assert_same()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert scalers[1].scale(torch.ones((), device=gpu.device)).device == gpu.device
    assert [s.get_scale() for s in scalers] == [1024.0, 1024.0]


def test_under_torchs_grad_scaler(gpu: Any) -> None:
    twins = Twins(gpu, FLOAT16, max_grad_norm=0.5)
    scalers = [torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=2) for kind in ("cpu", gpu.device.type)]
    for scaler, device in zip(scalers, ("cpu", gpu.device), strict=True):
        scaler.scale(torch.ones(1, device=device))
    for t in range(5):
        twins.backward(t, scalers[0].get_scale(), bad=t == 2)
        with quiet():
            scalers[0].step(twins.host)
            scalers[0].update()
            with gpu.used():
                scalers[1].step(twins.there)
                scalers[1].update()
        assert bool(twins.there.skipped) == (t == 2)
        twins.assert_same()
        assert scalers[0].get_scale() == scalers[1].get_scale()


def test_a_skipped_step_is_told_by_name(gpu: Any) -> None:
    """Later, when the answer has come to the host by itself."""
    twins = Twins(gpu, BFLOAT16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        twins.step(0, bad=True)
        gpu.synchronize()
        twins.step(1)
    messages = [str(w.message) for w in told]
    assert len(messages) == 1
    assert "a step was skipped" in messages[0]
    assert "parameter 1 of group 0" in messages[0]
    twins.assert_same()


def test_checkpoints_go_between_devices(gpu: Any) -> None:
    twins = Twins(gpu, BFLOAT16, master="split", max_grad_norm=1.0)
    for t in range(2):
        twins.step(t)
    saved = saved_and_loaded(twins.there.state_dict()), saved_and_loaded(twins.host.state_dict())
    others = Twins(gpu, BFLOAT16, weights=twins.host_params, master="split", max_grad_norm=1.0)
    others.host.load_state_dict(saved[0])
    others.there.load_state_dict(saved[1])
    for t in range(2, 4):
        twins.step(t)
        others.step(t)
        others.assert_same()
        twins.assert_same()
    assert_all_same_bits(others.host_params, twins.host_params, "weights")


# ---- functions on lists ----------------------------------------------------------------------------------------------
def finite(gpu: Any, seed: int) -> list[torch.Tensor]:
    return [ordinary(n, FLOATS[i % 3], seed + i) for i, n in enumerate(gpu.shapes(LENGTHS))]


def any_numbers(gpu: Any, seed: int) -> list[torch.Tensor]:
    return [awkward(math.prod(n), FLOATS[i % 3], seed + i) for i, n in enumerate(gpu.shapes(LENGTHS))]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_cast(gpu: Any, rounding: str) -> None:
    for dtype in FLOATS:
        src = any_numbers(gpu, 1)
        expected, got = ([torch.empty_like(s, dtype=dtype, device=d) for s in src] for d in ("cpu", gpu.device))
        hs.cast_(expected, src, rounding=rounding, seed=7)
        with gpu.used():
            hs.cast_(got, [moved(s, gpu.device) for s in src], rounding=rounding, seed=7)
        assert_all_same_bits([g.cpu() for g in got], expected, str(dtype))


def test_accumulate(gpu: Any) -> None:
    src = any_numbers(gpu, 2)
    expected = [awkward(s.numel(), FLOAT32, i) for i, s in enumerate(src)]
    got = [moved(e, gpu.device) for e in expected]
    hs.accumulate_(expected, src)
    with gpu.used():
        hs.accumulate_(got, [moved(s, gpu.device) for s in src])
    assert_all_same_bits([g.cpu() for g in got], expected, "sums")


@pytest.mark.parametrize("numbers", [finite, any_numbers])
def test_statistics(gpu: Any, numbers: Any) -> None:
    grads = numbers(gpu, 3)
    away = [moved(g, gpu.device) for g in grads]
    with gpu.used():
        got = [*hs.grad_stats(away, 3.0), *hs.l2_norms(away)]
    expected = [*hs.grad_stats(grads, 3.0), *hs.l2_norms(grads)]
    assert_all_same_bits([g.cpu() for g in got], expected, "statistics")


@pytest.mark.parametrize("numbers", [finite, any_numbers])
def test_unscale(gpu: Any, numbers: Any) -> None:
    grads = numbers(gpu, 4)
    away, found = [moved(g, gpu.device) for g in grads], torch.zeros(1, device=gpu.device)
    with gpu.used():
        hs.unscale_(away, 0.37, found)
    hs.unscale_(grads, 0.37, torch.zeros(1))
    assert_all_same_bits([a.cpu() for a in away], grads, "gradients")
    assert bool(found) == (numbers is any_numbers)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping(gpu: Any, max_norm: float) -> None:
    params = parameters(FLOAT32, gpu.shapes(SHAPES))
    for p in params:
        p.grad = ordinary(tuple(p.shape), FLOAT32, 1)
    away = [Parameter(moved(p.detach(), gpu.device)) for p in params]
    for p, twin in zip(away, params, strict=True):
        p.grad = moved(twin.grad, gpu.device)
    with gpu.used():
        norm = hs.clip_grad_norm_(away, max_norm)
    assert_same_bits(norm.cpu(), hs.clip_grad_norm_(params, max_norm), "norm")
    assert math.isfinite(norm)
    assert_all_same_bits([p.grad.cpu() for p in away], [p.grad for p in params], "gradients")
