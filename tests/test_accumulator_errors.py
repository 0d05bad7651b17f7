"""Every way to misuse hs.Accumulator that would give a wrong gradient, and what it says instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accumulation import batches, model, run, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")


def one(steps: int = 2, **options: Any) -> tuple[nn.Module, hs.Accumulator]:
    net = model()
    return net, hs.Accumulator(hs.AdamW(net.parameters()), steps, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0: expected an integer >= 1"),
        ({"steps": 2.0}, r"steps=2.0: expected an integer >= 1"),
        ({"steps": True}, "steps=True: expected an integer >= 1"),
        ({"reduction": "none"}, "reduction='none': expected 'mean' or 'sum'"),
        ({"sync": "first"}, "sync='first': expected 'every' or 'last'"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(**options)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be one of halfstep's or torch.optim's, got Block; the model"):
        hs.Accumulator(model(), 2)  # type: ignore[arg-type]


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient; there is nothing to accumulate"):
        hs.Accumulator(hs.AdamW([nn.Parameter(torch.ones(2), requires_grad=False)]), 2)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (-1, ValueError, "tokens=-1: expected the number of valid tokens, 0 or more"),
        (torch.tensor(-1), ValueError, "tokens=-1: expected the number of valid tokens, 0 or more"),
        (2.0, TypeError, "tokens=2.0: expected an integer"),
        (True, TypeError, "tokens=True: expected an integer"),
        (None, TypeError, "tokens=None: expected an integer"),
        (torch.tensor(2.0), TypeError, r"one integer, got a tensor of torch.float32 and shape \(\)"),
        (torch.tensor(True), TypeError, "one integer, got a tensor of torch.bool"),
        (torch.tensor([2]), TypeError, r"one integer, got a tensor of torch.int64 and shape \(1,\); pass \(labels"),
    ],
)
def test_tokens_that_are_no_count(tokens: Any, error: type[Exception], message: str) -> None:
    net, window = one()
    with pytest.raises(error, match=message):
        window.backward(token_loss(net, batches([3])[0]), tokens=tokens)
    assert not window.pending


def test_losses_that_are_none() -> None:
    net, window = one()
    loss = token_loss(net, batches([3])[0])
    with pytest.raises(ValueError, match=r"tensor of one element, got shape \(2,\); take the mean or the sum"):
        window.backward(torch.stack([loss, loss]), tokens=3)
    with pytest.raises(ValueError, match="tensor of one element, got float"):
        window.backward(0.5, tokens=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"no gradient: it was computed under no_grad\(\).*pass tokens=0"):
        window.backward(loss.detach(), tokens=3)
    window.backward(loss.reshape(1, 1), tokens=3)


LOGITS = torch.nn.Parameter(torch.linspace(-1, 1, 20).reshape(5, 4))
LABELS = torch.tensor([0, 1, 2, -100, 3])
CONTRADICTING: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "a sum": ("mean", lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum")),
    "a mean": ("sum", lambda: F.cross_entropy(LOGITS, LABELS)),
    "a mean of a tensor": ("sum", lambda: (LOGITS * LOGITS).mean()),
    "in another dtype": ("sum", lambda: F.mse_loss(LOGITS, LOGITS.detach()).bfloat16().float().unsqueeze(0)),
    "two sums": ("mean", lambda: F.mse_loss(LOGITS, -LOGITS.detach(), reduction="sum")
                 + F.binary_cross_entropy(LOGITS.sigmoid(), LOGITS.detach().sigmoid(), reduction="sum")),
}  # fmt: skip
UNDECIDED: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "a sum over the count": ("mean", lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum") / 4),
    "a mean times the count": ("sum", lambda: F.cross_entropy(LOGITS, LABELS) * 4),
    "a sum of weighted losses": ("mean", lambda: (LOGITS * 0.05).sum()),
    "a sum and something else": ("sum", lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum") + LOGITS.sum().tanh()),
    "a mean and a share of another": ("mean", lambda: F.cross_entropy(LOGITS, LABELS) + 0.5 * LOGITS.abs().mean()),
    "divided by something else": ("mean", lambda: F.cross_entropy(LOGITS, LABELS) / 3),
    "half a mean, in two steps": ("mean", lambda: 0.5 * F.mse_loss(LOGITS, LOGITS.detach() + 1)),
    "label smoothing": ("mean", lambda: F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTING)
def test_a_loss_of_the_other_reduction(case: str) -> None:
    reduction, make = CONTRADICTING[case]
    other = "sum" if reduction == "mean" else "mean"
    window = hs.Accumulator(hs.AdamW([LOGITS]), 2, reduction=reduction)
    message = f"made with reduction='{other}', as its graph shows, but the accumulator expects reduction='{reduction}'"
    with pytest.raises(ValueError, match=message):
        window.backward(make(), tokens=4)
    assert LOGITS.grad is None


@pytest.mark.parametrize("case", UNDECIDED)
def test_a_loss_whose_graph_shows_nothing_wrong(case: str) -> None:
    reduction, make = UNDECIDED[case]
    window = hs.Accumulator(hs.AdamW([LOGITS]), 2, reduction=reduction)
    window.backward(make(), tokens=4)
    window.finish()
    assert_close = torch.testing.assert_close
    (expected,) = torch.autograd.grad(make(), LOGITS)
    assert_close(LOGITS.grad, expected if reduction == "mean" else expected / 4)
    window.reset()


def test_a_mean_that_was_divided_by_the_number_of_micro_batches() -> None:
    net, window = one(steps=8)
    with pytest.raises(ValueError, match="the loss is a mean divided by 8, the number of micro-batches"):
        window.backward(token_loss(net, batches([3])[0]) / 8, tokens=3)


@pytest.mark.parametrize("scaler", [hs.LossScaler, partial(torch.amp.GradScaler, "cpu")], ids=["ours", "torch"])
def test_a_loss_that_was_scaled_already(scaler: Callable[..., Any]) -> None:
    made = scaler(init_scale=8.0)
    net = model(torch.float32)
    window = hs.Accumulator(hs.AdamW(net.parameters()), 2, scaler=made)
    for _ in range(2):
        loss = token_loss(net, batches([3])[0])
        with pytest.raises(ValueError, match=r"the loss was scaled already, by scaler.scale\(\)"):
            window.backward(made.scale(loss).reshape(1), tokens=3)
        window.backward(8.0 * loss, tokens=3)


def test_gradients_that_were_cleared_before_the_step() -> None:
    net, window = one(steps=1)
    run(window, net, batches([3]))
    window.finish()
    window.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"every gradient was cleared between finish\(\) and step\(\)"):
        window.step()
    window.reset()
    run(window, net, batches([3]))
    window.step()


def test_a_parameter_that_left_the_optimizer_is_left_clean() -> None:
    net = model(torch.bfloat16)
    window = hs.Accumulator(hs.AdamW(net.parameters()), 1)
    run(window, net, batches([3]))
    window.finish()
    left = window.optimizer.param_groups[0]["params"].pop()
    assert left.grad is not None
    window.reset()
    assert left.grad is None
    assert left.grad_dtype == torch.bfloat16


def test_tokens_of_numpy() -> None:
    net, window = one()
    window.backward(token_loss(net, batches([3])[0]), tokens=np.int64(3))
    window.finish()
    assert window.tokens.item() == 3


def test_a_window_that_is_full() -> None:
    net, window = one(steps=1)
    run(window, net, batches([3]))
    with pytest.raises(RuntimeError, match=r"micro-batch 2 of a window of 1: call step\(\) when accumulator.ready"):
        run(window, net, batches([3]))
    window.finish()
    with pytest.raises(RuntimeError, match=r"backward\(\) after finish\(\): the window has ended; call step\(\) first"):
        run(window, net, batches([3]))
    with pytest.raises(RuntimeError, match=r"finish\(\) was called twice in a window; call step\(\)"):
        window.finish()


@pytest.mark.parametrize("call", ["step", "finish"])
def test_a_window_that_is_empty(call: str) -> None:
    _, window = one()
    with pytest.raises(RuntimeError, match=r"no gradient accumulated: call backward\(loss, tokens\) for each micro"):
        getattr(window, call)()


@pytest.mark.parametrize("make", [hs.AdamW, torch.optim.SGD])
def test_the_optimizers_own_step_within_a_window(make: Any) -> None:
    net = model()
    optimizer = make(net.parameters())
    window = hs.Accumulator(optimizer, 2)
    optimizer.step()  # between windows it is the user's own
    run(window, net, batches([3]))
    for stage in ("open", "finished"):
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called within a window.*accumulator.step\(\)"):
            optimizer.step()
        if stage == "open":
            window.finish()
    window.step()


def test_gradients_from_elsewhere() -> None:
    net, window = one()
    message = r"\(shape \(16, 16\), torch.float32\) has a gradient that did not come through accumulator.backward\(\)"
    token_loss(net, batches([3])[0]).backward()
    with pytest.raises(RuntimeError, match=message):
        run(window, net, batches([3]))
    net.zero_grad()
    run(window, net, batches([3]))
    token_loss(net, batches([3])[0]).backward()
    with pytest.raises(RuntimeError, match=message):
        window.step()


def test_sparse_and_complex_gradients() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    window = hs.Accumulator(torch.optim.SGD(table.parameters()), 1)
    with pytest.raises(TypeError, match=r"\(shape \(5, 4\).*layout torch.sparse_coo; .*sparse=False"):
        window.backward(table(torch.tensor([1, 1])).mean(), tokens=2)
    turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    window = hs.Accumulator(torch.optim.SGD([turn]), 1)
    with pytest.raises(TypeError, match="expected float32, float64, bfloat16 or float16"):
        window.backward(turn.abs().mean(), tokens=2)


def test_after_an_error_a_window_can_be_dropped() -> None:
    net, window = one()
    x, labels = batches([3])[0]
    run(window, net, [(x, labels)])
    loss = token_loss(net, (x, labels))
    loss.register_hook(lambda grad: grad.new_zeros(2))
    with pytest.raises(RuntimeError, match="hook"):
        window.backward(loss, tokens=3)
    window.reset()
    assert not window.pending
    assert not any(p.grad is not None for p in net.parameters())
    run(window, net, batches([3, 4]))
    window.step()


def test_checkpoints_within_a_window() -> None:
    net, window = one()
    state = window.state_dict()
    run(window, net, batches([3]))
    for call in (window.state_dict, lambda: window.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"with 1 of 2 micro-batches in the window.*reset\(\) to drop them"):
            call()
    window.reset()
    window.load_state_dict(state)
    for bad in ({}, {"window_tokens": 0.0}, {"window_tokens": "8"}):
        with pytest.raises(ValueError, match=r"state has window_tokens=.*; expected None or a number >= 1"):
            window.load_state_dict(bad)


def test_the_number_of_micro_batches_changes_between_windows() -> None:
    net, window = one()
    window.steps = 1
    run(window, net, batches([3]))
    assert window.ready
    with pytest.raises(RuntimeError, match="setting steps with 1 of 1 micro-batches in the window"):
        window.steps = 2
    window.step()
    with pytest.raises(ValueError, match="steps=0: expected an integer >= 1"):
        window.steps = 0


def test_copies() -> None:
    _, window = one()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"belongs to its optimizer and model.*state_dict\(\) between two"):
            copied(window)
