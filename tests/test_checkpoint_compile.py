"""`hs.checkpoint` under torch.compile: one graph, whose partitioner recomputes; and where the graph breaks.

Guards: products that are kept in spite of the policy, or computed again in spite of it; batch statistics counted twice,
or other random numbers, in a block that torch.compile leaves to Python.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpointed import WIDTH, assert_same_run, inputs, keep_all, run
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import flex_attention

import halfstep as hs

pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo asks
]


@pytest.fixture
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, debug: Any, pair: tuple[Tensor, ...]) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(F.layer_norm(x, [WIDTH])))), 0.3) * pair[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, debug=True, pair=(x.sigmoid(),))
        return x


@pytest.mark.parametrize(("policy", "products"), [("layer", 12), ("selective", 8)])
def test_the_partitioner_does_what_the_policy_says(policy: Any, products: int) -> None:
    """Eight products for gradients, and those of the forward again or not."""
    counts: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum(node.op == "call_function" and "mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    model = Model()
    plain = run(model, inputs())
    hs.checkpoint(model, policy)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    assert_same_run(run(model, inputs(), torch.compile(model, backend=backend, fullgraph=True)), plain)
    assert counts == [4, products]


class Convolution(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.first, self.norm, self.last = nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + F.dropout(self.last(y), 0.3)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "broken"])
@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_batch_statistics_and_dropout(policy: Any, breaks: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Convolution(breaks), Convolution(breaks))
    model = copy.deepcopy(plain)
    hs.checkpoint(model, policy)
    expected = run(plain, inputs())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=not breaks)
    assert_same_run(run(model, inputs(), compiled), expected)
    if breaks:  # what is left to Python goes through a graph as often as without torch.compile
        loss = compiled(inputs()).sum()
        first, again = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, again))


def test_blocks_that_are_compiled_one_by_one() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = run(model, inputs())
    hs.checkpoint(model, "selective")
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_same_run(run(model, inputs()), plain)


class Curve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * x


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_compiled_parts_of_a_block_stay_compiled(policy: Any) -> None:
    called: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def forward(*args: Any) -> Any:
            called.append(1)
            return graph.forward(*args)

        return forward

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Curve(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    plain = run(model, inputs())
    hs.checkpoint(model, policy)
    for block in blocks:
        block[0].compile(backend=backend)  # torch's own layers are not traced: dynamo looks into what they call
        block[1].compile(backend=backend)
    assert_same_run(run(model, inputs()), plain)
    assert len(called) == 4, "in forward and recomputation"
    assert torch._dynamo.utils.counters["frames"]["total"] == 1, "nothing of the checkpoint is traced"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("policy", ["selective", "all"])
def test_flex_attention(policy: Any) -> None:
    """An operator that takes a function. On CPUs it has no gradient."""

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            heads = x.detach()[:, None]
            return self.linear(x) * flex_attention(heads, heads, heads)[:, 0]

    torch.manual_seed(0)
    model = nn.Sequential(Flex(), Flex())
    plain = run(model, inputs())
    hs.checkpoint(model, keep_all if policy == "all" else policy)
    assert_same_run(run(model, inputs()), plain)
