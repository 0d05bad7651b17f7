"""What the optimizers refuse, and that every message names what came and what to do."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from optimizer_runs import assert_same, held, parameters, set_grads, train
from torch.nn import Parameter

import halfstep as hs

ARGUMENTS = [
    ({"lr": -1.0}, "parameter group 0: lr=-1.0: expected a finite number >= 0"),
    ({"lr": math.nan}, "parameter group 0: lr=nan: expected a finite number >= 0"),
    ({"lr": math.inf}, "parameter group 0: lr=inf: expected a finite number >= 0"),
    ({"lr": torch.tensor(-1.0)}, "parameter group 0: lr=-1.0: expected a finite number >= 0"),
    ({"lr": torch.ones(2)}, "parameter group 0: lr must have one element, got shape (2,)"),
    ({"eps": -1e-8}, "parameter group 0: eps=-1e-08: expected a finite number >= 0"),
    ({"weight_decay": -0.1}, "parameter group 0: weight_decay=-0.1: expected a finite number >= 0"),
    ({"betas": (0.9, 1.0)}, "parameter group 0: betas=(0.9, 1.0): expected two numbers in [0, 1)"),
    ({"betas": (-0.1, 0.9)}, "parameter group 0: betas=(-0.1, 0.9): expected two numbers in [0, 1)"),
    ({"betas": (0.9,)}, "parameter group 0: betas=(0.9,): expected two numbers in [0, 1)"),
    ({"state_dtype": FLOAT16}, "parameter group 0: state_dtype=torch.float16: this version has torch.float32 and"),
    ({"master": "fp16"}, "parameter group 0, parameter 0: master='fp16': expected 'auto', 'fp32', 'split' or None"),
    ({"differentiable": True}, "differentiable=True: the fused step has no gradient; use torch.optim for that"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0: expected None or a number >= 0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm=nan: expected None or a number >= 0"),
    ({"on_stale": "heal"}, "on_stale='heal': expected 'refresh' or 'ignore'"),
    ({"seed": -1}, "seed=-1: expected an integer from 0 to 2**32 - 1"),
    ({"seed": 2**32}, "seed=4294967296: expected an integer from 0 to 2**32 - 1"),
    ({"seed": 1.5}, "seed=1.5: expected an integer from 0 to 2**32 - 1"),
]


@pytest.mark.parametrize("cls", [hs.AdamW, hs.Adam])
@pytest.mark.parametrize(("options", "message"), ARGUMENTS, ids=[str(a) for a, _ in ARGUMENTS])
def test_bad_arguments(cls, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(parameters(BFLOAT16), **options)


@pytest.mark.parametrize("options", [{"seed": 0}, {"seed": 2**32 - 1}, {"max_grad_norm": 0}, {"lr": 0, "eps": 0}])
def test_the_bounds_themselves_are_allowed(options):
    train(hs.AdamW(parameters(BFLOAT16), **options), [1])


def sparse_gradient() -> None:
    table = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = hs.AdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def overlapping() -> None:
    buffer = torch.zeros(10)
    hs.AdamW([Parameter(buffer[:6]), Parameter(buffer[5:])])


TENSORS = [
    (lambda: hs.AdamW([Parameter(torch.zeros(3, dtype=torch.float64))]), TypeError,
     "parameter group 0, parameter 0: dtype torch.float64 of shape (3,) is not supported; use float32, bfloat16, "
     "float16"),
    (lambda: hs.AdamW([Parameter(torch.zeros(3, dtype=torch.complex64))]), TypeError, "dtype torch.complex64"),
    (lambda: hs.AdamW([Parameter(torch.zeros(3).to_sparse())]), TypeError,
     "parameter group 0, parameter 0: sparse layout torch.sparse_coo is not supported; pass a dense tensor"),
    (sparse_gradient, TypeError, "the gradient of parameter 0 of group 0 (shape (4, 3), torch.float32): sparse layout"),
    (lambda: hs.AdamW([Parameter(torch.zeros(1).expand(4))]), ValueError, "maps several elements to the same memory"),
    (overlapping, ValueError, "parameter 0 of group 0 (shape (6,), torch.float32) and parameter 1 of group 0 "
     "(shape (5,), torch.float32) share memory"),
    (lambda: hs.AdamW([Parameter(torch.zeros(3, dtype=FLOAT16))], master="split"), ValueError,
     "parameter group 0, parameter 0: master='split' keeps the lower half of a float32 under a bfloat16 weight; this "
     "is torch.float16. Use master='fp32' for it"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "error", "message"), TENSORS, ids=[m[:60] for _, _, m in TENSORS])
def test_tensors_that_are_refused(build, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build()


def test_every_parameter_is_checked_after_one_that_loses_updates():
    params = [*parameters(BFLOAT16, [(2,)]), Parameter(torch.zeros(3, dtype=torch.float64))]
    with (
        pytest.warns(UserWarning, match="are lost"),
        pytest.raises(TypeError, match=r"parameter group 0, parameter 1: dtype torch\.float64"),
    ):
        hs.AdamW(params, master=None)


@pytest.mark.parametrize(("name", "message"), [
    ("triton", "backend='triton' cannot run on cpu tensors: Triton has kernels for GPUs, not for cpu tensors"),
    ("cuda", "backend='cuda': expected None, 'native', 'triton' or 'reference'"),
])  # fmt: skip
def test_backends_that_are_not_there(name, message):
    optimizer = hs.AdamW(parameters(FLOAT32), backend=name)
    before = held(optimizer)
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        train(optimizer, [1])
    assert all(torch.equal(value, held(optimizer)[key]) for key, value in before.items())


# ---- groups, and memory that is shared -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_a_group_added_in_mid_run_starts_fresh(dtype):
    optimizer = hs.AdamW(parameters(BFLOAT16), lr=1e-2)
    train(optimizer, range(3))
    added = parameters(dtype, [(4, 4)], seed=7)
    optimizer.add_param_group({"params": added, "lr": 1e-3})
    train(optimizer, range(3, 5))
    assert [int(optimizer.state[g["params"][0]]["step"]) for g in optimizer.param_groups] == [5, 2]

    early, late = parameters(BFLOAT16), parameters(dtype, [(4, 4)], seed=7)
    alone = hs.AdamW([{"params": early}, {"params": late, "lr": 1e-3}], lr=1e-2)
    for t in range(3):
        set_grads(early, t)
        alone.step()
    train(alone, range(3, 5))
    assert_same(held(optimizer), held(alone))


def test_a_parameter_given_twice_is_refused():
    a, b = parameters(FLOAT32, [(3,), (4,)])
    with pytest.raises(ValueError, match="a parameter appears twice in one group; it would be updated twice a step"):
        hs.AdamW([a, b, a])
    with pytest.raises(ValueError, match="a parameter appears twice in one group"):
        hs.AdamW([("a", a), ("b", a)])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        hs.AdamW([{"params": [a]}, {"params": [b, a]}])


@pytest.mark.parametrize(("group", "error"), [
    ({"params": [Parameter(torch.zeros(2))], "lr": -1.0}, ValueError),
    ({"params": [Parameter(torch.zeros(2, dtype=torch.float64))]}, TypeError),
    ({"params": [Parameter(torch.zeros(2, dtype=FLOAT16))], "master": "split"}, ValueError),
    ({"params": {Parameter(torch.zeros(2))}}, TypeError),
    ([Parameter(torch.zeros(2))], TypeError),
], ids=["lr", "dtype", "master", "set", "list"])  # fmt: skip
def test_a_refused_group_leaves_the_optimizer_as_it_was(group, error):
    optimizer, other = hs.AdamW(parameters(BFLOAT16)), hs.AdamW(parameters(BFLOAT16))
    train(optimizer, [1])
    train(other, [1])
    with pytest.raises(error):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    train(optimizer, [2])
    train(other, [2])
    assert_same(held(optimizer), held(other))


def test_tied_weights_are_one_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = hs.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_views_of_one_buffer_may_lie_between_each_other():
    buffer = torch.zeros(6, 4)
    columns = [Parameter(buffer[:, i]) for i in range(4)]
    train(hs.AdamW(columns), [1])
    assert (buffer != 0).all()


@pytest.mark.parametrize("copied", [lambda o: o, copy.deepcopy], ids=["itself", "deepcopy"])
def test_a_group_that_shares_memory_with_an_older_one_is_refused(copied):
    optimizer = copied(hs.AdamW([{"params": [p]} for p in parameters(FLOAT32)]))
    view = Parameter(optimizer.param_groups[1]["params"][0].detach()[1:])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 .* and parameter 0 of group 3 .* share memory"):
        optimizer.add_param_group({"params": [view]})
    assert len(optimizer.param_groups) == 3


def test_memory_is_checked_once_for_all_groups(monkeypatch):
    """Once for each group would make a group per parameter cost the square of their number."""
    calls = []
    monkeypatch.setattr("halfstep.fused_adam.check_writable", lambda writes, names: calls.append(len(writes)))
    optimizer = hs.AdamW([{"params": [p]} for p in parameters(FLOAT32)])
    assert calls == [3]
    optimizer.add_param_group({"params": parameters(FLOAT32)})
    assert calls == [3, 6]


# ---- what goes wrong between two steps ------------------------------------------------------------------------------
def stepped(**options) -> tuple[Parameter, hs.AdamW]:
    weight = Parameter(torch.ones(4, 3, dtype=BFLOAT16))
    optimizer = hs.AdamW([weight], **options)
    train(optimizer, [1])
    return weight, optimizer


NAME = re.escape("parameter 0 of group 0 (shape (4, 3), torch.bfloat16)")


def test_a_parameter_of_another_shape_than_its_states():
    weight, optimizer = stepped()
    weight.grad = None
    weight.data = torch.ones(2, 3, dtype=BFLOAT16)
    with pytest.raises(RuntimeError, match=r"has shape \(2, 3\) but a state of shape \(4, 3\): it changed after"):
        train(optimizer, [2])


def test_a_gradient_of_another_shape_than_its_parameter():
    weight = Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    weight.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"has shape \(5,\) on cpu, its gradient \(3,\) on cpu; call back"):
        hs.AdamW([weight]).step()


def test_states_in_different_memory_orders():
    weight, optimizer = stepped()
    optimizer.state[weight]["exp_avg_sq"] = torch.zeros(3, 4).t()
    with pytest.raises(RuntimeError, match=NAME + ": its optimizer states have different memory layouts"):
        train(optimizer, [2])


def test_stochastic_states_out_of_logical_order():
    weight, optimizer = stepped(state_dtype=BFLOAT16)
    for key in ("exp_avg", "exp_avg_sq", "master"):
        optimizer.state[weight][key] = optimizer.state[weight][key].t().contiguous().t()
    with pytest.raises(
        RuntimeError, match=NAME + r": stochastic rounding needs contiguous states, got strides .* bring"
    ):
        train(optimizer, [2])


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("key", ["step", "exp_avg", "master"])
def test_a_state_of_two_parameters(key, backend):
    """Both would update it: a step would count twice, or not, as the backend goes."""
    optimizer = hs.AdamW(parameters(BFLOAT16, [(3,), (3,)]), backend=backend)
    train(optimizer, [1])
    first, second = optimizer.state.values()
    second[key] = first[key]
    before = held(optimizer)
    with pytest.raises(ValueError, match=r"a state of parameter 0 of .* and a state of parameter 1 of .* share memory"):
        train(optimizer, [2])
    assert_same(held(optimizer), before)


@pytest.mark.parametrize(("keys", "dtype", "message"), [
    (["exp_avg"], BFLOAT16, ": its exp_avg is torch.bfloat16, the group's state_dtype torch.float32"),
    (["exp_avg", "exp_avg_sq"], BFLOAT16, ": its exp_avg is torch.bfloat16, the group's state_dtype torch.float32"),
    (["exp_avg", "exp_avg_sq"], FLOAT16, ": its exp_avg is torch.float16, the group's state_dtype torch.float32"),
    (["exp_avg_sq"], torch.float64, ": its exp_avg_sq is torch.float64, the group's state_dtype torch.float32"),
    (["master"], BFLOAT16, " has moments of [torch.float32, torch.float32], a master of torch.bfloat16 and"),
])  # fmt: skip
def test_states_of_a_wrong_dtype(keys, dtype, message):
    """Someone loaded a checkpoint past load_state_dict(): a kernel would read them with the wrong size, or the states
    would be rounded to a dtype that nobody asked for."""
    weight, optimizer = stepped()
    for key in keys:
        optimizer.state[weight][key] = optimizer.state[weight][key].to(dtype)
    before = held(optimizer)
    with pytest.raises(RuntimeError, match=NAME + re.escape(message) + ".* Load states through load_state_dict"):
        train(optimizer, [2])
    assert_same(held(optimizer), before)
