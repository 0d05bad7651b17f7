"""DTensor parameters on a mesh of one rank: states of the parameter's kind, the bits of plain ones, checkpoints."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_same_bits
from optimizer_runs import parameters
from torch import distributed
from torch.nn import Parameter

import halfstep as hs
from halfstep.reference import round_to, split_master

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPE = (6, 4)
MODES = {
    "master": {},
    "split": {"master": "split"},
    "amsgrad": {"amsgrad": True, "max_grad_norm": 0.5},
    "bfloat16 states": {"state_dtype": BFLOAT16},
    "stochastic": {"master": None, "stochastic_rounding": True, "seed": 3},
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def pair(mesh, placement, dtype=BFLOAT16, **options) -> tuple[hs.AdamW, hs.AdamW]:
    """An optimizer of a plain parameter and one of the same parameter as a DTensor."""
    values = ordinary(SHAPE, dtype, 0)
    whole = Parameter(values.clone())
    sharded = Parameter(distribute_tensor(values.clone(), mesh, [placement]))
    return hs.AdamW([whole], **options), hs.AdamW([sharded], **options)


def param(optimizer: hs.AdamW) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0]


def step(optimizer: hs.AdamW, t: int) -> None:
    p = param(optimizer)
    grad = ordinary(SHAPE, p.dtype, t)
    p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    optimizer.step()


def assert_same_run(whole: hs.AdamW, sharded: hs.AdamW) -> None:
    p, q = param(whole), param(sharded)
    assert_same_bits(q.to_local().detach(), p.detach(), "weight")
    assert sharded.state[q].keys() == whole.state[p].keys()
    for key, value in whole.state[p].items():
        state = sharded.state[q][key]
        if key != "step":
            assert isinstance(state, DTensor), key
            assert (state.placements, state.dtype) == (q.placements, value.dtype)
            state = state.to_local()
        assert_same_bits(state, value, key)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_the_bits_are_those_of_a_plain_parameter(mesh, placement, options):
    whole, sharded = pair(mesh, placement, **options)
    for t in range(1, 4):
        step(whole, t)
        step(sharded, t)
        assert_same_run(whole, sharded)
    assert_same_bits(sharded.grad_norm, whole.grad_norm, "norm")


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_copies_go_on_with_the_same_bits(mesh, options, how):
    """A master that is a DTensor is recognised as the weight's."""
    _, optimizer = pair(mesh, Shard(0), **options)
    step(optimizer, 1)
    if how == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = hs.AdamW([Parameter(param(optimizer).detach().clone())], **options)
        other.load_state_dict(optimizer.state_dict())
    assert all(isinstance(v, DTensor) for k, v in other.state[param(other)].items() if k != "step")
    whole, _ = pair(mesh, Shard(0), **options)
    step(whole, 1)
    step(whole, 2)
    step(other, 2)
    assert_same_run(whole, other)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("then", [{}, {"master": "split"}], ids=["master", "split"])
def test_a_large_master_is_taken_piece_by_piece(mesh, then, placement):
    """From the local parts, which may not all lie in one piece."""
    values = ordinary((211, 307), FLOAT32, 0)
    weight, remainder = split_master(values)
    for key, saved in (("remainder", remainder), ("master", values)):
        shown = round_to(values, BFLOAT16) if key == "master" else weight
        part = Parameter(distribute_tensor(shown.clone(), mesh, [placement]))
        optimizer = hs.AdamW([part], **then)
        state = {"step": torch.tensor(1.0), key: DTensor.from_local(saved, mesh, [placement])}  # gloo moves no int16
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
        held = optimizer.state[part]
        if then:
            assert_same_bits(held["remainder"].to_local(), remainder, "remainder")
            assert_same_bits(part.to_local().detach(), weight, "weight")
        else:
            assert_same_bits(held["master"].to_local(), values, "master")
            assert_same_bits(part.to_local().detach(), round_to(values, BFLOAT16), "weight")


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=["master", "split"])
def test_refresh_and_healing(mesh, options):
    whole, sharded = pair(mesh, Shard(0), **options)
    for optimizer in (whole, sharded):
        step(optimizer, 1)
        with torch.no_grad():
            param(optimizer).zero_()
        optimizer.refresh_masters()
        step(optimizer, 2)
    assert_same_run(whole, sharded)
    if not options:
        for optimizer in (whole, sharded):
            with torch.no_grad():
                param(optimizer).fill_(3.0)
            with pytest.warns(RuntimeWarning, match="24 weights were written"):
                step(optimizer, 3)
        assert_same_run(whole, sharded)


