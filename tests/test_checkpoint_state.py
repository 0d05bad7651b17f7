"""What a block holds besides its arguments: buffers change once, and a recomputation sees what the forward saw.

Guards: batch statistics counted twice (torch's checkpoint does), a spectral norm that has moved on by the time of the
recomputation, parameters of torch.func.functional_call replaced by the module's own, a step before backward.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpointed import POLICIES, assert_same_run, inputs, keep_all, run, stack
from torch import Tensor, nn

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")
CHANNELS = 5


class Residual(nn.Module):
    """A convolutional block around something that holds buffers."""

    def __init__(self, inner: Callable[[], nn.Module]):
        super().__init__()
        self.first, self.inner = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), inner()
        self.last = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.relu(self.inner(self.first(x))))


class MovingMean(nn.Module):
    """Subtracts a mean that each forward moves, in place or not: unlike batch statistics, it decides the result."""

    def __init__(self, in_place: bool = True):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("scale", torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        out = (x - self.mean[:, None]) * self.scale[:, None]
        new = self.mean.lerp(x.detach().mean((0, 2)), 0.1)
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return out.sin()


class Sharing(MovingMean):
    """Reads the moved mean through another module that has the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Module()
        self.other.register_buffer("mean", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x * self.other.mean.clone()[:, None]).sin()


class OwnBatchNorm(nn.Module):
    """Batch normalisation whose buffers torch writes to without counting it, and without a count of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("var", torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, self.mean, self.var, training=True)


INNER: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(CHANNELS),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(CHANNELS, momentum=None),
    "InstanceNorm": lambda: nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True),
    "own": OwnBatchNorm,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv1d(CHANNELS, CHANNELS, 1)),
    "moving mean": MovingMean,
    "moving mean of two modules": Sharing,
    "moving mean, exchanged": lambda: MovingMean(in_place=False),
}


def pair(inner: str, policy: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual(INNER[inner]) for _ in range(2)))
    model = copy.deepcopy(plain)
    hs.checkpoint(model, policy)
    return model, plain


@pytest.mark.parametrize("policy", ["layer", "selective", keep_all])
@pytest.mark.parametrize("inner", INNER)
def test_buffers_change_once(inner: str, policy: Any) -> None:
    model, plain = pair(inner, policy)
    for seed in range(2):
        assert_same_run(run(model, inputs(seed=seed)), run(plain, inputs(seed=seed)))
    for m in (model, plain):  # two forwards, then one backward through both
        m.zero_grad()
        (m(inputs(seed=3)) + m(inputs(seed=4))).square().sum().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)
    for training in (False, True):
        model.train(training)
        plain.train(training)
        assert_same_run(run(model, inputs(seed=5)), run(plain, inputs(seed=5)))


@pytest.mark.parametrize("inner", ["BatchNorm", "BatchNorm, cumulative", "InstanceNorm"])
def test_an_overflow_in_the_batch_is_counted_once_too(inner: str) -> None:
    model, plain = pair(inner, "layer")
    x = inputs()
    with torch.no_grad():
        x[0, 0, 0] = torch.inf
    assert_same_run(run(model, x), run(plain, x))
    assert_same_run(run(model, inputs()), run(plain, inputs()))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_backward_sees_the_forward_s_buffers(policy: str) -> None:
    model, plain = pair("moving mean", POLICIES[policy]())
    found = []
    for m in (model, plain):
        x = inputs()
        out = m(x).square().sum()
        first = torch.autograd.grad(out, [x, *m.parameters()], retain_graph=True)
        m(inputs(seed=9))
        found.append([*first, *torch.autograd.grad(out, [x, *m.parameters()]), *m.buffers()])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_buffers_that_do_not_change_are_not_copied() -> None:
    """Masks and tables may be large: they are copied for the first forward alone."""
    model, _ = pair("moving mean", "layer")
    model.eval()
    tables = [module for module in model.modules() if isinstance(module, MovingMean)]
    for module in tables:
        module.register_buffer("table", torch.zeros(1000))
        module.forward = lambda x, module=module: x + module.table[0]
    hs.checkpoint(model)
    copied: list[int] = []

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.clone.default:
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Copies():
        model(inputs()).sum().backward()
        assert copied.count(1000) == 2
        model(inputs()).sum().backward()
    assert copied.count(1000) == 2


class Restless(nn.Module):
    """Writes to a buffer in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(()))
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        if self.times % 2 == 0:
            self.codes.add_(1)
        return x.sin() + self.codes


def test_a_buffer_that_begins_to_change_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(Restless), Residual(Restless))
    hs.checkpoint(model)
    model(inputs()).sum()  # nothing is recomputed, so the next forward is the second one
    with pytest.raises(RuntimeError, match=r"forward of Residual changed its buffer 'inner\.codes', which its first"):
        model(inputs())


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_call_is_recomputed_with_its_parameters(policy: str) -> None:
    model, plain = pair("moving mean", POLICIES[policy]())
    given = {name: (p.detach() * 1.5).requires_grad_() for name, p in plain.named_parameters()}
    found = []
    for m in (model, plain):
        buffers = {name: b + 0.5 for name, b in plain.named_buffers()}
        out = torch.func.functional_call(m, (given, buffers), (inputs(),))
        found.append([*torch.autograd.grad(out.square().sum(), list(given.values())), *buffers.values()])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_a_parameter_written_between_forward_and_backward_is_refused(policy: str) -> None:
    """Where torch's checkpoint computes another gradient in silence, and no checkpoint raises an error."""
    model, x = stack(), inputs()
    hs.checkpoint(model, policy)
    loss = model(x).sum()
    with torch.no_grad():
        model.blocks[1].mlp[0].weight.mul_(2)
    message = re.escape(
        "the parameter 'mlp.0.weight' of a checkpointed Block was written to between its forward and its backward, so "
        "its activations cannot be computed again as they were: run backward before optimizer.step() or whatever else "
        "writes to it (DistributedDataParallel writes to buffers before each forward, unless broadcast_buffers=False)"
    )
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    model(x).sum().backward()


def test_a_buffer_written_between_forward_and_backward_is_refused() -> None:
    model, _ = pair("BatchNorm", "layer")
    model[0].first.register_buffer("table", torch.zeros(3))
    loss = model(inputs()).sum()
    model[0].first.table.add_(1)
    with pytest.raises(RuntimeError, match=r"the buffer 'first\.table' of a checkpointed Residual was written to"):
        loss.backward()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(16))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return (x * self.scale).sin() + shift + self.table


def test_tensors_of_inference_mode() -> None:
    """They have no count of writes and cannot be saved: a buffer, an argument."""
    model = nn.ModuleList([Shifted(), Shifted()])
    with torch.inference_mode():
        shift = torch.ones(16)

    def forward(x: Tensor) -> Tensor:
        return model[1](model[0](x, shift), shift=shift)

    plain = run(model, inputs(), forward)
    hs.checkpoint(model, keep_all)
    assert_same_run(run(model, inputs(), forward), plain)
