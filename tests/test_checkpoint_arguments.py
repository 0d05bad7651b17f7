"""`hs.checkpoint` and what goes into and out of a block: tensors in containers, containers that it writes into, graphs
that are gone through again, modes that somebody switches between forward and backward.

Guards: a list or dict that the block gets a copy of, and so writes into in vain; one that each recomputation makes
longer; a recomputation in another mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from checkpointed import POLICIES, WIDTH, assert_same_run, inputs, run
from torch import Tensor, nn

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Any:
    return POLICIES[request.param]()


class Wide(nn.Module):
    """A block with arguments and results of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, pair: tuple[Tensor, Tensor], *, factor: float, debug: Any, early_stop: Tensor):
        cos, sin = pair
        hidden = self.scale(hidden) * cos + sin * factor
        assert debug is None
        return {"hidden": hidden, "more": [self.shift(hidden).tanh(), early_stop, None]}


def test_arguments_and_results_of_every_kind(policy: Any) -> None:
    """Also keywords that torch.utils.checkpoint would take for its own."""
    torch.manual_seed(0)
    model = nn.ModuleList([Wide(), Wide()])
    pair = (torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH))

    def forward(x: Tensor) -> Any:
        for wide in model:
            out = wide(x, pair, factor=0.5, debug=None, early_stop=x)
            x = out["hidden"] + out["more"][1]
        return out

    def gradients() -> dict[str, Tensor]:
        pair[0].grad = None
        found = run(model, inputs(), forward)
        return {**found, "cos": pair[0].grad}

    plain = gradients()
    hs.checkpoint(model, policy)
    assert_same_run(gradients(), plain)


def test_backward_again_and_in_parts(policy: Any) -> None:
    """retain_graph; and two losses of one block, each with a backward of its own."""
    torch.manual_seed(0)
    model = nn.ModuleList([Wide(), Wide()])

    def gradients() -> list[Tensor]:
        x = inputs()
        out = x
        for wide in model:
            results = wide(out, (x, x), factor=1.0, debug=None, early_stop=x)
            out = results["hidden"]
        wanted = [x, *model.parameters()]
        first, again = (
            torch.autograd.grad(out.square().sum(), wanted, retain_graph=True, materialize_grads=True) for _ in range(2)
        )
        other = torch.autograd.grad(results["more"][0].square().sum(), wanted, materialize_grads=True)
        return [*first, *again, *other]

    plain = gradients()
    hs.checkpoint(model, policy)
    for got, expected in zip(gradients(), plain, strict=True):
        assert torch.equal(got, expected)


class Collecting(nn.Module):
    """A block that looks at its caller's containers and writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Tensor], options: dict[str, Any]) -> Tensor:
        x = self.linear(x).tanh() * (len(losses) + 1) * options.pop("factor", 1.0)
        losses.append(x.square().mean())
        return x


def test_containers_are_the_caller_s(policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Collecting(), Collecting()])
    losses: list[Tensor] = []

    def forward(x: Tensor) -> Any:
        losses.clear()
        options = {"factor": 0.5}
        for block in model:
            x = block(x, losses, options)
        assert options == {}
        return [x, *losses]

    plain = run(model, inputs(), forward)
    hs.checkpoint(model, policy, blocks=Collecting)
    for _ in range(2):
        assert_same_run(run(model, inputs(), forward), plain)
        assert len(losses) == 2


class Modal(nn.Module):
    """What it does in each mode saves tensors of the same shapes, so that torch does not notice a recomputation in the
    other one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * (2.0 if self.training else 0.5)).tanh()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())


def normalising() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(5 * WIDTH, 5 * WIDTH), nn.BatchNorm1d(5 * WIDTH), nn.Unflatten(1, (5, WIDTH))
    )


@pytest.mark.parametrize("trains", [True, False], ids=["train then eval", "eval then train"])
@pytest.mark.parametrize("block", [Modal, dropping, normalising])
def test_a_mode_that_is_switched_before_backward(block: Any, trains: bool, policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def gradients() -> list[Tensor]:
        model.load_state_dict(state)
        model.train(trains)
        torch.manual_seed(1)
        loss = model(inputs()).square().sum()
        model.train(not trains)
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert all(part.training is not trains for part in model.modules())
        return [*found, *(buffer.clone() for buffer in model.buffers())]

    plain = gradients()
    hs.checkpoint(model, policy, blocks=list(model))
    for got, expected in zip(gradients(), plain, strict=True):
        assert_same_bits(got, expected, "gradient or buffer")
