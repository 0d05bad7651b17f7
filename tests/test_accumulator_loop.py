"""hs.Accumulator in loops: scalers, clipping, other optimizers, schedules, resuming.

Guards: a scale that is not undone, an overflow that is counted in, a norm of sums that are not divided yet, a gradient
in a dtype that an optimizer does not take, an optimizer's checkpoint that differs.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from accumulation import LENGTHS, assert_to_rounding, batches, gradients, model, run, token_loss, valid, whole_batch
from adversarial import BFLOAT16, FLOAT32
from bits import assert_same_bits
from torch import nn

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")
SCALERS = {"LossScaler": hs.LossScaler, "GradScaler": lambda **options: torch.amp.GradScaler("cpu", **options)}
OPTIMIZERS = {
    "AdamW": hs.AdamW, "split": lambda p, **o: hs.AdamW(p, master="split", **o), "torch AdamW": torch.optim.AdamW,
    "fused": lambda p, **o: torch.optim.AdamW(p, fused=True, **o), "SGD": torch.optim.SGD,
}  # fmt: skip


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trained(net: nn.Module, optimizer: Any, windows: int = 2, **options: Any) -> hs.Accumulator:
    window = hs.Accumulator(optimizer, len(LENGTHS), **options)
    for seed in range(windows):
        run(window, net, batches(seed=seed))
        window.step()
    return window


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_scale_that_is_a_power_of_two_changes_no_bit(dtype: torch.dtype, optimizer: str, scaler: str) -> None:
    plain, scaled = model(dtype), model(dtype)
    trained(plain, OPTIMIZERS[optimizer](plain.parameters(), lr=1e-2))
    trained(scaled, OPTIMIZERS[optimizer](scaled.parameters(), lr=1e-2), scaler=SCALERS[scaler](init_scale=8.0))
    for name, weight in weights(plain).items():
        assert_same_bits(scaled.get_parameter(name).detach(), weight, name)
    assert not torch.equal(plain.inner.weight, model(dtype).inner.weight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_the_whole_batch(optimizer: str) -> None:
    """A window of one micro-batch goes through the same arithmetic: bit for bit a plain step."""
    for dtype in (FLOAT32, BFLOAT16):
        net, plain = model(dtype), model(dtype)
        make = OPTIMIZERS[optimizer]
        window, other = hs.Accumulator(make(net.parameters(), lr=1e-2), 1), make(plain.parameters(), lr=1e-2)
        for seed in range(2):
            for batch in batches([14], seed):  # 14 / 16 and its inverse are within a rounding
                window.backward(token_loss(net, batch), tokens=16)
                window.step()
                token_loss(plain, batch).backward()
                other.step()
                other.zero_grad()
        for name, weight in weights(plain).items():
            assert_same_bits(net.get_parameter(name).detach(), weight, name)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("optimizer", ["AdamW", "torch AdamW"])
def test_one_overflow_skips_the_whole_window(optimizer: str, scaler: str) -> None:
    net = model(FLOAT32)
    made = OPTIMIZERS[optimizer](net.parameters(), lr=1e-2)
    window = hs.Accumulator(made, 3, scaler=SCALERS[scaler](init_scale=8.0))
    before = weights(net)
    for i, (x, labels) in enumerate(batches([3, 5, 4])):
        window.backward(token_loss(net, (x * (torch.inf if i == 1 else 1), labels)), tokens=valid(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a skip is told
        skipped = window.step()
    assert skipped is None or skipped
    for name, weight in before.items():
        assert_same_bits(net.get_parameter(name).detach(), weight, name)
    assert window.scaler.get_scale() == 4.0
    assert not gradients(net)
    run(window, net, batches([3, 5, 4]))
    window.step()
    assert not torch.equal(net.inner.weight, before["inner.weight"])
    assert net.inner.weight.isfinite().all()


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scale_that_moves_within_a_window(scaler: str) -> None:
    """Another loop under the same scaler has made its step: this window keeps its scale, the new one is undone."""
    nets = [model(BFLOAT16), model(BFLOAT16)]
    for net, moves in zip(nets, (False, True), strict=True):
        made = SCALERS[scaler](init_scale=8.0)
        window = hs.Accumulator(hs.AdamW(net.parameters(), lr=1e-2), len(LENGTHS), scaler=made)
        for i, batch in enumerate(batches()):
            run(window, net, [batch])
            if moves and i == 1:
                made.update(64.0)
        window.finish()
        made.unscale_(window.optimizer)
    for name, grad in gradients(nets[0]).items():
        assert_same_bits(gradients(nets[1])[name], grad, name)


def test_clipping_is_of_the_divided_gradients() -> None:
    """max_grad_norm, by hand with halfstep and by hand with torch, under a scaler or not: one update."""
    results = []
    for how in ("inside", "hs", "torch", "scaled"):
        net = model(BFLOAT16)
        optimizer = hs.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.25 if how == "inside" else None)
        window = hs.Accumulator(optimizer, len(LENGTHS), scaler=hs.LossScaler() if how == "scaled" else None)
        run(window, net, batches())
        norm = torch.nn.utils.get_total_norm(whole_batch(model(BFLOAT16), batches())[1].values())
        if how != "inside":
            window.finish()
            if how == "scaled":
                window.scaler.unscale_(optimizer)
            clip = torch.nn.utils.clip_grad_norm_ if how == "torch" else hs.clip_grad_norm_
            assert clip(net.parameters(), 0.25).item() == pytest.approx(norm.item(), rel=2**-7)  # of bfloat16
        assert not window.step()
        results.append(optimizer.state[net.inner.weight]["master"].clone())
    assert results[0].isfinite().all()
    for other in results[1:]:
        assert_to_rounding(other, results[0], sum(LENGTHS))


def test_other_optimizers_get_sums_rounded_once() -> None:
    net, wide = model(BFLOAT16), model(BFLOAT16)
    for one, make in ((net, torch.optim.SGD), (wide, hs.AdamW)):
        window = hs.Accumulator(make(one.parameters()), len(LENGTHS))
        run(window, one, batches())
        window.finish()
    for name, grad in gradients(net).items():
        assert_same_bits(grad, gradients(wide)[name].bfloat16(), name)


def test_step_returns_what_the_optimizer_says() -> None:
    for scaler in (None, hs.LossScaler()):
        for make, kind in ((hs.AdamW, torch.Tensor), (torch.optim.SGD, torch.Tensor if scaler else type(None))):
            net = model(BFLOAT16)
            window = hs.Accumulator(make(net.parameters()), 1, scaler=scaler)
            run(window, net, batches([3]))
            assert isinstance(window.step(), kind)


def test_schedules_and_several_optimizers_under_one_scaler() -> None:
    nets, scaler = [model(), model()], hs.LossScaler(growth_interval=1)
    windows = [hs.Accumulator(hs.AdamW(net.parameters(), lr=1.0), 1, scaler=scaler) for net in nets]
    schedule = torch.optim.lr_scheduler.ExponentialLR(windows[0].optimizer, gamma=0.5)
    for _ in range(2):
        for net, window in zip(nets, windows, strict=True):
            run(window, net, batches([4]))
            window.step(update_scale=False)
        scaler.update()
        schedule.step()
    assert schedule.get_last_lr() == [0.25]
    assert scaler.get_scale() == 2.0**18


def test_optimizers_keep_torchs_checkpoints() -> None:
    """What the optimizer saves is what it saves after plain steps, and a resumed run is the run."""
    net, again = model(BFLOAT16), model(BFLOAT16)
    optimizer, resumed = (hs.AdamW(one.parameters(), lr=1e-2) for one in (net, again))
    window = trained(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), window.state_dict()))
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"] == saved[1]["param_groups"]
    other = hs.Accumulator(resumed, len(LENGTHS))
    for one, state in zip((again, resumed, other), saved, strict=True):
        one.load_state_dict(state)
    for one, loop in ((net, window), (again, other)):
        run(loop, one, batches(seed=9))
        loop.step()
    for name, weight in weights(net).items():
        assert_same_bits(again.get_parameter(name).detach(), weight, name)
    assert saved[2] == {"window_tokens": 61.0}


def test_an_optimizer_is_free_when_its_accumulator_is_gone() -> None:
    net = model()
    optimizer = hs.AdamW(net.parameters())
    window = hs.Accumulator(optimizer, 2)
    run(window, net, batches([3]))
    hooks = len(optimizer._optimizer_step_pre_hooks)
    del window
    assert (hooks, len(optimizer._optimizer_step_pre_hooks)) == (1, 0)
    optimizer.step()


def test_layer_norms_need_nothing() -> None:
    """Their statistics are each sample's own: the model of every test here has both kinds."""
    kinds = {type(module) for module in model().modules()}
    assert {nn.LayerNorm, nn.RMSNorm} <= kinds
