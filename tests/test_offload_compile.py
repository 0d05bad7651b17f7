"""offload_activations and torch.compile: around a compiled model, with graph breaks, and inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offload_cases import assert_same, offloaded, plain, tokens, transformer
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo asks
]


class Broken(nn.Module):
    """Two graphs and Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        torch._dynamo.graph_break()
        return self.last(y.sin() * y)


def grads(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_around_a_compiled_model() -> None:
    """Also where it is compiled in there."""
    model, x = Broken(), tokens()
    compiled: Callable[..., Tensor] = torch.compile(model, backend="aot_eager")
    for seed in range(3):
        context, device = offloaded(seed)
        with context:
            loss = plain(compiled, x)
        ours = grads(loss, model)
        assert_same(ours, grads(plain(compiled, x), model))
        assert context.bytes > 0
        del loss
        device.finish()
        assert device.buffers.used_bytes == 0


def test_inside_a_compiled_function() -> None:
    """It ends the graph: what is inside is a graph of its own, and the same happens as without compiling."""
    model, x = transformer(layers=1), tokens()
    context, device = offloaded()

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor) -> Tensor:
        with context:
            y = model(x)
        return y.square().mean()

    expected = grads(plain(model, x), model)
    for _ in range(2):
        assert_same(grads(loss_of(x), model), expected)
    assert context.bytes > 0
    device.finish()
    assert device.buffers.used_bytes == 0
