"""The hook that sends every public function to a given backend and counts what arrives: GPU paths without a GPU."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import halfstep as hs
from halfstep import _cpu
from halfstep.ops import backend, native_cpu, reference_torch


def params(count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    found = [Parameter(torch.ones(5, dtype=dtype)) for _ in range(count)]
    for p in found:
        p.grad = torch.ones(5, dtype=dtype)
    return found


def scaled_step(update: Any) -> None:
    optimizer, scaler = hs.AdamW(params()), hs.LossScaler()
    scaler.scale(torch.ones(()))
    update(optimizer, scaler)
    scaler.update()


def unscaled_first(optimizer: hs.AdamW, scaler: hs.LossScaler) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def attended(function: Any, *shape: int, **cu_seqlens: torch.Tensor) -> None:
    q = torch.ones(shape, requires_grad=True)
    function(q, q, q, **cu_seqlens).sum().backward()


def accumulated(count: int) -> None:
    params = [Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(count)]
    accumulator = hs.Accumulator(hs.AdamW(params), 2)
    for _ in range(2):
        accumulator.backward(torch.stack([p.float().sum() for p in params]).mean(), tokens=3)
    accumulator.step()


STEP = {"AdamPlan": 1, "AdamPlan.set_grads": 1, "AdamPlan.update": 1, "AdamPlan.drop_grads": 1}
FIRST_PASS = {"AdamPlan.grad_stats": 1}
BOTH_WAYS = {"attention_forward": 1, "attention_backward": 1}
ENDS = torch.tensor([0, 3, 5], dtype=torch.int32)
# What each public function asks of its backend: one multi-tensor call of a kind, however many tensors
CALLS: dict[str, tuple[Any, dict[str, int]]] = {
    "AdamW, 16-bit": (lambda: hs.AdamW(params(60)).step(), {**STEP, **FIRST_PASS}),
    "AdamW, float32": (lambda: hs.AdamW(params(dtype=torch.float32)).step(), STEP),
    "AdamW, clipping": (
        lambda: hs.AdamW(params(dtype=torch.float32), max_grad_norm=1.0).step(),
        {**STEP, **FIRST_PASS},
    ),
    "AdamW, backend named": (lambda: hs.AdamW(params(dtype=torch.float32), backend="triton").step(), STEP),
    "AdamW, reference named": (lambda: hs.AdamW(params(dtype=torch.float32), backend="reference").step(), STEP),
    "Adam": (lambda: hs.Adam(params(dtype=torch.float32)).step(), STEP),
    "LossScaler": (lambda: scaled_step(lambda o, s: s.step(o)), {**STEP, **FIRST_PASS}),
    "cast_": (lambda: hs.cast_([torch.ones(5)], [torch.zeros(5)]), {"cast_": 1}),
    "grad_stats": (lambda: hs.grad_stats([torch.ones(5)] * 60, 2.0), {"grad_stats": 1}),
    "l2_norms": (lambda: hs.l2_norms([torch.ones(5)] * 60), {"sums_of_squares": 1}),
    "accumulate_": (
        lambda: hs.accumulate_([torch.ones(5) for _ in range(60)], [torch.ones(5)] * 60),
        {"accumulate_": 1},
    ),
    "Accumulator": (lambda: accumulated(60), {"cast_": 1, "accumulate_": 1, "unscale_": 1, **STEP, **FIRST_PASS}),
    "unscale_": (lambda: hs.unscale_([torch.ones(5) for _ in range(60)], 2.0, torch.zeros(())), {"unscale_": 1}),
    "attention": (lambda: attended(hs.attention, 2, 2, 3, 8), BOTH_WAYS),
    "attention_varlen": (
        lambda: attended(hs.attention_varlen, 5, 2, 8, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS),
        BOTH_WAYS,
    ),
    "clip_grad_norm_": (lambda: hs.clip_grad_norm_(params(60), 1.0), {"grad_stats": 1, "unscale_": 1}),
    "clip_grad_norm_, below": (lambda: hs.clip_grad_norm_(params(), 1e6), {"grad_stats": 1}),
}


@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("target", [reference_torch, native_cpu], ids=["reference", "native"])
def test_every_public_function_goes_through_it(call, expected, target):
    with backend.override(target) as counts:
        call()
    del counts["AdamPlan.watch"], counts["read_list"]  # bookkeeping that not every backend has
    assert counts == Counter(expected)


# What has no kernels of its own: they decide what torch's operators keep, or where; plan, which runs nothing; and
# tune_attention, which has something to do on Triton's kernels alone and reaches them through attention
WITHOUT = {
    "ByteBudget", "EffectiveBatchNorm", "checkpoint", "measure_activations", "offload_activations", "plan",
    "tune_attention",
}  # fmt: skip


def test_every_public_function_is_here():
    tested = {name.split(",")[0] for name in CALLS}
    assert tested == {name for name in hs.__all__ if not name.startswith("__")} - WITHOUT


def test_scaler_that_unscales_first():
    """unscale_ reads or writes the gradients through the hook as well, and the step still updates once."""
    with backend.override(reference_torch) as counts:
        scaled_step(unscaled_first)
    assert counts["AdamPlan.update"] == 1
    assert set(counts) <= {"grad_stats", "unscale_", *STEP, *FIRST_PASS}


def test_nothing_native_runs_beside_it(monkeypatch):
    """Not one call of the compiled module: a function that goes round the hook would reach it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call went past the override")

    forbidden = types.SimpleNamespace(**{name: refuse for name in dir(_cpu) if not name.startswith("_")})
    monkeypatch.setattr(native_cpu, "_native", lambda: forbidden)
    with pytest.raises(AssertionError, match="past the override"):
        hs.grad_stats([torch.ones(5)])
    with backend.override(reference_torch):
        for call, _ in CALLS.values():
            call()
        scaled_step(unscaled_first)


