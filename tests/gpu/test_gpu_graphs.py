"""A step captured in a CUDA graph and replayed, against eager steps on the CPU, bit for bit.

Guards: a number that the capture freezes (rate, scale, counter, skip), an address that a replay no longer owns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twins import BFLOAT16, FLOAT16, MODES, Twins, quiet

import halfstep as hs

CAPTURED = list(MODES)


def replayed(twins: Twins, replay: Any, t: int, **gradients: Any) -> None:
    """Step t of both, the device's from the graph."""
    twins.backward(t, **gradients)
    with quiet():
        twins.host.step()
        with twins.gpu.used():
            replay()
    twins.assert_same()


@pytest.mark.parametrize("mode", CAPTURED)
def test_replays_are_steps(gpu: Any, mode: str) -> None:
    """Also one that is skipped, where something looks for it, and one that is eager again."""
    dtype, options = MODES[mode]
    twins = Twins(gpu, dtype, capturable=True, **options)
    for t in range(2):
        twins.step(t)
    replay = gpu.capture(twins.there.step)
    twins_before = twins.host.own_states().own_state(twins.host_params[0])["step"].item()
    checked = dtype != torch.float32 or "max_grad_norm" in options
    for t in range(2, 6):
        replayed(twins, replay, t, bad=checked and t == 4)
        assert bool(twins.there.skipped) == (checked and t == 4)
    assert twins.host.own_states().own_state(twins.host_params[0])["step"].item() == twins_before + (4 - checked)
    twins.step(6)
    twins.assert_same()
    twins.backward(7)
    twins.host.step()
    with gpu.used():
        replay()
    twins.assert_same_states()  # the results are in the tensors of the capture, which the eager step has replaced


@pytest.mark.parametrize("rate_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=str)
def test_a_rate_on_the_device_changes_between_replays(gpu: Any, options: Any, rate_dtype: torch.dtype) -> None:
    rate = torch.tensor(0.01, dtype=rate_dtype, device=gpu.device)
    twins = Twins(gpu, BFLOAT16, rate=rate, lr=float(rate), capturable=True, max_grad_norm=1.0, **options)
    for t in range(2):
        twins.step(t)
        twins.assert_same()
    replay = gpu.capture(twins.there.step)
    for t in range(2, 6):
        twins.there.param_groups[0]["lr"].fill_(0.1 / t)
        twins.host.param_groups[0]["lr"] = twins.there.param_groups[0]["lr"].item()
        replayed(twins, replay, t)


@pytest.mark.parametrize(("dtype", "options"), [(FLOAT16, {}), (BFLOAT16, {"master": "split", "max_grad_norm": 0.5})])
def test_the_scalers_scale_changes_between_replays(gpu: Any, dtype: torch.dtype, options: Any) -> None:
    """By hand, by growth, and by an overflow."""
    twins = Twins(gpu, dtype, capturable=True, **options)
    scalers = [hs.LossScaler(init_scale=256.0, growth_interval=3) for _ in "ab"]
    ones = [torch.ones((), device=device) for device in ("cpu", gpu.device)]

    def step(scaler: hs.LossScaler, optimizer: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    for scaler, one in zip(scalers, ones, strict=True):
        scaler.scale(one)
    replay, scales = None, []
    for t in range(9):
        scales.append(scalers[0].get_scale())
        assert scalers[1].get_scale() == scales[-1]
        twins.backward(t, scales[-1], bad=t == 7)
        with quiet():
            step(scalers[0], twins.host)
            if t == 2:
                replay = gpu.capture(lambda: step(scalers[1], twins.there))
            with gpu.used():
                replay() if replay else step(scalers[1], twins.there)
        twins.assert_same()
        if t == 4:
            for scaler in scalers:
                scaler.update(64.0)
    assert scales[:5] == [256.0, 256.0, 256.0, 512.0, 512.0]
    assert scales[5] == 64.0
    assert scales[8] < scales[7]


def test_two_graphs_of_one_optimizer(gpu: Any) -> None:
    """Both advance the same states."""
    twins = Twins(gpu, BFLOAT16, capturable=True, master="split", max_grad_norm=1.0)
    for t in range(2):
        twins.step(t)
    replays = [gpu.capture(twins.there.step) for _ in "ab"]
    replayed(twins, replays[1], 2)
    twins.backward(3)
    twins.host.step()
    with gpu.used():
        replays[0]()
    twins.assert_same_states()
