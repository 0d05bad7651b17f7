"""What only a device shows: nothing waits for it, the caller's stream is used, memory stays, launches are few."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from adversarial import FLOATS, ordinary
from bits import assert_all_same_bits, assert_same_bits
from optimizer_runs import parameters
from torch.nn import Parameter
from twins import BFLOAT16, FLOAT16, FLOAT32, MODES, Twins, moved

import halfstep as hs

WARM = 3  # steps until every cache is filled, those of torch's allocators among them


def on_device(gpu: Any, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [moved(ordinary(n, dtype, seed + n), gpu.device) for (n,) in gpu.shapes([(5,), (70001,), (1,), (300,)])]


# ---- no waits ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_for_nothing(gpu: Any, mode: str) -> None:
    dtype, options = MODES[mode]
    twins = Twins(gpu, dtype, **options)
    for t in range(WARM):
        twins.step(t)
    for t in range(WARM, WARM + 2):
        twins.backward(t)
        twins.host.step()
        with gpu.no_waits(), gpu.used():
            twins.there.step()
        twins.assert_same()
    with gpu.no_waits(), gpu.used():
        twins.there.zero_grad()


@pytest.mark.parametrize("options", [{}, {"master": "split", "max_grad_norm": 0.5}], ids=str)
def test_a_scaled_step_waits_for_nothing(gpu: Any, options: dict[str, Any]) -> None:
    """The loss' scaling and the scale's update included."""
    twins = Twins(gpu, BFLOAT16 if options else FLOAT16, **options)
    scaler, loss = hs.LossScaler(init_scale=8.0), torch.ones((), device=gpu.device)

    def iteration() -> None:
        scaler.scale(loss)
        scaler.step(twins.there)
        scaler.update()

    for t in range(WARM + 2):
        twins.backward(t, 8.0)
        with gpu.used():
            if t < WARM:
                iteration()
            else:
                with gpu.no_waits():
                    iteration()
    assert int(twins.there.own_states().own_state(twins.params[0])["step"]) == WARM + 2


@pytest.mark.parametrize("rate_dtype", [FLOAT32, torch.float64], ids=str)
def test_a_step_with_its_rate_on_the_device_waits_for_nothing(gpu: Any, rate_dtype: torch.dtype) -> None:
    rate = torch.tensor(0.01, dtype=rate_dtype, device=gpu.device)
    twins = Twins(gpu, BFLOAT16, rate=rate, lr=float(rate), max_grad_norm=0.5)
    for t in range(WARM + 2):
        twins.backward(t)
        twins.host.step()
        with gpu.no_waits() if t >= WARM else nullcontext(), gpu.used():
            twins.there.step()
        twins.assert_same()
        twins.there.param_groups[0]["lr"].mul_(0.5)
        twins.host.param_groups[0]["lr"] = twins.there.param_groups[0]["lr"].item()


def calls(gpu: Any) -> dict[str, Callable[[], Any]]:
    grads, wide = on_device(gpu, BFLOAT16), on_device(gpu, FLOAT32, 100)
    params = [Parameter(w.clone()) for w in wide]
    for p, g in zip(params, on_device(gpu, FLOAT32, 200), strict=True):
        p.grad = g
    inverse, found = torch.full((), 0.5, device=gpu.device), torch.zeros(1, device=gpu.device)
    return {
        "cast_": lambda: hs.cast_(grads, wide),
        "cast_, stochastic": lambda: hs.cast_(grads, wide, "stochastic", seed=1),
        "accumulate_": lambda: hs.accumulate_(wide, grads),
        "grad_stats": lambda: hs.grad_stats(grads, 2.0),
        "grad_stats, scale on the device": lambda: hs.grad_stats(grads, inverse),
        "l2_norms": lambda: hs.l2_norms(wide),
        "unscale_": lambda: hs.unscale_(grads, 0.5, found),
        "unscale_, factor on the device": lambda: hs.unscale_(grads, inverse, found),
        "clip_grad_norm_": lambda: hs.clip_grad_norm_(params, 0.1),
    }


def test_the_functions_on_lists_wait_for_nothing(gpu: Any) -> None:
    for call in calls(gpu).values():
        with gpu.used():
            call()
            call()
            with gpu.no_waits():
                call()


def test_a_wait_is_noticed(gpu: Any) -> None:
    """Or the tests above would hold nothing."""
    value = torch.ones(1, device=gpu.device)
    with pytest.raises((RuntimeError, AssertionError)), gpu.no_waits():
        value.item()
    assert value.item() == 1


# ---- streams -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["float32", "bfloat16, split, clip"])
def test_a_step_runs_on_the_callers_stream(gpu: Any, mode: str) -> None:
    """Behind gradients that arrive late on it."""
    dtype, options = MODES[mode]
    twins = Twins(gpu, dtype, **options)
    twins.step(0)
    for t in range(1, 4):
        with gpu.side_stream():
            twins.step(t)
        twins.assert_same()


def test_functions_run_on_the_callers_stream(gpu: Any) -> None:
    src = [ordinary(n, FLOAT32, n) for (n,) in gpu.shapes([(5,), (70001,)])]
    dst, late = ([torch.zeros_like(s, device=gpu.device) for s in src] for _ in "ab")
    away = [moved(s, gpu.device) for s in src]
    with gpu.side_stream(), gpu.used():
        for a, s in zip(late, away, strict=True):
            a.copy_(s)
        hs.cast_(dst, late)
        norm, _ = hs.grad_stats(dst)
    assert_all_same_bits([d.cpu() for d in dst], src, "cast")
    assert_same_bits(norm.cpu(), hs.grad_stats(src)[0], "norm")


# ---- memory --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scaled", [False, True])
def test_steps_do_not_gather_memory(gpu: Any, scaled: bool) -> None:
    twins = Twins(gpu, FLOAT16, max_grad_norm=1.0)
    scaler, loss = hs.LossScaler(init_scale=1.0), torch.ones((), device=gpu.device)
    twins.backward(0)
    sizes = {}
    for count in range(1, WARM + gpu.many_steps + 1):
        with gpu.used():
            if scaled:
                scaler.scale(loss)
                scaler.step(twins.there)
                scaler.update()
            else:
                twins.there.step()
        gpu.synchronize()  # so that it has told what it did, and keeps only the last step's results
        if count in (WARM, WARM + gpu.many_steps):
            sizes[count] = gpu.allocated()
    assert len(set(sizes.values())) == 1, sizes


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=str)
def test_a_step_needs_its_workspace_and_no_more(gpu: Any, options: dict[str, Any]) -> None:
    """12 bytes for every 65,536 elements, 256 for a row, and what the allocator rounds up; not a copy of anything."""
    weights = parameters(BFLOAT16, gpu.shapes([(2**20,), (300,), (2**17 + 1,)]))
    twins = Twins(gpu, BFLOAT16, weights=weights, max_grad_norm=1.0, **options)
    for t in range(WARM):
        twins.backward(t)
        with gpu.used():
            twins.there.step()
    with gpu.used():
        peak = gpu.peak_of(twins.there.step)
    assert 0 < peak <= 12 * sum(w.numel() // 65536 + 1 for w in weights) + 256 * len(weights) + 16 * 512


# ---- launches ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["float32", "float32, clip", "bfloat16", "bfloat16, split, clip"])
def test_launches_of_a_step(gpu: Any, mode: str) -> None:
    dtype, options = MODES[mode]
    twins = Twins(gpu, dtype, **options)
    twins.step(0)
    with gpu.used(), gpu.launches() as made:
        twins.there.step()
    assert 2 <= len(made) <= 3, made


@pytest.mark.parametrize("dtypes", [[BFLOAT16], FLOATS], ids=["of one dtype", "of every dtype"])
@pytest.mark.parametrize("groups", [1, 10])
def test_launches_of_1000_small_tensors(gpu: Any, groups: int, dtypes: list[torch.dtype]) -> None:
    each = range(gpu.many_tensors)
    params = [Parameter(moved(ordinary(3 + i % 50, dtypes[i % len(dtypes)], i), gpu.device)) for i in each]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = hs.AdamW([{"params": params[i::groups], "lr": 1e-3 * (i + 1)} for i in range(groups)], max_grad_norm=1)
    with gpu.used():
        optimizer.step()
        with gpu.launches() as made:
            optimizer.step()
    # Triton launches both passes for each kind; the native kernels share launches
    assert 3 <= len(made) <= (1 + 2 * len(dtypes) if gpu.name == "triton" else 6), made
