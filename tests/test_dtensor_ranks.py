"""What one rank of several holds and does: its place in the whole decides the random words; no norm without the others.

The process group is torch's fake one, whose collectives do nothing: this process is rank 1 of 2.
"""

from __future__ import annotations

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, NARROW, ordinary
from bits import assert_same_bits
from torch import distributed
from torch.nn import Parameter

import halfstep as hs
from halfstep.shards import first_index, ranks

if not distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

UNCHECKED = {"skip_nonfinite": False}


@pytest.fixture(scope="module")
def mesh():
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def second_half(whole: torch.Tensor, mesh, dim: int = 0) -> DTensor:
    """This rank's part of a tensor in two shards, the first of which is the larger one."""
    cut = (whole.shape[dim] + 1) // 2
    part = whole.narrow(dim, cut, whole.shape[dim] - cut).contiguous()
    return DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


@pytest.mark.parametrize("shape", [(7, 4), (2,), (5,), (1, 3), (6, 2, 5)], ids=str)
def test_where_the_local_elements_begin(mesh, shape):
    whole = torch.arange(torch.Size(shape).numel()).float().view(shape)
    part = second_half(whole, mesh)
    local = part.to_local()
    assert ranks(part) == 2
    if local.numel():
        assert first_index(part) == local.reshape(-1)[0]
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    assert first_index(replicated) == first_index(whole) == 0


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(7, 4), (5,), (1, 3)], ids=str)
@pytest.mark.parametrize("state_dtype", [FLOAT32, BFLOAT16])
def test_stochastic_rounding_does_not_depend_on_the_sharding(mesh, dtype, shape, state_dtype):
    """The rows of a run on one rank; the rank with nothing of a parameter takes part without harm."""
    options = {"master": None, "stochastic_rounding": True, "state_dtype": state_dtype, "seed": 7, **UNCHECKED}
    values = ordinary(shape, dtype, 0)
    whole, part = Parameter(values.clone()), Parameter(second_half(values, mesh))
    optimizers = hs.AdamW([whole], **options), hs.AdamW([part], **options)
    for t in range(1, 4):
        grad = ordinary(shape, dtype, t)
        whole.grad, part.grad = grad, second_half(grad, mesh)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(part.to_local().detach(), second_half(whole.detach(), mesh).to_local(), "weight")
        for key in ("exp_avg", "exp_avg_sq"):
            got, expected = optimizers[1].state[part][key], optimizers[0].state[whole][key]
            assert got.shape == whole.shape
            assert_same_bits(got.to_local(), second_half(expected, mesh).to_local(), key)


def test_stochastic_rounding_needs_one_run_of_elements(mesh):
    part = Parameter(second_half(ordinary((4, 6), BFLOAT16, 0), mesh, dim=1))
    message = "parameter group 0, parameter 0: stochastic rounding of a DTensor needs it sharded on dimension 0 only"
    with pytest.raises(ValueError, match=message):
        hs.AdamW([part], state_dtype=BFLOAT16)
    with pytest.raises(ValueError, match=message):
        hs.AdamW([part], master=None, stochastic_rounding=True)
    hs.AdamW([part])


@pytest.mark.parametrize(
    "options", [{"skip_nonfinite": True}, {"max_grad_norm": 1.0}, {"skip_nonfinite": None}], ids=str
)
def test_a_norm_or_an_overflow_over_ranks_is_refused(mesh, options):
    """Each rank alone would decide otherwise than the others: the ranks would drift apart in silence."""
    part = Parameter(second_half(ordinary((4, 6), BFLOAT16, 0), mesh))
    before = part.to_local().detach().clone()
    part.grad = torch.ones_like(part)
    optimizer = hs.AdamW([part], **options)
    with pytest.raises(RuntimeError, match="cannot reduce the gradient norm and the overflow flag over the ranks"):
        optimizer.step()
    assert_same_bits(part.to_local().detach(), before, "weight")


def test_a_scaler_over_ranks_is_refused(mesh):
    part = Parameter(second_half(ordinary((4, 6), BFLOAT16, 0), mesh))
    part.grad = torch.ones_like(part)
    optimizer = hs.AdamW([part], **UNCHECKED)
    with pytest.raises(RuntimeError, match="cannot reduce the gradient norm and the overflow flag over the ranks"):
        hs.LossScaler().step(optimizer)
    message = "cannot share the overflow flag between the ranks of a DTensor mesh"
    with pytest.raises(RuntimeError, match=message):
        hs.LossScaler().unscale_(optimizer)
    with pytest.raises(RuntimeError, match=message):
        hs.LossScaler().step(torch.optim.SGD([part]))
    assert (part.grad.to_local() == 1).all()
