"""What moves, how often, and for how long: each storage once, only what nobody else holds, until nobody needs it.

Guards: parameters that travel, a view that takes a whole data set along, a storage taken for another at its address,
old contents for new ones, buffers and device memory that are never given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import CASES, gradients, offloaded
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")


def saved_storages(name: str) -> dict[int, int]:
    """Bytes of what autograd saves in a case, by storage, without parameters and the input."""
    held: list[Tensor] = []

    def hold(tensor: Tensor) -> Tensor:
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not parameter and not (tensor.is_leaf and tensor.requires_grad):
            held.append(tensor)
        return tensor

    gradients(name, lambda: torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.numel()}


@pytest.mark.parametrize("name", ["transformer", "dropout", "autocast", "images"])
def test_every_storage_moves_once_and_comes_back_once(name: str) -> None:
    context, device = offloaded()
    make, inputs, loss_of = CASES[name]
    torch.manual_seed(0)
    model, x = make(), inputs().requires_grad_()
    with context:
        loss = loss_of(model, x)
    expected = saved_storages(name)
    assert (context.bytes, context.storages) == (sum(expected.values()), len(expected))
    assert context.tensors >= len(expected)
    assert device.buffers.used_bytes == context.bytes
    device.finish()
    assert context.in_flight_bytes == 0
    assert context.fetched_bytes == 0
    loss.backward()
    assert context.fetched_bytes == context.bytes
    assert device.buffers.used_bytes == 0


def test_views_of_one_storage_share_a_copy() -> None:
    context, _ = offloaded()
    x = torch.randn(4, 6, requires_grad=True)
    with context:
        y = x.exp()
        loss = sum((y[:, i] * y.t()[i + 1]).sum() for i in range(5)) + y.exp().sum()
    loss.backward()
    assert (context.storages, context.bytes) == (2, 2 * y.nbytes)  # y and its exp
    assert context.tensors == 12
    assert context.fetched_bytes <= context.bytes


WEIGHT = nn.Parameter(torch.randn(32, 32))
FROZEN = nn.Parameter(torch.randn(32, 32), requires_grad=False)
LEAF = torch.randn(32, 32, requires_grad=True)
DATA = torch.randn(4096, 32)
SAVED: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "a parameter": (lambda: WEIGHT * 2.0 @ WEIGHT, {"parameters": 1}),
    "a view of one": (lambda: LEAF @ WEIGHT.t()[:, :16].detach().requires_grad_(), {"held by others": 2}),
    "a transposed one": (lambda: (LEAF * 1) * FROZEN.t(), {"parameters": 1}),
    "a leaf": (lambda: LEAF.exp() * LEAF, {"held by others": 1}),
    "a part of something large": (lambda: LEAF * DATA[64:96], {"parts of something large": 1}),
    "nothing": (lambda: LEAF[:0] * DATA[:0], {"parts of something large": 1}),
    "something small": (lambda: LEAF[0, :4] * torch.ones(4), {"small": 1}),
    "an inference tensor": (lambda: LEAF * inference(), {}),
    "sparse": (lambda: torch.sparse.mm(torch.eye(32).to_sparse(), LEAF), {"of other kinds": 1}),
    "a subclass": (lambda: LEAF * torch.ones(32, 32).as_subclass(Named), {"of other kinds": 1}),
    "a fake one": (lambda: fake(), {"of other kinds": 1}),
    "on another device": (lambda: LEAF.to("meta") * torch.ones(32, 32, device="meta"), {"on other devices": 1}),
}


class Named(Tensor):
    pass


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(32, 32, requires_grad=True).exp()


def inference() -> Tensor:
    with torch.inference_mode():
        made = torch.ones(32, 32)
    return made.clone()


@pytest.mark.parametrize("name", SAVED)
def test_what_stays(name: str) -> None:
    operators, stayed = SAVED[name]
    context, _ = offloaded(min_bytes=1024)
    with context:
        operators()
    assert {why: context.stayed[why] for why in stayed} == stayed
    assert context.bytes <= 2 * 4096, "at most two results"


@pytest.mark.parametrize(("nbytes", "moves"), [(4096, True), (4097, False)])
def test_min_bytes_is_of_the_storage(nbytes: int, moves: bool) -> None:
    context, _ = offloaded(min_bytes=nbytes)
    x = torch.randn(32, 32, requires_grad=True)
    with context:
        (x * 1)[:, 0] * torch.ones(32).requires_grad_()
    assert (context.storages == 1) is moves


@pytest.mark.parametrize("keep", [0, 4096, 3 * 4096])
def test_the_last_ones_stay(keep: int) -> None:
    context, device = offloaded(keep_last_bytes=keep)
    x = torch.randn(32, 32, requires_grad=True)
    with context:
        y = x.sin().exp().exp().exp()  # saves x and three results
    assert context.bytes == 3 * 4096 - keep
    assert device.buffers.used_bytes == context.bytes
    y.sum().backward()
    assert context.fetched_bytes <= context.bytes


def test_not_more_is_in_flight_than_allowed() -> None:
    for seed in range(10):
        context, _ = offloaded(seed, in_flight_bytes=2 * 4096)
        x = torch.randn(32, 32, requires_grad=True)
        with context:
            y = x
            for _ in range(10):
                y = y.exp().sin()
        assert context.peak_in_flight_bytes <= 2 * 4096
        y.sum().backward()


# ---- contents ------------------------------------------------------------------------------------------------------
def test_a_storage_written_between_two_saves_is_two_contents() -> None:
    first, second = (torch.ones(8, requires_grad=True) for _ in range(2))
    context, _ = offloaded()
    with context:
        x = torch.full((8,), 2.0)
        a = first * x
        x.add_(1)
        b = second * x
    assert (context.storages, context.bytes) == (2, 2 * x.nbytes)
    b.sum().backward()
    assert second.grad is not None
    assert second.grad.tolist() == [3.0] * 8
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.sum().backward()


@pytest.mark.parametrize("options", [{}, {"keep_last_bytes": 10**6}, {"min_bytes": 10**6}], ids=str)
def test_what_was_written_in_place_is_refused_as_torch_does(options: dict[str, Any]) -> None:
    x = torch.randn(8, requires_grad=True)
    context, device = offloaded(**options)
    with context:
        y = x.exp()
        loss = y.sum()
    device.finish()
    y.mul_(2)
    expected = (
        r"modified by an inplace operation: a torch.float32 tensor saved inside offload_activations is at version 1"
    )
    with pytest.raises(RuntimeError, match=expected + "; expected version 0 instead.*clone"):
        loss.backward()


def test_an_address_that_is_used_again_is_no_storage() -> None:
    context, device = offloaded()
    weights, values = [], []
    with context:
        loss = torch.zeros(())
        for i in range(50):
            x = torch.full((1000,), float(i))
            weights.append(torch.ones(1000, requires_grad=True))
            values.append(x.data_ptr())
            loss = loss + (weights[-1] * x).sum()
            del x
            assert context.in_flight_bytes >= 0  # lets go
    assert len(set(values)) < len(values), "the allocator gives memory again"
    device.finish()
    loss.backward()
    assert [w.grad[0].item() for w in weights] == list(range(50))


def test_what_it_says() -> None:
    context, device = offloaded(min_bytes=200)
    with context:
        x = torch.ones(100, requires_grad=True)
        y = x.exp() * torch.ones(2, 1)
    device.finish()
    y.sum().backward()
    assert str(context) == (
        "400 bytes moved to the host (storages: 1, saved tensors: 1); 400 came back; at most 400 in flight; "
        "stayed: small (1)"
    )
    assert str(hs.offload_activations()) == "nothing moved; stayed: none"
