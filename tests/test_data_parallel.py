"""torch's data-parallel wrappers on one rank: DDP's gradients in one buffer, ZeroRedundancyOptimizer around ours.

ZeroRedundancyOptimizer sorts the parameters by size and, on loading, writes the states past our load_state_dict().
Guards: a gradient that is a view and read as if it were not, states that end up with another parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16
from loops import assert_same_tree, loss_of, tiny_model
from optimizer_runs import saved_and_loaded
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

LR = 1e-2
MASTERS: dict[str, dict[str, Any]] = {"master": {}, "split": {"master": "split"}}
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    # What torch.distributed.optim does when it is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
    for t in which:
        loss_of(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: {"weight": p.detach(), **optimizer.state[p]} for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.25}, {"master": "split"}], ids=["clipped", "split"])
@pytest.mark.parametrize("ddp", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=["views", "static"])
def test_ddp_gives_the_bits_of_a_plain_model(ddp: dict[str, Any], options: dict[str, Any]) -> None:
    model, plain = tiny_model(BFLOAT16), tiny_model(BFLOAT16)
    wrapped = DistributedDataParallel(model, **ddp)
    optimizer, other = (hs.AdamW(m.parameters(), lr=LR, **options) for m in (model, plain))
    steps(wrapped, optimizer, range(4))
    steps(plain, other, range(4))
    assert_same_tree(by_parameter(model, optimizer), by_parameter(plain, other))


def sharded(model: nn.Module, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=hs.AdamW, lr=LR, **options)


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("views", [False, True])
def test_zero_gives_the_bits_of_a_plain_optimizer(options: dict[str, Any], views: bool) -> None:
    """Also where it moves all weights into one buffer, and under a schedule."""
    model, plain = tiny_model(BFLOAT16), tiny_model(BFLOAT16)
    optimizer = sharded(model, parameters_as_bucket_view=views, **options)
    other = hs.AdamW(plain.parameters(), lr=LR, **options)
    for m, o in ((model, optimizer), (plain, other)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5)
        for t in range(4):
            steps(m, o, range(t, t + 1))
            schedule.step()
    assert_same_tree(by_parameter(model, optimizer.optim), by_parameter(plain, other))


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_a_resumed_zero_run_is_the_run(options: dict[str, Any]) -> None:
    model, again = tiny_model(BFLOAT16), tiny_model(BFLOAT16)
    optimizer, resumed = sharded(model, **options), sharded(again, **options)
    steps(model, optimizer, range(3))
    optimizer.consolidate_state_dict()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    steps(model, optimizer, range(3, 6))
    steps(again, resumed, range(3, 6))
    assert_same_tree(by_parameter(again, resumed.optim), by_parameter(model, optimizer.optim))
