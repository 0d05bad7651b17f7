"""The CUDA backend's Python waits for nothing, and its steps are the CPU's bit for bit (kernels under the emulator)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import assert_all_same_bits
from emulated_cuda import emulated
from no_sync import capturing, forbid_waits
from optimizer_runs import assert_same, held, parameters, params_of, set_grads
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend
from halfstep.ops.native_cuda import CudaBackend

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def on_the_device(run: Callable[[], Any]) -> Any:
    """Without the guards around its scratch memory, which are read on the host."""
    with backend.override(CudaBackend(emulated().module)) as counts, forbid_waits():
        result = run()
    return result, counts


def rates(as_tensors: bool) -> list[Any]:
    numbers = [torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.25]), torch.tensor(1)]
    return [*(n if as_tensors else n.item() for n in numbers), 0.125]


def trained(dtype: torch.dtype, as_tensors: bool = False, overflow: bool = False, **options: Any) -> hs.AdamW:
    params = parameters(dtype, [(7,), (3, 5), (0,), (70_000,)])
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, rates(as_tensors), strict=True)]
    optimizer = hs.AdamW(groups, **options)
    for t in range(4):
        set_grads(params, t)
        if overflow and t == 2:
            params[1].grad.view(-1)[3].fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(t % 2))
    return optimizer


STEPS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": FLOAT32},
    "float32, capturable": {"dtype": FLOAT32, "capturable": True},
    "bfloat16": {"dtype": BFLOAT16},
    "float16": {"dtype": FLOAT16},
    "split": {"dtype": BFLOAT16, "master": "split"},
    "amsgrad, maximize": {"dtype": BFLOAT16, "amsgrad": True, "maximize": True},
    "stochastic": {"dtype": BFLOAT16, "master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16},
    "clipping": {"dtype": BFLOAT16, "max_grad_norm": 0.5},
    "an overflow": {"dtype": BFLOAT16, "max_grad_norm": 0.5, "overflow": True},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_steps(options):
    got, counts = on_the_device(lambda: trained(**options, as_tensors=True))
    assert counts["AdamPlan.run"] == 4
    assert counts["AdamPlan.grad_stats"] + counts["AdamPlan.update"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(**options)
    assert_same(held(got), held(expected))
    assert_all_same_bits(results(got), results(expected), "grad_norm, skipped, healed")


def results(optimizer: hs.AdamW) -> list[Tensor]:
    return [optimizer.grad_norm, optimizer.skipped, optimizer.healed]


def scaled_run(make_scaler: Callable[[], Any], unscale: bool) -> list[Tensor]:
    """float16 steps under a scaler, the second of which overflows."""
    params = parameters(FLOAT16)
    optimizer, scaler = hs.AdamW(params, lr=0.1, max_grad_norm=1.0), make_scaler()
    for t in range(4):
        loss = torch.stack([(p.float() * (t + 1)).sum() for p in params]).sum()
        scaler.scale(loss).backward()
        if t == 1:
            params[2].grad.view(-1)[3].fill_(float("inf"))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scale = scaler._scale.tensor() if isinstance(scaler, hs.LossScaler) else scaler._scale
    return [*held(optimizer).values(), optimizer.grad_norm, scale]


SCALERS: dict[str, Callable[[], Any]] = {
    "LossScaler": lambda: hs.LossScaler(init_scale=64.0, growth_interval=2),
    "static": lambda: hs.LossScaler(init_scale=64.0, growth_factor=1.0, backoff_factor=1.0),
    "GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
}


# GradScaler.unscale_ refuses float16 gradients
@pytest.mark.parametrize(
    ("name", "unscale"),
    [(name, unscale) for name in SCALERS for unscale in (False, True) if (name, unscale) != ("GradScaler", True)],
)
def test_scalers(name, unscale):
    make_scaler = SCALERS[name]
    got, counts = on_the_device(lambda: scaled_run(make_scaler, unscale))
    assert counts["AdamPlan.run"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_all_same_bits(got, scaled_run(make_scaler, unscale), "weights, states, norm, scale")


def lists() -> list[Tensor]:
    odd = parameters(BFLOAT16, [(9, 8)])[0].detach()
    return [*(p.detach().clone() for p in parameters(FLOAT32, [(5,), (0,), (1031,)])), odd[:, ::2].clone(), odd.t()]


def given(tensors: list[Tensor], call: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """What the call returns, and what it leaves in the tensors."""
    result = call(tensors)
    returned = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    return [*returned, *tensors]


def clipped(tensors: list[Tensor], max_norm: float) -> Tensor:
    params = [Parameter(torch.empty_like(t)) for t in tensors]
    for p, t in zip(params, tensors, strict=True):
        p.grad = t
    return hs.clip_grad_norm_(params, max_norm)


def to_bfloat16(tensors: list[Tensor], rounding: str) -> tuple[Tensor, ...]:
    targets = [torch.empty_like(t, dtype=BFLOAT16) for t in tensors]
    hs.cast_(targets, tensors, rounding=rounding, seed=3)
    return tuple(targets)


def added(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    sums = [torch.ones_like(t, dtype=FLOAT32) for t in tensors]
    hs.accumulate_(sums, tensors)
    return tuple(sums)


FUNCTIONS: dict[str, Callable[[list[Tensor]], Any]] = {
    "unscale_": lambda x: hs.unscale_(x, torch.full((1,), 0.3, dtype=torch.float64), torch.zeros(())),
    "unscale_, a number": lambda x: hs.unscale_(x, 0.3, torch.zeros(())),
    "cast_": lambda x: to_bfloat16(x, "nearest"),
    "cast_, stochastic": lambda x: to_bfloat16(x, "stochastic"),
    "accumulate_": added,
}
NORMS: dict[str, Callable[[list[Tensor]], Any]] = {  # whose square root is a GPU's, which rounds right, or a CPU's
    "grad_stats": lambda x: hs.grad_stats(x, 4.0),
    "clip_grad_norm_": lambda x: clipped(x, 0.5),
    "clip_grad_norm_, below": lambda x: clipped(x, 1e9),
    "l2_norms": hs.l2_norms,
}


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_on_lists(call):
    got, _ = on_the_device(lambda: given(lists(), call))
    assert_all_same_bits(got, given(lists(), call), "results and lists")


@pytest.mark.parametrize("call", NORMS.values(), ids=NORMS)
def test_norms(call):
    got, _ = on_the_device(lambda: given(lists(), call))
    for mine, theirs in zip(got, given(lists(), call), strict=True):
        if mine.dtype is torch.float64:  # a norm
            torch.testing.assert_close(mine, theirs, rtol=torch.finfo(torch.float64).eps, atol=0)
        else:
            assert torch.equal(mine, theirs)


def test_captured_steps_are_the_eager_ones():
    """Python's part of a capture, with kernels that run at once; an eager step follows."""

    def run(some_captured: bool) -> hs.AdamW:
        params = parameters(BFLOAT16)
        optimizer, scaler = hs.AdamW(params, lr=torch.tensor(0.1), master="split"), hs.LossScaler(init_scale=4.0)
        for t in range(5):
            if some_captured and t in (2, 3):
                with capturing():
                    scaled_step(optimizer, scaler, t)
            else:
                scaled_step(optimizer, scaler, t)
        return optimizer

    (got, _), (expected, _) = on_the_device(lambda: run(True)), on_the_device(lambda: run(False))
    assert_same(held(got), held(expected))


def scaled_step(optimizer: hs.AdamW, scaler: hs.LossScaler, t: int) -> None:
    scaler.scale(torch.ones(()))
    set_grads(params_of(optimizer), t)
    scaler.step(optimizer)
    scaler.update()