def test_a_backend_with_attention_of_its_own_is_asked():
    """One without it counts torch's, so that nothing goes by unseen."""
    own = types.SimpleNamespace(name="own", attention_forward=lambda call: (call.q * 2, call.q[..., 0], call.q[:0]))
    q = torch.ones(2, 2, 3, 8)
    with backend.override(own) as counts:
        assert torch.equal(hs.attention(q, q, q), q * 2)
    assert counts == {"attention_forward": 1}


def test_one_table_for_many_steps_and_another_for_another_backend():
    """The table is built once; entering and leaving the hook in mid-run moves the optimizer to the other backend."""
    optimizer = hs.AdamW(params(dtype=torch.float32))
    optimizer.step()
    with backend.override(reference_torch) as counts:
        for _ in range(3):
            optimizer.step()
    optimizer.step()
    assert counts == Counter(
        {"AdamPlan": 1, **dict.fromkeys(["AdamPlan.set_grads", "AdamPlan.update", "AdamPlan.drop_grads"], 3)}
    )
    assert all(optimizer.state[p]["step"] == 5 for p in optimizer.param_groups[0]["params"])


def test_it_nests_and_ends_with_an_error():
    with backend.override(reference_torch) as outer:
        with pytest.raises(ValueError, match="max_norm"), backend.override(native_cpu) as inner:
            hs.clip_grad_norm_([], float(hs.grad_stats([torch.ones(5)])[0]) - 100)
        hs.grad_stats([torch.ones(5)])
    hs.grad_stats([torch.ones(5)])
    assert (outer["grad_stats"], inner["grad_stats"]) == (1, 1)


@pytest.mark.parametrize("forced", ["native", "reference"])
def test_a_backend_can_be_insisted_on(forced, monkeypatch):
    """backend="reference" never enters the compiled module; backend="native" never leaves it for the update."""
    used = []
    for module in (native_cpu, reference_torch):
        plan = module.AdamPlan
        monkeypatch.setattr(module, "AdamPlan", lambda rows, m=module, plan=plan: used.append(m.name) or plan(rows))
    optimizer = hs.AdamW(params(), backend=forced)
    optimizer.step()
    assert used == [forced]
