"""Any order of unscale_, step and update on several optimizers: each follows its twin that never had a scaler."""

from __future__ import annotations

import warnings

import pytest
import torch
from adversarial import FLOAT16, FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_runs import assert_unchanged, held, parameters, params_of, set_grads

import halfstep as hs

BUILD = [
    lambda: hs.AdamW(parameters(FLOAT16)),
    lambda: hs.AdamW(parameters(FLOAT32), max_grad_norm=0.5),
    lambda: torch.optim.AdamW(parameters(FLOAT32)),
]
# What happens to one optimizer in one iteration: its gradients, and whether it is unscaled and stepped
TURN = st.tuples(st.sampled_from(["none", "clean", "bad"]), st.booleans(), st.booleans())
ITERATION = st.tuples(st.permutations(range(len(BUILD))), st.tuples(*[TURN] * len(BUILD)))


def gradients(optimizer: torch.optim.Optimizer, t: int, kind: str, scale: float = 1.0) -> None:
    """Exact in float16 with every scale of this test."""
    set_grads(params_of(optimizer), t, spread=scale)
    if kind == "none":
        optimizer.zero_grad()
    elif kind == "bad":
        params_of(optimizer)[t % 3].grad.view(-1)[-1] = float("inf" if t % 2 else "nan")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(ITERATION, min_size=1, max_size=10))
def test_several_optimizers_in_any_order(iterations):
    optimizers, twins = [build() for build in BUILD], [build() for build in BUILD]
    scaler = hs.LossScaler(init_scale=32.0, growth_interval=2, hysteresis=2, max_scale=64.0)
    scale, clean, tolerance = 32.0, 0, 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="halfstep: .* skipped|halfstep: the loss scale is at its minimum")
        for t, (order, turns) in enumerate(iterations):
            found = []
            for i in order:
                kind, unscale, step = turns[i]
                gradients(optimizers[i], t, kind, scale)
                if unscale:
                    scaler.unscale_(optimizers[i])
                if step:
                    assert scaler.step(optimizers[i]).item() == (kind == "bad")
                if step and kind == "clean":
                    gradients(twins[i], t, kind)
                    twins[i].step()
                if (unscale or step) and kind != "none":
                    found.append(kind == "bad")
            if found:
                scaler.update()
                clean, tolerance = (0, max(tolerance - 1, 0)) if any(found) else (clean + 1, tolerance)
                if any(found) and not tolerance:
                    scale = max(scale / 2, 1.0)
                if clean == 2:
                    scale, clean, tolerance = min(scale * 2, 64.0), 0, 2
            else:
                with pytest.raises(RuntimeError, match="nothing to learn from yet"):
                    scaler.update()
                scaler.update(scale)
            assert scaler.get_scale() == scale
    for optimizer, twin in zip(optimizers, twins, strict=True):
        assert_unchanged(optimizer, held(twin))  # a first step that was skipped may have made states of 0
