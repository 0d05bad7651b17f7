"""The learning rate as float or tensor, never shared between groups, written by schedulers of both kinds."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from optimizer_runs import assert_as_good_as, assert_same, copies, held, parameters, set_grads, train
from torch.optim import lr_scheduler

import halfstep as hs

LR = 2.0**-7  # the same number as a float and as a float32 tensor
KINDS = {"float": lambda: LR, "0-d": lambda: torch.tensor(LR), "1-d": lambda: torch.tensor([LR])}


@pytest.mark.parametrize("kind", ["0-d", "1-d"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_tensor_lr_gives_the_bits_of_a_float(kind, dtype):
    tensor, number = hs.AdamW(parameters(dtype), lr=KINDS[kind]()), hs.AdamW(parameters(dtype), lr=LR)
    train(tensor, range(3))
    train(number, range(3))
    assert_same(held(tensor), held(number))


def grouped(lr: torch.Tensor) -> hs.AdamW:
    first, second, third = parameters(FLOAT32)
    optimizer = hs.AdamW([{"params": [first]}, {"params": [second]}], lr=lr)
    optimizer.add_param_group({"params": [third]})
    return optimizer


def reloaded(optimizer: hs.AdamW) -> hs.AdamW:
    other = grouped(torch.tensor(1.0))
    other.load_state_dict(optimizer.state_dict())
    return other


COPIES: dict[str, Callable[[hs.AdamW], hs.AdamW]] = {
    "itself": lambda optimizer: optimizer,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "state_dict": reloaded,
}


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_groups_never_share_a_tensor(made):
    """A scheduler fills one group's tensor: the others, the caller's own and the original keep their value."""
    given = torch.tensor(LR)
    optimizer = grouped(given)
    other = made(optimizer)
    groups = other.param_groups + (optimizer.param_groups if other is not optimizer else [])
    tensors = [given, other.defaults["lr"], *(group["lr"] for group in groups)]
    assert len({t.data_ptr() for t in tensors[2:]} | {given.data_ptr()}) == len(tensors) - 1
    other.param_groups[1]["lr"].fill_(0.5)
    assert [float(t) for t in tensors].count(0.5) == 1


def test_a_checkpoint_does_not_share_its_lr_with_two_optimizers():
    saved = grouped(torch.tensor(LR)).state_dict()
    first, second = (grouped(torch.tensor(1.0)) for _ in range(2))
    first.load_state_dict(saved)
    second.load_state_dict(saved)
    first.param_groups[0]["lr"].fill_(0.5)
    assert [float(o["param_groups"][0]["lr"]) for o in (saved, second.state_dict())] == [LR, LR]


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_a_new_lr_of_another_kind_counts_at_the_next_step(before, after):
    optimizer, plain = hs.AdamW(parameters(BFLOAT16), lr=KINDS[before]()), hs.AdamW(parameters(BFLOAT16), lr=LR)
    train(optimizer, [1])
    train(plain, [1])
    optimizer.param_groups[0]["lr"] = KINDS[after]() * 4
    plain.param_groups[0]["lr"] = LR * 4
    train(optimizer, [2])
    train(plain, [2])
    assert_same(held(optimizer), held(plain))


def test_a_tensor_that_is_filled_counts_at_the_next_step():
    optimizer, plain = hs.AdamW(parameters(FLOAT32), lr=torch.tensor(LR)), hs.AdamW(parameters(FLOAT32), lr=LR)
    for t in range(4):
        optimizer.param_groups[0]["lr"].mul_(0.5)
        plain.param_groups[0]["lr"] *= 0.5
        train(optimizer, [t])
        train(plain, [t])
    assert_same(held(optimizer), held(plain))


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=16)],
        milestones=[4],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def scheduled(optimizer: torch.optim.Optimizer, schedule: Callable) -> list[float]:
    """20 steps; the learning rates that were used."""
    scheduler = schedule(optimizer)
    (group,) = optimizer.param_groups
    used = []
    for t in range(20):
        set_grads(group["params"], t)
        used.append(float(group["lr"]))
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return used


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", ["float", "0-d"])
def test_schedulers_work_as_with_torch(schedule, kind):
    """OneCycleLR also cycles the first beta. The rates are torch's, and so is the trajectory."""
    shapes = [(20, 30), (1001,)]
    ours, naive = parameters(FLOAT32, shapes), parameters(FLOAT32, shapes)
    exact = copies(ours, torch.float64)
    used = scheduled(hs.AdamW(ours, lr=KINDS[kind]()), schedule)
    theirs = scheduled(torch.optim.AdamW(naive, lr=LR, foreach=False), schedule)
    scheduled(torch.optim.AdamW(exact, lr=LR, foreach=False), schedule)
    eps = torch.finfo(FLOAT32).eps if kind == "0-d" else 0.0
    assert all(math.isclose(a, b, rel_tol=len(used) * eps, abs_tol=0.0) for a, b in zip(used, theirs, strict=True))
    assert len(set(used)) > 1
    if kind == "float":
        assert_as_good_as(ours, naive, exact)
