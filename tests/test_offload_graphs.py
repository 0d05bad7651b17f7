"""How long what moved lives: graphs that are dropped, retained, differentiated twice, used in part or side by side.

Guards: buffers and device memory that are never given back, or given back while somebody needs them.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from offload_cases import ALL, Block, assert_same, gradients, offloaded, plain, tokens, transformer
from torch import Tensor, nn

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    context, device = offloaded()
    with context:
        loss = plain(transformer(), tokens())
    assert device.buffers.used_bytes == context.bytes > 0
    with device.buffers.lock:  # as where the garbage collector drops it in the midst of something
        del loss
    assert device.buffers.used_bytes == 0
    assert context.in_flight_bytes == 0
    free = device.buffers.free_bytes
    for _ in range(3):
        with context:
            plain(transformer(), tokens())
    assert device.buffers.free_bytes == free, "the same buffers go round"


def test_a_retained_graph_goes_backward_again() -> None:
    expected, (context, device) = gradients("transformer"), offloaded()
    torch.manual_seed(0)
    model, x = transformer(), tokens().requires_grad_()
    with context:
        loss = plain(model, x)
    device.finish()
    assert context.in_flight_bytes == 0
    for times in (1, 2, 3):
        grads = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=times < 3)
        names = ["input", *(name for name, _ in model.named_parameters())]
        assert_same(dict(zip(names, grads, strict=True)), {name: expected[name] for name in names})
        assert context.fetched_bytes == times * context.bytes, "nothing is held between two"
    assert device.buffers.used_bytes == 0


def test_second_derivatives() -> None:
    def second(context: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(4, 8, requires_grad=True)
        with context:
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = grad.square().sum()
        loss.backward()
        return next(model.parameters()).grad  # type: ignore[return-value]

    context, _ = offloaded()
    assert torch.equal(second(context), second(torch.enable_grad()))
    assert context.fetched_bytes > 0


def test_part_of_a_graph() -> None:
    context, device = offloaded(prefetch_bytes=2000)
    model, x = transformer(), tokens().requires_grad_()
    with context:
        loss = plain(model, x)
    last = list(model[-1].parameters())
    ours = torch.autograd.grad(loss, last, retain_graph=True)
    assert context.fetched_bytes < context.bytes
    assert all(map(torch.equal, ours, torch.autograd.grad(plain(model, x), last)))
    del loss
    device.finish()
    assert device.buffers.used_bytes == 0


def test_a_context_that_stays_open_forgets_what_is_gone() -> None:
    """And brings back what was saved first of what is not."""
    context, device = offloaded()
    x = torch.randn(4, 4, requires_grad=True)
    with context:
        kept = x.exp().sin().exp()
        for _ in range(150):
            x.exp().exp().sum().backward()
        (tape,) = context._tapes.values()
        assert len(tape.order) < 150
        x.grad = None
        kept.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().exp().sum(), x)[0])
    assert device.buffers.used_bytes == 0


def test_graphs_side_by_side_and_contexts_inside_each_other() -> None:
    model, x = transformer(), tokens()
    expected = torch.autograd.grad(plain(model, x), list(model.parameters()))
    outer, device = offloaded()
    inner = hs.offload_activations(**ALL, transfers=device)
    with outer:
        losses = [plain(model, x), plain(model, x)]
        moved = outer.bytes
        with inner:
            losses.append(plain(model, x))
        assert outer.bytes == moved, "the inner one has its way"
        losses.append(plain(model, x))
    once = (moved + x.nbytes) // 2  # x, which both save, moves once
    assert (inner.bytes, outer.bytes) == (once, moved + once - x.nbytes)
    for loss in (losses[i] for i in (1, 3, 0, 2)):
        assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))


def test_an_error_inside_leaves_nothing_behind() -> None:
    context, device = offloaded()
    with pytest.raises(IndexError), context:
        plain(transformer(), tokens())[3]
    assert device.buffers.used_bytes == 0
    y = tokens().requires_grad_().exp()
    moved = context.bytes
    assert y.grad_fn is not None
    assert context.bytes == moved, "outside nothing moves"


def test_as_a_decorator_and_in_another_thread() -> None:
    context, device = offloaded()
    model, x = transformer(), tokens()
    loss = context(plain)(model, x)
    assert context.bytes > 0
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    ours = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, ours, torch.autograd.grad(plain(model, x), list(model.parameters()))))
    del loss
    assert device.buffers.used_bytes == 0


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_with_checkpoint_the_inputs_of_blocks_move(policy: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(dropout=0.2) for _ in range(3))), tokens()
    torch.manual_seed(1)
    expected = torch.autograd.grad(plain(model, x), list(model.parameters()))
    hs.checkpoint(model, policy, blocks=lambda name, module: isinstance(module, Block))
    context, device = offloaded()
    torch.manual_seed(1)
    with context:
        loss = plain(model, x)
    assert context.bytes == 4 * x.nbytes  # three inputs, and what the loss squares
    ours = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, ours, expected))
    device.finish()


def test_transforms_of_functions() -> None:
    context, _ = offloaded()
    z = torch.randn(8, requires_grad=True)
    rows = torch.randn(3, 8)

    def loss() -> Tensor:
        return torch.func.vmap(lambda row: (row * z.exp()).sum())(rows).sum()

    (expected,) = torch.autograd.grad(loss(), z)
    with context:
        y = loss()
    assert torch.equal(torch.autograd.grad(y, z)[0], expected)
    with context, pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda t: (t * z.exp()).sum())(rows[0])
