"""hs.Accumulator on one rank: the whole batch's gradient, whatever the micro-batches' lengths and dtypes.

Guards: a mean of means, a sum in 16 bits, a weight that is rounded, a scale that depends on earlier windows, a micro-
batch of no valid token that leaves a NaN, an unused parameter that the optimizer moves all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accumulation import (
    LENGTHS,
    assert_to_rounding,
    assert_within_budget,
    batches,
    gradients,
    in_float64,
    model,
    run,
    spread,
    token_loss,
    valid,
    whole_batch,
)  # fmt: skip
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from bits import assert_all_same_bits, assert_same_bits
from no_sync import NeverReads, forbid_waits
from torch import Tensor, nn

import halfstep as hs
from halfstep.ops import backend

pytestmark = pytest.mark.usefixtures("one_thread")


TOKENS = sum(LENGTHS)


def accumulator(net: nn.Module, steps: int = len(LENGTHS), **options: Any) -> hs.Accumulator:
    return hs.Accumulator(hs.AdamW(net.parameters(), lr=1e-2), steps, **options)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 5, 0, 50], [60]], ids=["ragged", "none valid", "one"])
def test_the_gradient_is_that_of_the_whole_batch(lengths: list[int], reduction: str, dtype: torch.dtype) -> None:
    parts, net = batches(lengths), model(dtype)
    window = accumulator(net, len(lengths), reduction=reduction)
    run(window, net, parts, reduction)
    window.finish()
    loss, exact = in_float64(lambda: model(dtype), parts)
    naive_loss, naive = whole_batch(model(dtype), parts)
    assert {grad.dtype for grad in gradients(net).values()} == {FLOAT32}
    assert_within_budget(gradients(net), naive, exact, spread(lambda: model(dtype), parts))
    bound = 3 * (naive_loss - loss).abs() + 2 * torch.finfo(dtype).eps * loss
    assert (window.loss - loss).abs() <= bound
    assert window.tokens.item() == sum(lengths)
    assert net.unused.grad is None


def by_hand(net: nn.Module, parts: Any, unit: float) -> dict[str, Tensor]:
    """Float32 sums of the micro-batches' gradients, each rounded to the model's dtype by autograd, times c / N."""
    totals: dict[str, Tensor] = {}
    for batch in parts:
        count = int(valid(batch[1]))
        (token_loss(net, batch) * (count / unit)).backward()
        for name, grad in gradients(net).items():
            totals[name] = totals[name] + grad.float() if name in totals else grad.float()
        net.zero_grad()
    factor = torch.tensor(unit / sum(int(valid(labels)) for _, labels in parts))
    return {name: total * factor for name, total in totals.items()}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_bits_are_those_of_float32_sums(dtype: torch.dtype) -> None:
    """Also of a second window, whose unit is another one."""
    net = model(dtype)
    window = accumulator(net)
    for unit, seed in ((16.0, 0), (64.0, 1)):
        parts = batches(seed=seed)
        run(window, net, parts)
        window.finish()
        got = gradients(net)
        twin = model(dtype)
        twin.load_state_dict(net.state_dict())
        for name, expected in by_hand(twin, parts, unit).items():
            assert_same_bits(got[name], expected, name)
        window.step()


def test_float32_gradients_do_not_depend_on_earlier_windows() -> None:
    parts, nets = batches(), [model(), model()]
    windows = [accumulator(net) for net in nets]
    run(windows[0], nets[0], batches([900]))
    windows[0].reset()
    for window, net in zip(windows, nets, strict=True):
        run(window, net, parts)
        window.finish()
    for name, grad in gradients(nets[0]).items():
        assert_same_bits(grad, gradients(nets[1])[name], name)


def test_float16_gradients_are_of_the_size_of_a_means() -> None:
    """A later window that begins with the shortest micro-batch does not overflow where the whole batch would not."""
    net = model(FLOAT16)
    window = accumulator(net, 3, scaler=hs.LossScaler(init_scale=2.0**14))
    for lengths in ([2000, 0, 2], [2, 0, 2000]):
        run(window, net, batches(lengths))
        assert not window.step()
    assert window.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize("masked", [False, True], ids=["cross_entropy", "masked mean"])
def test_a_micro_batch_of_no_valid_token_adds_exactly_nothing(masked: bool) -> None:
    """Its loss is 0 / 0; the gradient of a mean that the user divides is NaN even when multiplied by 0."""

    def loss_of(net: nn.Module, batch: Any) -> Tensor:
        if not masked:
            return token_loss(net, batch)
        x, labels = batch
        keep = labels != -100
        losses = nn.functional.cross_entropy(net(x), labels.clamp(min=0), reduction="none")
        return (losses * keep).sum() / keep.sum()

    nets = [model(), model()]
    full, empty = batches([5, 9]), batches([0], seed=5)[0]
    losses = []
    for net, parts in zip(nets, (full, [empty, full[0], empty, full[1], empty]), strict=True):
        window = accumulator(net, len(parts))
        for batch in parts:
            window.backward(loss_of(net, batch), tokens=valid(batch[1]))
        window.finish()
        losses.append(window.loss)
    assert_all_same_bits(losses[:1], losses[1:], "loss")
    for name, grad in gradients(nets[0]).items():
        assert_same_bits(gradients(nets[1])[name], grad, name)


def test_an_empty_micro_batch_is_silent_for_scalar_parameters() -> None:
    """Their gradient is a product with the loss, which is NaN."""
    weight, scale, shift = (nn.Parameter(torch.ones(shape)) for shape in ((4,), (), (1,)))
    window = hs.Accumulator(hs.AdamW([weight, scale, shift]), 3)
    for tokens in (0, 2, 0):
        mean = (weight * torch.ones(4)).sum() / tokens if tokens else (weight * 0).sum() / torch.zeros(())
        window.backward(mean * scale.exp() + shift * mean, tokens=tokens)
    window.finish()
    assert weight.grad.isfinite().all()
    assert scale.grad.item() == pytest.approx(2 * torch.e)
    assert shift.grad.tolist() == [2.0]
    window.step()
    leaf = hs.Accumulator(hs.AdamW([scale]), 1)
    leaf.backward(scale, tokens=3)  # the loss is a parameter
    leaf.finish()
    assert scale.grad.item() == 1.0


def test_what_silences_an_empty_micro_batch_is_gone_afterwards() -> None:
    """Also from a node that outlives its graph, as those that DistributedDataParallel holds do."""
    weight = nn.Parameter(torch.ones(4))
    held = weight.expand_as(weight).grad_fn.next_functions[0][0]  # adds to weight.grad
    window = hs.Accumulator(hs.AdamW([weight]), 3)
    for tokens in (0, 2, 0):
        window.backward(weight.mean(), tokens=tokens)
    window.finish()
    assert held is not None
    assert weight.grad.tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_window_without_any_valid_token_has_zero_gradients_and_loss(dtype: torch.dtype) -> None:
    net = model(dtype)
    window = accumulator(net, 2)
    run(window, net, batches([0, 0]))
    window.finish()
    assert all((grad == 0).all() for grad in gradients(net).values())
    assert (window.loss.item(), window.tokens.item()) == (0.0, 0)
    assert net.unused.grad is None


def test_equal_weights_are_a_mean_of_means() -> None:
    parts, net = batches(), model()
    window = accumulator(net)
    for batch in parts:
        window.backward(token_loss(net, batch), tokens=1)
    window.finish()
    twin = model().double()
    for batch in parts:
        (token_loss(twin, batch) / len(parts)).backward()
    for name, grad in gradients(net).items():
        assert_to_rounding(grad, gradients(twin)[name], TOKENS)
    mean = sum(token_loss(twin, b).detach() for b in parts) / len(parts)
    assert_to_rounding(window.loss.float(), mean, TOKENS)


def test_a_shorter_last_window() -> None:
    parts, net = batches(), model()
    window = accumulator(net, steps=3)
    told = []
    for batch in parts:
        run(window, net, [batch])
        told.append((window.ready, window.pending))
        if window.ready:
            window.step()
    assert told == [(False, True), (False, True), (True, True), (False, True)]
    twin = model()
    twin.load_state_dict(net.state_dict())
    window.finish()
    for name, grad in whole_batch(twin, parts[3:])[1].items():
        assert_to_rounding(gradients(net)[name], grad, TOKENS)
    window.step()
    assert not window.pending


def test_parameters_that_take_turns() -> None:
    """A layer that one micro-batch uses and the next does not, one that is frozen, one that comes later."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 1).to(dtype) for dtype in (FLOAT32, BFLOAT16, FLOAT32, BFLOAT16)]
    layers[2].requires_grad_(False)
    optimizer = hs.AdamW([p for layer in layers[:3] for p in layer.parameters()])
    window = hs.Accumulator(optimizer, 3)
    x = torch.ones(2, 4)
    window.backward(layers[0](x).mean(), tokens=2)
    window.backward(layers[1](x.bfloat16()).float().mean() + layers[2](x).mean(), tokens=2)
    window.backward(layers[0](x).mean(), tokens=4)
    window.finish()
    assert [layer.bias.grad is None for layer in layers] == [False, False, True, True]
    assert (layers[0].bias.grad.item(), layers[1].bias.grad.item()) == (0.75, 0.25)
    window.step()
    optimizer.add_param_group({"params": list(layers[3].parameters())})
    window.backward(layers[3](x.bfloat16()).float().mean(), tokens=2)
    window.finish()
    assert [layer.bias.grad is None for layer in layers] == [True, True, True, False]


def test_between_calls_no_parameter_has_a_gradient() -> None:
    net = model(BFLOAT16)
    window = accumulator(net)
    before = [p.grad_dtype for p in net.parameters()]
    for batch in batches():
        run(window, net, [batch])
        assert not gradients(net)
        window.optimizer.zero_grad()  # by habit; it finds nothing
    window.finish()
    assert gradients(net)
    window.step()
    assert not gradients(net)
    assert [p.grad_dtype for p in net.parameters()] == before


@pytest.mark.filterwarnings("ignore:.*plain PyTorch runs on meta")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    net = model(dtype).to("meta")
    parts = [(x.to("meta"), labels.to("meta")) for x, labels in batches()]
    with forbid_waits("meta"), backend.override(NeverReads()) as counts:
        window = accumulator(net, 2, scaler=hs.LossScaler())
        run(window, net, parts[:2])
        window.step()
        window.backward(token_loss(net, parts[2]), tokens=17)
        window.finish()
    assert window.loss.device.type == window.tokens.device.type == "meta"
    narrow = dtype == BFLOAT16
    assert (counts["cast_"], counts["accumulate_"], counts["unscale_"]) == (2 * narrow, 1 * narrow, 2)
