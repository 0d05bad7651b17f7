"""Parameters on other devices than the current one, on several, and past 2**31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_runs import assert_same, copies, held, parameters, set_grads
from torch.nn import Parameter
from twins import BFLOAT16, FLOAT32, Twins, moved, quiet

import halfstep as hs

END = [3.0, 4.0, 0.0]


def others(gpu: Any) -> list[torch.device]:
    if not gpu.others:
        pytest.skip("there is one GPU")
    return gpu.others


def spread(shapes: list[tuple[int, ...]], dtype: torch.dtype, devices: list[Any]) -> list[Parameter]:
    """Parameters on the devices in turn."""
    weights = parameters(dtype, shapes)
    return [Parameter(moved(w.detach(), devices[i % len(devices)])) for i, w in enumerate(weights)]


def check_against_the_cpu(gpu: Any, devices: list[Any], **options: Any) -> None:
    """Four steps of a model over these devices, the third of them skipped."""
    shapes = [(7,), (300,), (40, 40), (), (9, 5)]
    params = spread(shapes, BFLOAT16, devices)
    optimizer = hs.AdamW(params, **options)
    judge = hs.AdamW(copies(parameters(BFLOAT16, shapes)), **options)
    with quiet():
        for t in range(4):
            for one in (optimizer, judge):
                owned = one.param_groups[0]["params"]
                set_grads(owned, t)
                if t == 2:
                    owned[3].grad.fill_(float("nan"))
            judge.step()
            with gpu.used():
                optimizer.step()
            assert bool(optimizer.skipped) == bool(judge.skipped) == (t == 2)
            assert_same({key: value.cpu() for key, value in held(optimizer).items()}, held(judge))
            assert optimizer.grad_norm.item() == pytest.approx(judge.grad_norm.item(), nan_ok=True)
        optimizer.state_dict()  # tells what is left to tell


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=str)
def test_a_device_that_is_not_the_current_one(gpu: Any, options: dict[str, Any]) -> None:
    check_against_the_cpu(gpu, others(gpu)[:1], max_grad_norm=0.5, **options)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_model_over_two_devices(gpu: Any, max_norm: float | None) -> None:
    check_against_the_cpu(gpu, [gpu.device, others(gpu)[0]], max_grad_norm=max_norm)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_model_half_on_the_cpu(gpu: Any, max_norm: float | None) -> None:
    check_against_the_cpu(gpu, [gpu.device, torch.device("cpu")], max_grad_norm=max_norm, master="split")


def test_functions_on_another_device(gpu: Any) -> None:
    device = others(gpu)[0]
    dst, src = torch.zeros(100, dtype=BFLOAT16, device=device), torch.arange(100.0, device=device)
    with gpu.used():
        hs.cast_([dst], [src])
        norm, found = hs.grad_stats([src])
    assert dst.tolist() == list(range(100))
    assert (norm.device, found.device) == (device, device)
    assert norm.item() == pytest.approx(src.double().norm().item())


def needs(gpu: Any, size: int) -> int:
    """Elements of the large tests: past 2**31, or few where nothing has so much memory."""
    if gpu.free_bytes() < size * gpu.large + 2**30:
        pytest.skip(f"needs {size * gpu.large / 1e9:.0f} GB of free GPU memory")
    return gpu.large


@pytest.mark.xdist_group("large")
def test_lists_past_31_bits(gpu: Any) -> None:
    """Their last elements get what belongs to them, the first stay 0."""
    numel = needs(gpu, 2 + 4)
    x = torch.zeros(numel, dtype=BFLOAT16, device=gpu.device)
    y = torch.zeros(numel, dtype=FLOAT32, device=gpu.device)
    x[-3:] = torch.tensor(END, device=gpu.device)
    with gpu.used():
        assert [v.item() for v in hs.grad_stats([x])] == [5.0, 0.0]
        hs.unscale_([x], 0.5, torch.zeros((), device=gpu.device))
        hs.cast_([y], [x])
        hs.accumulate_([y], [x])
        assert hs.l2_norms([y])[1].item() == 5.0
        x[-1] = float("inf")
        assert hs.grad_stats([x])[1].item() == 1.0
    assert y[-4:].tolist() == [0.0, 3.0, 4.0, 0.0]
    assert x[-4:-1].tolist() == [0.0, 1.5, 2.0]
    assert not x[:100].any()
    assert not y[:100].any()


@pytest.mark.xdist_group("large")
def test_a_step_past_31_bits(gpu: Any) -> None:
    """The last elements get what they get in a short tensor on the CPU."""
    numel = needs(gpu, 2 + 2 + 2 + 4 + 4 + 8)
    tail = torch.tensor(END, dtype=BFLOAT16)
    twins = Twins(gpu, BFLOAT16, weights=[tail], master="split", max_grad_norm=1.0)
    large = Parameter(torch.zeros(numel, dtype=BFLOAT16, device=gpu.device))
    with torch.no_grad():
        large[-3:] = moved(tail, gpu.device)
    optimizer = hs.AdamW([large], master="split", max_grad_norm=1.0)
    large.grad = torch.zeros_like(large)
    for t in range(2):
        twins.step(t)
        large.grad[-3:] = twins.params[0].grad
        with gpu.used():
            optimizer.step()
    state = optimizer.state[large]
    for key, value in twins.there.state[twins.params[0]].items():
        assert state[key].view(-1)[-3:].tolist() == value.view(-1).tolist(), key
    assert large[-3:].tolist() == twins.params[0].tolist()
    assert not large[:100].any()
