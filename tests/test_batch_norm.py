"""hs.EffectiveBatchNorm against the whole batch: running statistics, outputs, loss.

Guards: a variance without that between the micro-batches, a biased one, a micro-batch that counts like a longer one, a
momentum for each micro-batch, a sweep too few, a window that is counted twice by a checkpoint, a copy that goes on
collecting for the original.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accumulation import assert_to_rounding
from adversarial import BFLOAT16, FLOAT32
from bits import assert_all_same_bits, assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, SIZES = 6, [2, 20, 7]
EPS = torch.finfo(FLOAT32).eps


def norms_of(net: nn.Module) -> list[nn.BatchNorm1d]:
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]


def net_of(layers: int, **options: Any) -> nn.Sequential:
    """`layers` BatchNorms one behind another; the first sees the data themselves."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.BatchNorm1d(WIDTH, **options), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    net = nn.Sequential(*made, nn.Linear(WIDTH, 3))
    for norm in norms_of(net):
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)
    return net


def data(sizes: list[int] = SIZES, seed: int = 0) -> list[Tensor]:
    """Micro-batches whose means are far apart."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator) * (i + 1) + 3 * i for i, n in enumerate(sizes)]


def assert_moved_alike(got: nn.Module, expected: nn.Module, ulps: float = 8) -> None:
    """To float32 rounding: of the running statistics, against the size of what they are sums of."""
    for a, b in zip(norms_of(got), norms_of(expected), strict=True):
        for name in ("running_mean", "running_var"):
            ours, theirs = getattr(a, name).double(), getattr(b, name).double()
            assert (ours - theirs).abs().max() <= ulps * EPS * theirs.abs().max(), name
        assert a.num_batches_tracked == b.num_batches_tracked


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize("sizes", [SIZES, [2, 2], [29]], ids=str)
def test_merged_running_statistics_are_the_whole_batchs(sizes: list[int], momentum: float | None) -> None:
    net, whole = net_of(1, momentum=momentum), net_of(1, momentum=momentum)
    norms = hs.EffectiveBatchNorm(net)
    for seed in range(3):
        parts = data(sizes, seed)
        for x in parts:
            net(x)
        norms.update()
        whole(torch.cat(parts))
        assert_moved_alike(net, whole)
    assert norms_of(net)[0].num_batches_tracked == 3


@pytest.mark.parametrize("dims", [2, 3])
def test_images_and_volumes(dims: int) -> None:
    norm, whole = ([None, None, nn.BatchNorm2d, nn.BatchNorm3d][dims](4) for _ in range(2))
    norms = hs.EffectiveBatchNorm(norm)
    parts = [torch.randn(n, 4, *[3] * dims) + n for n in (1, 3)]
    for x in parts:
        norm(x)
    norms.update()
    whole(torch.cat(parts))
    torch.testing.assert_close(norm.running_mean, whole.running_mean, rtol=8 * EPS, atol=0)
    torch.testing.assert_close(norm.running_var, whole.running_var, rtol=8 * EPS, atol=0)


def test_merged_changes_no_bit_of_outputs_and_gradients() -> None:
    net, plain = net_of(3), net_of(3)
    norms = hs.EffectiveBatchNorm(net)
    for x in data():
        got, expected = net(x), plain(x)
        assert_same_bits(got, expected, "output")
        got.square().mean().backward()
        expected.square().mean().backward()
    assert_all_same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()], "gradient")
    norms.update()


def test_deeper_layers_move_by_what_they_saw() -> None:
    net = net_of(2)
    norms, inner, seen = hs.EffectiveBatchNorm(net), norms_of(net)[1], []
    inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for x in data():
        net(x)
    norms.update()
    alone = nn.BatchNorm1d(WIDTH)
    alone(torch.cat(seen))
    assert_moved_alike(inner, alone)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_exact_outputs_loss_and_statistics_are_the_whole_batchs(layers: int, options: dict[str, Any]) -> None:
    net, whole = net_of(layers, **options), net_of(layers, **options)
    norms = hs.EffectiveBatchNorm(net)
    parts = data()
    expected, truth = whole(torch.cat(parts)), net_of(layers, **options).double()(torch.cat(parts).double())
    with norms.exact(parts, net):
        got = torch.cat([net(x) for x in parts])
    naive = (expected - truth).abs()
    assert (got - truth).abs().max() <= 3 * naive.max() + 8 * EPS * truth.abs().max()
    labels = torch.arange(len(got)) % 3
    torch.testing.assert_close(F.cross_entropy(got, labels), F.cross_entropy(expected, labels), rtol=64 * EPS, atol=0)
    assert_moved_alike(net, whole, 64)


def test_each_sweep_makes_one_more_layer_exact() -> None:
    for sweeps in (1, 2, 3):
        net, whole = net_of(3), net_of(3)
        parts = data()
        with hs.EffectiveBatchNorm(net).exact(parts, net, sweeps=sweeps):
            pass
        whole(torch.cat(parts))
        off = [
            (a.running_mean - b.running_mean).abs().max().item()
            for a, b in zip(norms_of(net), norms_of(whole), strict=True)
        ]
        assert [error < 1e-5 for error in off] == [True] * sweeps + [False] * (3 - sweeps), off


def relative_error(got: nn.Module, whole: nn.Module) -> float:
    ours, theirs = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (got, whole))
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_exact_gradients_are_nearer_to_the_whole_batchs_than_those_of_micro_batches() -> None:
    """One micro-batch is the whole batch, to rounding; several are estimates."""
    parts = list(data([96])[0].split(32))
    for given, most in (([torch.cat(parts)], 1e-5), (parts, 0.5)):
        net, alone, whole = net_of(2), net_of(2), net_of(2)
        whole(torch.cat(parts)).square().mean().backward()
        with hs.EffectiveBatchNorm(net).exact(given, net):
            for x in given:
                (net(x).square().mean() / len(given)).backward()
        for x in given:
            (alone(x).square().mean() / len(given)).backward()
        assert relative_error(net, whole) <= most
    assert relative_error(net, whole) < 0.7 * relative_error(alone, whole)


@pytest.mark.parametrize("affine", [True, False])
def test_the_gradient_of_the_exact_pass(affine: bool) -> None:
    """Values by the window, derivatives by the micro-batch: autograd of just that, in float64."""
    norm = nn.BatchNorm1d(WIDTH, affine=affine).double()
    parts = [x.double().requires_grad_() for x in data()]
    weight = torch.linspace(-1, 2, WIDTH, dtype=torch.float64)
    with hs.EffectiveBatchNorm(norm).exact(parts, norm):
        (norm(parts[1]).sin() * weight).sum().backward()
    got = [parts[1].grad, *(p.grad for p in norm.parameters())]
    together, x = torch.cat(parts).detach(), parts[1].detach().requires_grad_()
    mean = x.mean(0) + (together.mean(0) - x.mean(0)).detach()
    variance = x.var(0, correction=0) + (together.var(0, correction=0) - x.var(0, correction=0)).detach()
    normal = (x - mean) / (variance + norm.eps).sqrt()
    leaves = [x, *(p.detach().requires_grad_() for p in norm.parameters())]
    y = normal * leaves[1] + leaves[2] if affine else normal
    for ours, theirs in zip(got, torch.autograd.grad((y.sin() * weight).sum(), leaves), strict=True):
        assert_to_rounding(ours, theirs, len(together))


def test_dropout_is_the_same_in_every_pass() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    parts, seen = data(), []
    net[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with hs.EffectiveBatchNorm(net).exact(parts, net, sweeps=2):
        for x in parts:
            net(x)
    for k in range(3):
        assert_same_bits(seen[k], seen[k + 3], "first and second sweep")
        assert_same_bits(seen[k], seen[k + 6], "sweep and pass")


def test_bfloat16_layers_keep_their_variance_beside_a_large_mean() -> None:
    norm, whole = nn.BatchNorm1d(WIDTH, momentum=1.0).to(BFLOAT16), nn.BatchNorm1d(WIDTH, momentum=1.0)
    norms = hs.EffectiveBatchNorm(norm)
    parts = [(x / 8 + 20.05 + 0.04 * i).to(BFLOAT16) for i, x in enumerate(data([40, 40, 40]))]
    for x in parts:
        norm(x)
    norms.update()
    whole(torch.cat(parts).float())
    torch.testing.assert_close(norm.running_var.float(), whole.running_var, rtol=2**-7, atol=0)
    with norms.exact(parts, norm):
        got = norm(parts[0])
    assert got.dtype == BFLOAT16
    assert got.isfinite().all()


def recomputing(net: nn.Sequential, how: str) -> Callable[[Tensor], Tensor]:
    if how == "halfstep":
        hs.checkpoint(net, blocks=lambda name, module: name == "0")
        return net
    return lambda x: torch_checkpoint(net, x, use_reentrant=how == "reentrant")  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["halfstep", "torch", "reentrant"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_checkpointed_layer_counts_once(exact: bool, how: str) -> None:
    plain, net = (nn.Sequential(net_of(2)) for _ in range(2))
    run = recomputing(net, how)
    for one, forward in ((plain, plain), (net, run)):
        norms = hs.EffectiveBatchNorm(one)
        parts = [x.requires_grad_() for x in data()]
        if exact:
            with norms.exact(parts, one):
                for x in parts:
                    forward(x).square().mean().backward()
        else:
            for x in parts:
                forward(x).square().mean().backward()
            norms.update()
        norms.remove()
    for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_same_bits(a, b, "state")
    assert_all_same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()], "gradient")


def test_copies_and_what_is_left_behind_are_plain() -> None:
    net, plain = net_of(1), net_of(1)
    keys = list(net.state_dict())
    norms = hs.EffectiveBatchNorm(net)
    others = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    plain(data()[0])
    for other in others:
        other(data()[0])
        assert_moved_alike(other, plain, 0)
    assert list(net.state_dict()) == keys
    assert norms_of(net)[0].num_batches_tracked == 0
    norms.remove()
    net(data()[0])
    assert_moved_alike(net, plain, 0)
    assert "forward" not in norms_of(net)[0].__dict__
    del norms
    norms = hs.EffectiveBatchNorm(net)
    del norms
    assert "forward" not in norms_of(net)[0].__dict__


def test_layers_without_running_statistics_and_in_eval_mode() -> None:
    net, plain = net_of(2, track_running_stats=False), net_of(2, track_running_stats=False)
    norms, parts = hs.EffectiveBatchNorm(net), data()
    for x in parts:
        assert_same_bits(net(x), plain(x), "output")
    norms.update()
    with norms.exact(parts, net):
        got = torch.cat([net(x) for x in parts])
    assert_to_rounding(got, plain(torch.cat(parts)), len(got))
    frozen = net_of(2)
    frozen[0].eval()
    before = copy.deepcopy(frozen[0].state_dict())
    norms = hs.EffectiveBatchNorm(frozen)
    for x in parts:
        frozen(x)
    norms.update()
    assert_all_same_bits(list(frozen[0].state_dict().values()), list(before.values()), "frozen layer")
    assert frozen[3].num_batches_tracked == 1


def test_errors() -> None:
    with pytest.raises(ValueError, match="the model has no BatchNorm layer"):
        hs.EffectiveBatchNorm(nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"layer '0' is a SyncBatchNorm.*use BatchNorm layers and process_group="):
        hs.EffectiveBatchNorm(nn.Sequential(nn.SyncBatchNorm(3)))
    net = net_of(1)
    norms = hs.EffectiveBatchNorm(net)
    with pytest.raises(RuntimeError, match=r"layer '0' belongs to another EffectiveBatchNorm; call its remove\(\)"):
        hs.EffectiveBatchNorm(net)
    net(data()[0])
    net.eval()
    with pytest.raises(RuntimeError, match=r"layer '0' evaluates while 1 micro-batches have not moved.*update\(\)"):
        net(data()[0])
    norms.reset()
    net(data()[0])
    net.train()
    for batches, options, error, message in (
        (iter(data()), {}, TypeError, "several times, got list_iterator; pass a list"),
        (data(), {"sweeps": 0}, ValueError, "sweeps=0: expected an integer >= 1"),
        ([], {}, ValueError, r"exact\(\) got no micro-batch"),
    ):
        with pytest.raises(error, match=message), norms.exact(batches, net, **options):
            pass


def test_an_error_within_a_window_moves_nothing() -> None:
    net = net_of(1)
    norms, before = hs.EffectiveBatchNorm(net), copy.deepcopy(net.state_dict())
    with pytest.raises(KeyError), norms.exact(data(), net):
        raise KeyError
    norms.update()
    assert_all_same_bits(list(net.state_dict().values()), list(before.values()), "state")


def test_the_accumulators_loop() -> None:
    """Loss and statistics of a window are the whole batch's, in both ways for the first layer."""
    for exact in (False, True):
        net, whole = net_of(1), net_of(1)
        norms = hs.EffectiveBatchNorm(net)
        accumulator = hs.Accumulator(hs.AdamW(net.parameters()), len(SIZES))
        parts, labels = data(), [torch.arange(n) % 3 for n in SIZES]
        expected = F.cross_entropy(whole(torch.cat(parts)), torch.cat(labels))

        def window() -> None:
            for x, y in zip(parts, labels, strict=True):  # noqa: B023
                accumulator.backward(F.cross_entropy(net(x), y), tokens=len(y))  # noqa: B023

        if exact:
            with norms.exact(parts, net):
                window()
        else:
            window()
            norms.update()
        accumulator.step()
        assert_moved_alike(net, whole)
        assert (abs(accumulator.loss.item() - expected.item()) < 1e-5) == exact
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms.remove()
