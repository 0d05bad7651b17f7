"""halfstep's public functions with the Triton kernels in the place of every backend: launches, and the bits of a run.

Guards: a function that goes past the override, a setting that does not reach the kernels, a step that launches twice.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from bits import assert_all_same_bits, assert_same_bits
from example_runs import Run, real_load, tiny, train_gpt
from interpreter import launches, names
from loops import assert_same_tree, loss_of, tiny_model
from optimizer_runs import ROW_MODES, assert_same, held, parameters, train
from test_override import CALLS, scaled_step, unscaled_first
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep import _cpu
from halfstep.ops import backend as backends
from halfstep.ops import native_cpu

STEP, CLIPPED_STEP = ["prologue", "update"], ["grad_stats", "prologue", "update"]
ATTENTION = ["forward", "delta", "keys", "queries"]
STATISTICS = ["grad_stats", "finish_stats"]
LAUNCHES = {
    "AdamW, 16-bit": CLIPPED_STEP,
    "AdamW, float32": STEP,
    "AdamW, clipping": CLIPPED_STEP,
    "AdamW, backend named": STEP,
    "AdamW, reference named": STEP,
    "Adam": STEP,
    "LossScaler": CLIPPED_STEP,
    "cast_": ["cast"],
    "grad_stats": STATISTICS,
    "l2_norms": STATISTICS,
    "accumulate_": ["accumulate"],
    "Accumulator": ["cast", "accumulate", "scale", *CLIPPED_STEP],
    "attention": ATTENTION,
    "attention_varlen": ATTENTION,
    "unscale_": ["scale"],
    "clip_grad_norm_": [*STATISTICS, "scale"],
    "clip_grad_norm_, below": STATISTICS,
}


@pytest.fixture
def nothing_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches an operator of the compiled module fails; it may read tensors."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call went past the override")

    operators = ("accumulate_", "cast_", "grad_stats", "scale_", "sums_of_squares")
    forbidden = types.SimpleNamespace(**{**vars(_cpu), **dict.fromkeys(operators, refuse)})
    monkeypatch.setattr(native_cpu, "_native", lambda: forbidden)


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_reaches_the_kernels(backend, nothing_native, name):
    """In as many launches as there are passes, however many tensors."""
    with backends.override(backend), launches() as made:
        CALLS[name][0]()
    assert names(made) == LAUNCHES[name]


def test_a_scaler_that_unscales_first(backend, nothing_native):
    with backends.override(backend), launches() as made:
        scaled_step(unscaled_first)
    assert names(made).count("update") == 1


# ---- the same bits as the CPU's own kernels --------------------------------------------------------------------------
def on_both(backend: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What `run` returns on the CPU's kernels, and on the interpreted ones."""
    native = run()
    with backends.override(backend), launches() as made:
        interpreted = run()
    assert made
    return interpreted, native


@pytest.mark.parametrize("mode", range(len(ROW_MODES)), ids=lambda mode: str(ROW_MODES[mode]))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_steps_of_the_optimizers(backend, dtype, mode):
    cls, options = (hs.AdamW, hs.Adam)[(mode + FLOATS.index(dtype)) % 2], ROW_MODES[mode]

    def run() -> tuple[dict[str, Tensor], list[Tensor]]:
        optimizer = cls(parameters(dtype), lr=1e-2, weight_decay=0.1, **options)
        train(optimizer, range(1, 4))
        return held(optimizer), [optimizer.skipped, optimizer.grad_norm, optimizer.healed]

    (mine, my_results), (theirs, their_results) = on_both(backend, run)
    assert_same(mine, theirs)
    assert_all_same_bits(my_results, their_results, "results")


@pytest.mark.filterwarnings("ignore:halfstep:RuntimeWarning")  # the overflows that a run in float16 must have
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (FLOAT16, {"max_grad_norm": 0.5}),
        (BFLOAT16, {"master": "split", "max_grad_norm": 0.5}),
        (BFLOAT16, {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16}),
    ],
    ids=str,
)
def test_a_mixed_precision_loop(backend, dtype, options):
    """Two batches a step in float32 sums, a scale that overflows at first, a schedule, clipping, a late parameter, a
    checkpoint halfway: weights, states, scale and losses."""
    mine, theirs = on_both(backend, lambda: trained(dtype, options))
    assert_same_tree(mine, theirs)
    assert 0 < theirs["skipped"] < 5 if dtype == FLOAT16 else theirs["skipped"] == 0


def trained(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    model, extra = tiny_model(dtype), Parameter(torch.ones(3, dtype=dtype))
    optimizer, scaler = new_optimizer(model, options), hs.LossScaler(init_scale=2.0**18)
    losses, skipped = [], 0
    for t in range(5):
        if t == 2:
            optimizer.add_param_group({"params": [extra], "lr": 3e-2})
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + t)
        losses += summed_gradients(model, scaler, t)
        extra.grad = torch.full((3,), 0.125 * scaler.get_scale()).to(dtype)
        skipped += int(scaler.step(optimizer))
        scaler.update()
        if t == 2:
            saved, optimizer = optimizer.state_dict(), new_optimizer(model, options, extra)
            optimizer.load_state_dict(saved)
    return {
        "weights": [p.detach().clone() for p in model.parameters()], "extra": extra.detach(), "losses": losses,
        "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "skipped": skipped,
    }  # fmt: skip


def new_optimizer(model: torch.nn.Module, options: dict[str, Any], *extra: Parameter) -> hs.AdamW:
    groups = [{"params": list(group)} for group in (model.parameters(), extra) if group]
    return hs.AdamW(groups, seed=5, **options)


def summed_gradients(model: torch.nn.Module, scaler: hs.LossScaler, t: int) -> list[float]:
    """Of two batches, summed in float32; returns their losses."""
    params, losses = list(model.parameters()), []
    sums = [torch.zeros(p.shape) for p in params]
    for part in range(2):
        model.zero_grad()
        loss = loss_of(model, 2 * t + part)
        scaler.scale(loss / 2).backward()
        hs.accumulate_(sums, [p.grad for p in params if p.grad is not None])
        losses.append(loss.item())
    for p, total in zip(params, sums, strict=True):
        assert p.grad is not None
        hs.cast_([p.grad], [total])
    return losses


def test_a_loop_by_hand(backend):
    """unscale_ and clip_grad_norm_ on lists in place of the optimizer's own."""

    def run() -> list[Any]:
        params = parameters(FLOAT32)
        optimizer, norms = hs.AdamW(params), []
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 8.0 * (i + t))
            grads = [p.grad for p in params if p.grad is not None]
            found_inf = torch.zeros(())
            hs.unscale_(grads, 8.0, found_inf)
            norms += [hs.clip_grad_norm_(params, 1.0), *hs.l2_norms(grads), hs.grad_stats(grads)[0], found_inf]
            optimizer.step()
        return [*norms, *params]

    for mine, theirs in zip(*on_both(backend, run), strict=True):
        assert_same_bits(mine, theirs, "by hand")


# ---- the training example --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("precision", "master"),
    [("bf16", "split"), pytest.param("fp16", "auto", marks=pytest.mark.newest)],
)
def test_the_example_trains(backend, precision, master):
    def run() -> list[Any]:
        made = Run(tiny(precision=precision, master=master, steps=3, init_scale=2.0**10))
        for _ in range(3):
            train_gpt.train_step(made, real_load())
        return [made.optimizer.state_dict(), made.history.losses, [p.detach() for p in made.model.parameters()]]

    interpreted, native = on_both(backend, run)
    assert_same_tree(interpreted, native)
    assert len(native[1]) == 3
