"""Every wait, and everything that keeps memory, is needed: with any one of them left out, a test sees it.

The calls are found in the sources. For each, scenarios run on a device that forgets it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import ALL, assert_same, gradients, plain, tokens, transformer

import halfstep as hs
from halfstep.activations import tape
from halfstep.transfers import host_buffers
from halfstep.transfers.host import HostEvent, HostStream, HostTransfers

pytestmark = pytest.mark.usefixtures("one_thread")
Site = tuple[str, int, str]  # file, line, which of these
ORDERING = ("wait", "keep", "record", "synchronize")


def sites() -> list[Site]:
    """Where the sources order something."""
    found = []
    for module in (tape, host_buffers):
        path = Path(str(module.__file__))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
                found.append((path.name, node.lineno, node.func.attr))
    return sorted(set(found))


class Forgetful(HostTransfers):
    """Leaves out what one place of the sources asks for."""

    def __init__(self, forgets: Site | None, seed: int) -> None:
        super().__init__(seed)
        self.forgets, self.asked = forgets, set[Site]()

    def _left_out(self, what: str) -> bool:
        frame = sys._getframe(2)
        site = (Path(frame.f_code.co_filename).name, frame.f_lineno, what)
        self.asked.add(site)
        return site == self.forgets

    def record(self, stream: HostStream) -> HostEvent:
        event = super().record(stream)
        return HostEvent(stream, {stream: 1}) if self._left_out("record") else event  # of long ago

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        if not self._left_out("wait"):
            super().wait(stream, event)

    def keep(self, tensor: torch.Tensor, stream: HostStream) -> None:
        if not self._left_out("keep"):
            super().keep(tensor, stream)

    def synchronize(self, event: HostEvent) -> None:
        if not self._left_out("synchronize"):
            super().synchronize(event)


class Switch(torch.autograd.Function):
    """Backward goes on on another stream of operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: HostTransfers) -> torch.Tensor:
        ctx.device = device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        device, other = ctx.device, ctx.device.other()
        HostTransfers.wait(device, other, HostTransfers.record(device, device.current()))
        device._current = other
        return grad, None


def steps(device: HostTransfers) -> None:
    """Copies that are slow for the limits, and buffers that go round."""
    expected = gradients("transformer")
    context = hs.offload_activations(**{**ALL, "in_flight_bytes": 1500}, transfers=device)
    for _ in range(2):
        assert_same(gradients("transformer", lambda: context), expected)


def dropped(device: HostTransfers) -> None:
    """Graphs that go while copies are under way: to the host, and back."""
    model = transformer()
    for _ in range(3):
        with hs.offload_activations(**ALL, transfers=device):
            loss = plain(model, tokens())
        del loss
        with hs.offload_activations(**ALL, transfers=device):
            loss = plain(model, tokens())
        torch.autograd.grad(loss, list(model[-1].parameters()))
        del loss


def streams(device: HostTransfers) -> None:
    """Backward that changes streams midway, and a forward beside it on a third."""
    model, x = transformer(), tokens()
    expected = torch.autograd.grad(plain(model, x), list(model.parameters()))
    first = device.current()
    for _ in range(2):
        with hs.offload_activations(**{**ALL, "in_flight_bytes": 1500}, transfers=device):
            y = model[1:](Switch.apply(model[0](x), device)).square().mean()
        ours = torch.autograd.grad(y, list(model.parameters()))
        assert_same(dict(enumerate(ours)), dict(enumerate(expected)))
        del y
        device._current = device.other()
    device._current = first


def beside(device: HostTransfers) -> None:
    """Backward on a stream that has waited for the forward, but not for what another forward made it wait for since."""
    model, x, other = transformer(layers=1), tokens().requires_grad_(), device.other()
    expected = torch.autograd.grad(plain(model, x), list(model.parameters()))
    with hs.offload_activations(**{**ALL, "in_flight_bytes": 0}, transfers=device):
        loss = plain(model, x)
        HostTransfers.wait(device, other, HostTransfers.record(device, device.current()))
        result = x.exp()  # which is saved
        assert result.requires_grad
    with device.on(other):
        ours = torch.autograd.grad(loss, list(model.parameters()))
        assert_same(dict(enumerate(ours)), dict(enumerate(expected)))


def other_lengths(device: HostTransfers) -> None:
    """Buffers that nothing fits any longer go, while a copy writes them."""
    for n in (9000, 5000, 7000):
        source = device.empty(n)
        HostTransfers.wait(device, device.outgoing, HostTransfers.record(device, device.current()))
        buffer = device.buffers.take(n, device.outgoing)
        device.copy_(device.outgoing, buffer.memory, source)
        HostTransfers.keep(device, source, device.outgoing)
        device.buffers.give(buffer, HostTransfers.record(device, device.outgoing))
        del source, buffer


SCENARIOS: list[Callable[[HostTransfers], None]] = [steps, dropped, streams, beside, other_lengths]


def run(scenario: Callable[[HostTransfers], None], forgets: Site | None, seed: int) -> Forgetful:
    device = Forgetful(forgets, seed)
    torch.manual_seed(0)
    with device.watch():
        scenario(device)
    device.finish()
    return device


def test_with_every_wait_all_is_right_and_all_are_reached() -> None:
    asked = set[Site]()
    for seed in range(5):
        for scenario in SCENARIOS:
            asked |= run(scenario, None, seed).asked
    assert sorted(set(sites()) - asked) == []
    assert len(sites()) >= 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is raised while objects are freed
@pytest.mark.parametrize("site", sites(), ids=lambda site: "-".join(map(str, site)))
def test_each_is_needed(site: Site) -> None:
    for seed in range(5):
        for scenario in SCENARIOS:
            try:
                run(scenario, site, seed)
            except (AssertionError, RuntimeError):
                return
    pytest.fail(f"nothing sees that {site} is left out")
