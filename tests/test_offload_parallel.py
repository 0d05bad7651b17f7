"""offload_activations below torch's data-parallel wrappers, on one rank: their parameters stay, the bits too.

Guards: the memory of gathered weights, which FSDP2 frees and fills again, copied or taken for activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from offload_cases import Block, offloaded, plain, tokens, transformer
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_rank", "one_thread")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, **options: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_kept(model: nn.Module) -> nn.Module:
    return fsdp2(model, reshard_after_forward=False)


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return transformer(), tokens()


@pytest.mark.parametrize("wrap", [ddp, fsdp2, fsdp2_kept])
def test_wrapped_models_move_what_plain_ones_do(wrap) -> None:
    model, x = made()
    unwrapped, _ = offloaded()
    with unwrapped:
        loss = plain(model, x)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    model, x = made()
    wrapped = wrap(model)
    context, device = offloaded()
    for _ in range(2):
        with context:
            loss = plain(wrapped, x)
        loss.backward()
        ours = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        assert all(map(torch.equal, ours, expected))
        wrapped.zero_grad()
    assert context.bytes == 2 * unwrapped.bytes
    assert context.stayed["parameters"] == 2 * unwrapped.stayed["parameters"] > 0
    device.finish()
    assert device.buffers.used_bytes == 0