def test_other_local_memory_is_noticed(mesh):
    """FSDP replaces a parameter's local tensor (a load with assign=True, a move); the old one must not be updated."""
    whole, sharded = pair(mesh, Shard(0))
    step(whole, 1)
    step(sharded, 1)
    param(sharded)._local_tensor = param(sharded)._local_tensor.clone()
    step(whole, 2)
    step(sharded, 2)
    assert_same_run(whole, sharded)


@pytest.mark.parametrize("into", ["a DTensor", "a plain tensor"])
def test_a_checkpoint_of_the_other_kind_is_refused(mesh, into):
    """Copied into a shard of the same shape it would be silently wrong."""
    whole, sharded = pair(mesh, Shard(0))
    step(whole, 1)
    step(sharded, 1)
    target, source = (sharded, whole) if into == "a DTensor" else (whole, sharded)
    message = f"parameter 0 of group 0 (shape (6, 4), torch.bfloat16) is {into} but the saved exp_avg is"
    with pytest.raises(ValueError, match=re.escape(message)):
        target.load_state_dict(source.state_dict())


def test_plain_and_sharded_parameters_in_one_optimizer(mesh):
    whole, sharded = pair(mesh, Shard(0))
    both = hs.AdamW([Parameter(param(whole).detach().clone()), param(sharded)])
    plain, part = both.param_groups[0]["params"]
    grad = ordinary(SHAPE, BFLOAT16, 1)
    plain.grad, part.grad = grad.clone(), distribute_tensor(grad, mesh, [Shard(0)])
    both.step()
    assert_same_bits(part.to_local().detach(), plain.detach(), "weight")


def test_lists_refuse_dtensors(mesh):
    sharded = distribute_tensor(ordinary(SHAPE, FLOAT32, 0), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"grads\[1\] is a DTensor; pass its local part"):
        hs.grad_stats([parameters(FLOAT32)[0].detach(), sharded])
    with pytest.raises(TypeError, match=r"tensors\[0\] is a DTensor; pass its local part"):
        hs.l2_norms([sharded])
    plain = ordinary(SHAPE, FLOAT32, 1)
    for call in (hs.cast_, hs.accumulate_):
        with pytest.raises(TypeError, match=r"dst_list\[1\] is a DTensor; pass its local part"):
            call([plain, sharded], [plain, sharded])
        with pytest.raises(TypeError, match=r"src_list\[0\] is a DTensor; pass its local part"):
            call([plain], [sharded])


def test_a_compiled_step_is_the_plain_one_between_graphs(mesh, fresh_dynamo):
    """A graph's operators take no DTensors."""
    plain, sharded = pair(mesh, Shard(0), max_grad_norm=0.5)
    call = torch.compile(lambda: sharded.step(), backend="aot_eager")
    for t in range(3):
        step(plain, t)
        p = param(sharded)
        p.grad = distribute_tensor(ordinary(SHAPE, p.dtype, t), mesh, [Shard(0)])
        call()
    assert_same_bits(param(sharded).to_local(), param(plain), "weight")
    assert_same_bits(sharded.grad_norm, plain.grad_norm, "norm")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="keeps books in Python here"):
        torch.compile(lambda: sharded.step(), backend="aot_eager", fullgraph=True)()
