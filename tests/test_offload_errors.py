"""What offload_activations refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import offloaded
from torch import Tensor, nn

import halfstep as hs
from halfstep.ops import devices

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = ["min_bytes", "keep_last_bytes", "prefetch_bytes", "in_flight_bytes"]


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (0, ValueError), (1.5, ValueError), ("1 megabyte", ValueError), (True, TypeError),
     (None, TypeError), (nn.Linear(1, 1), TypeError)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_bytes(name: str, value: Any, error: type[Exception]) -> None:
    if value == 0 and value is not False and name != "min_bytes":
        hs.offload_activations(**{name: value})
        return
    got = "Linear" if isinstance(value, nn.Module) else repr(value)
    with pytest.raises(error, match=rf'{name} must be a number of bytes, at least [01], .*"1.5GiB".*; got {got}'):
        hs.offload_activations(**{name: value})


def test_numbers_of_bytes_with_units() -> None:
    context = hs.offload_activations("2kB", keep_last_bytes="0B", prefetch_bytes="1.5KiB", in_flight_bytes="1 MB")
    assert context._min_bytes == 2000
    limits = context._limits
    assert (limits.keep_last, limits.prefetch, limits.in_flight) == (0, 1536, 1_000_000)


def test_entered_twice() -> None:
    context = hs.offload_activations()
    with context, pytest.raises(RuntimeError, match="open already; make another one"), context:
        pass
    with context:
        pass


def test_inside_a_checkpointed_block() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with hs.offload_activations():
                return x.exp()

    model = nn.Sequential(Inner())
    hs.checkpoint(model, blocks=lambda name, module: isinstance(module, Inner))
    with pytest.raises(RuntimeError, match=r"inside a block that checkpoint recomputes.*put it around the model"):
        model(torch.ones(2, requires_grad=True))


def test_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = offloaded()
    x = torch.ones(8, requires_grad=True)
    with context:
        y = x.exp()
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"a CUDA graph is being captured.*without it"):
        y.sum().backward()
    with context, pytest.raises(RuntimeError, match=r"a CUDA graph is being captured.*without it"):
        x.exp()
