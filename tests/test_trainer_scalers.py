"""A loss scaler inside Lightning and Fabric, which hand out wrappers that imitate the optimizer's class.

Guards: a scale, a setting or a state that is written to the wrapper and never seen by the step inside. The gradients
would be taken as they are, scaled; Adam hardly shows it, but for eps, clipping and the overflow check.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from lightning_runs import CLIP, MARKS, STEPS, Module, built, fit, outcome
from loops import assert_same_tree, loss_of, tiny_model
from optimizer_runs import assert_same, held

import halfstep as hs

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:halfstep.*skipped:RuntimeWarning")]

SCALERS = {"ours": hs.LossScaler, "torch's": torch.amp.GradScaler}
PACE = {"init_scale": 2.0**24, "growth_interval": 2}  # overflows at first, grows again in the run


def plain_loop(**options: Any) -> tuple[dict[str, Any], hs.LossScaler]:
    """What float16 training leaves behind, the schedule waiting while steps are skipped, and its scaler."""
    model, scaler = tiny_model(FLOAT16), hs.LossScaler("cpu", **PACE)
    optimizer, schedule = built(model.parameters(), **options)
    skips = 0
    for t in range(STEPS):
        scaler.scale(loss_of(model, t)).backward()
        skipped = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skips += bool(skipped)
        if not skipped:
            schedule.step()
    assert 0 < skips < STEPS - 2
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, scaler


class Manual(Module):
    """Manual optimization with a scaler of one's own, through the wrapper that self.optimizers() is."""

    def __init__(self, scaler: Any, unscale: bool, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.scaler, self.unscale = scaler, unscale

    def training_step(self, pair: Any, index: int) -> None:
        optimizer = self.optimizers()
        assert type(optimizer) is not hs.AdamW
        assert isinstance(optimizer, hs.AdamW)
        self.manual_backward(self.scaler.scale(super().training_step(pair, index)))
        if self.unscale:
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        if not optimizer.skipped:
            self.lr_schedulers().step()


@pytest.mark.parametrize(("kind", "unscale"), [("ours", False), ("ours", True), ("torch's", False)])
@pytest.mark.parametrize("options", [{"skip_nonfinite": False}, {"max_grad_norm": CLIP}], ids=["plain", "clipped"])
def test_manual_optimization_with_a_scaler(kind: str, unscale: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """torch's own scaler refuses to unscale float16 gradients, so unscale_() is ours alone."""
    scaler = SCALERS[kind]("cpu", **PACE)
    module = Manual(scaler, unscale, **options)
    fit(module, tmp_path, precision="16-true")
    expected, plain = plain_loop(**options)
    assert scaler.get_scale() == plain.get_scale()
    assert_same_tree(outcome(module), expected)


@pytest.mark.parametrize("kind", SCALERS)
def test_lightnings_own_scaling(kind: str, tmp_path: Path) -> None:
    """Its mixed precision calls the scaler with the optimizer itself, and moves the schedule at every step."""
    scaler, plain = SCALERS[kind]("cpu", **PACE), hs.LossScaler("cpu", **PACE)
    module = Module(max_grad_norm=CLIP)
    fit(module, tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    model = tiny_model()
    optimizer, schedule = built(model.parameters(), max_grad_norm=CLIP)
    skips = 0
    for t in range(STEPS):
        with torch.autocast("cpu", FLOAT16, cache_enabled=False):
            loss = loss_of(model, t)
        plain.scale(loss).backward()
        skips += bool(plain.step(optimizer))
        plain.update()
        optimizer.zero_grad()
        schedule.step()
    assert 0 < skips < STEPS - 2
    assert scaler.get_scale() == plain.get_scale()
    assert_same_tree(outcome(module), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("kind", SCALERS)
def test_fabric_with_a_scaler_and_its_checkpoint(kind: str, tmp_path: Path) -> None:
    """The optimizer exists before Fabric casts the weights; its wrapper saves and loads in mid-run."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="16-true")
    scaler, file = SCALERS[kind]("cpu", **PACE), tmp_path / "fabric.ckpt"

    def fresh() -> dict[str, Any]:
        model = tiny_model()
        optimizer, schedule = built(model.parameters())
        model, wrapper = fabric.setup(model, optimizer)
        assert type(wrapper) is not hs.AdamW
        return {"model": model, "optimizer": wrapper, "schedule": schedule, "scaler": scaler}

    run = fresh()
    for t in range(STEPS):
        if t == STEPS // 2:
            fabric.save(file, run)
            run = fresh()
            fabric.load(file, run)
        model, optimizer = run["model"], run["optimizer"]
        fabric.backward(scaler.scale(loss_of(model, t)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not optimizer.skipped:
            run["schedule"].step()
    expected, plain = plain_loop()
    assert scaler.get_scale() == plain.get_scale()
    assert_same_tree({key: run[key].state_dict() for key in ("model", "optimizer")}, expected)


def test_every_setting_of_the_optimizer_is_passed_on() -> None:
    """All arguments that are no group's, and what a scaler hands over."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model = tiny_model()
    inside = hs.AdamW(model.parameters())
    _, wrapper = fabric.setup(model, inside)
    settings = inspect.signature(hs.AdamW).parameters.keys() - {"params", *inside.defaults}
    assert "max_grad_norm" in settings
    for name in (*settings, "grad_scale", "found_inf"):
        value = object()
        setattr(wrapper, name, value)
        assert getattr(inside, name) is value, name
        assert getattr(wrapper, name) is value, name
        delattr(wrapper, name)
        assert not hasattr(inside, name), name


def test_what_is_written_to_a_wrapper_counts() -> None:
    """Settings, states and groups, as they do on the optimizer itself, while its rows are cached."""
    fabric = Fabric(accelerator="cpu", devices=1)
    plain, wrapped, late = tiny_model(BFLOAT16), tiny_model(BFLOAT16), torch.nn.Parameter(torch.zeros(3))
    bare = hs.AdamW(plain.parameters(), lr=1e-2)
    inside = hs.AdamW(wrapped.parameters(), lr=1e-2)
    wrapped, wrapper = fabric.setup(wrapped, inside)

    def step() -> None:
        for model, optimizer in ((plain, bare), (wrapped, wrapper)):
            loss_of(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(held(inside), held(bare))

    step()
    saved = copy.deepcopy(bare.state_dict())
    for optimizer in (bare, wrapper):
        optimizer.max_grad_norm = 1e-3
    step()
    assert inside.max_grad_norm == 1e-3
    assert wrapper.grad_norm > 1e-3
    for optimizer in (bare, wrapper):
        with pytest.warns(UserWarning, match="the saved master does not round to the weight"):
            optimizer.load_state_dict(saved)
    step()
    for model, optimizer in ((plain, bare), (wrapped, wrapper)):
        for p in model.parameters():
            p.data.mul_(0.5)
        optimizer.refresh_masters()
    step()
    assert inside.healed == 0
    for optimizer in (bare, wrapper):
        own = torch.nn.Parameter(late.detach().clone())
        optimizer.add_param_group({"params": [own], "lr": 0.5})
        own.grad = torch.ones(3)
    step()
    # lr * g / (|g| + eps * norm / max_norm), however much g was clipped by, and the roundings of m, v and the rest
    moved = inside.param_groups[1]["params"][0].detach()
    grad = max(float(inside.grad_norm) / inside.max_grad_norm, 1.0)
    expected = torch.full((3,), -0.5 / (1 + inside.defaults["eps"] * grad), dtype=torch.float64)
    torch.testing.assert_close(moved.double(), expected, rtol=8 * torch.finfo(torch.float32).eps, atol=0)
    with pytest.raises(AttributeError, match="has no 'grad_scale' now"):
        _ = wrapper.grad_scale
    wrapper.max_grad_norm = -1.0
    with pytest.raises(ValueError, match="max_grad_norm"):
        step()
