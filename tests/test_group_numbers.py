"""Hyper-parameters written at any time, in any way, are seen by the very next step; wrong ones are refused every time.

Guards: checked numbers that are kept from step to step though the group's have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adversarial import FLOAT32
from optimizer_runs import assert_same, assert_unchanged, held, parameters, train

import halfstep as hs
from halfstep.hyper import adam_group

Write = Callable[[dict[str, Any]], Any]


def written(key: str, value: Any) -> Write:
    return lambda group: group.update({key: value})


def filled(key: str, value: float) -> Write:
    """In place, where a tensor stands."""
    return lambda group: group[key].fill_(value)


def beta(index: int, value: Any) -> Write:
    """In place, where a list stands."""
    return lambda group: group["betas"].__setitem__(index, value)


ROUNDED = torch.tensor(0.1).item()  # 0.1 as float32 is another number, and equal to the tensor
SEQUENCES: dict[str, list[Write]] = {
    "floats": [written("lr", 0.5), written("eps", 1e-3), written("weight_decay", 0.2), written("lr", 0.25)],
    "whole numbers": [written("lr", 1), written("weight_decay", 0), written("lr", True), written("lr", 2)],
    "numpy": [written("lr", np.float32(0.1)), written("lr", np.float64(0.1)), written("lr", np.int64(1))],
    "tensor in place": [written("lr", torch.tensor(0.5)), filled("lr", 0.25), filled("lr", 0.125)],
    "float over a tensor": [
        written("lr", torch.tensor(0.5)),
        lambda group: (group["lr"].fill_(0.25), group.update(lr=0.25)),  # no step between the two
    ],
    "float over the tensor it rounds to": [written("lr", torch.tensor(0.1)), written("lr", 0.1)],
    "tensor over the float it rounds to": [written("lr", 0.1), written("lr", torch.tensor(0.1)), written("lr", 0.1)],
    "tensor there and back": [written("lr", 0.5), written("lr", torch.tensor([0.25])), written("lr", 0.5)],
    "float64 tensor": [written("lr", torch.tensor(0.1).double()), written("lr", ROUNDED), written("lr", 0.1)],
    "betas as a list": [written("betas", [0.5, 0.9]), beta(0, 0.6), beta(1, 0.95), written("betas", (0.6, 0.95))],
    "tensors inside betas": [
        written("betas", [torch.tensor(0.5), torch.tensor(0.75)]),
        lambda group: group["betas"][0].fill_(0.25),
        lambda group: group["betas"][1].fill_(0.5),
        written("betas", [0.25, 0.5]),
    ],
    "flags": [written("maximize", True), written("maximize", 0), written("maximize", 1), written("maximize", "")],
    "decoupled": [written("decoupled_weight_decay", 0), written("decoupled_weight_decay", True)],
    "the betas' places": [written("betas", (0.25, 0.75)), written("betas", (0.75, 0.25))],
}  # fmt: skip


@pytest.mark.parametrize("writes", SEQUENCES.values(), ids=SEQUENCES)
def test_what_was_written_counts_at_the_next_step(writes):
    """The numbers of a long-lived optimizer are those that are read anew; and so are the bits."""
    optimizer = hs.Adam(parameters(FLOAT32), weight_decay=0.1)
    fresh = hs.Adam(parameters(FLOAT32), weight_decay=0.1)
    train(optimizer, range(2))
    train(fresh, range(2))
    for t, write in enumerate(writes, 2):
        for other in (optimizer, fresh):
            write(other.param_groups[0])
        fresh._forget()
        train(optimizer, [t, t])
        train(fresh, [t, t])
        assert optimizer._numbers(optimizer.param_groups) == [adam_group(optimizer.param_groups[0], 0)]
        assert_same(held(optimizer), held(fresh))


WRONG: dict[str, tuple[Write, type[Exception], str]] = {
    "nan": (written("lr", math.nan), ValueError, "parameter group 0: lr=nan: expected a finite number >= 0"),
    "inf": (written("eps", math.inf), ValueError, "parameter group 0: eps=inf: expected a finite number >= 0"),
    "negative": (written("weight_decay", -0.1), ValueError, "parameter group 0: weight_decay=-0.1: expected a finite"),
    "two elements": (
        written("lr", torch.tensor([0.1, 0.1])), ValueError,
        r"parameter group 0: lr must have one element, got shape \(2,\)",
    ),
    "no element": (
        written("lr", torch.tensor([])), ValueError, r"parameter group 0: lr must have one element, got shape \(0,\)"
    ),
    "a tensor of nan": (written("lr", torch.tensor(math.nan)), ValueError, "parameter group 0: lr=nan: expected a"),
    "text": (written("lr", "fast"), TypeError, "parameter group 0: lr='fast': expected a number or a 1-element tensor"),
    "three betas": (written("betas", (0.9, 0.99, 0.9)), ValueError, r"betas=\(0.9, 0.99, 0.9\): expected two numbers"),
    "one beta": (written("betas", [0.9]), ValueError, r"parameter group 0: betas=\[0.9\]: expected two numbers"),
    "an array": (written("betas", np.array([0.9, 0.99])), ValueError, "parameter group 0: betas=array.* two numbers"),
    "beta of 1": (written("betas", (0.9, 1)), ValueError, r"parameter group 0: betas=\(0.9, 1\): expected two numbers"),
    "beta of nan": (written("betas", (math.nan, 0.9)), ValueError, r"betas=\(nan, 0.9\): expected two numbers in"),
    "array in a beta": (
        written("betas", (torch.tensor([0.9, 0.9]), 0.9)), ValueError,
        r"parameter group 0: betas must have one element, got shape \(2,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("write", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_is_refused_every_time_and_right_again(write, error, message):
    optimizer, plain = hs.AdamW(parameters(FLOAT32)), hs.AdamW(parameters(FLOAT32))
    train(optimizer, range(2))
    right = dict(optimizer.param_groups[0])
    for _ in range(2):
        write(optimizer.param_groups[0])
        before = held(optimizer)
        for _ in range(3):
            with pytest.raises(error, match=message):
                train(optimizer, [5])
            assert_unchanged(optimizer, before)
        optimizer.param_groups[0].update(right)
        train(optimizer, [2])
    train(plain, [0, 1, 2, 2])
    assert_same(held(optimizer), held(plain))


def test_each_group_has_its_own_numbers():
    """Also when groups trade places, and when one of them changes alone."""
    first, second, third = parameters(FLOAT32)
    optimizer = hs.AdamW([{"params": [first]}, {"params": [second], "lr": 0.5}, {"params": [third], "lr": 0.25}])
    train(optimizer, range(2))
    for change in (
        lambda groups: groups.reverse(),
        lambda groups: groups[2].update(lr=0.125),
        lambda groups: groups.pop(1),
        lambda groups: groups[0].update(groups[1], params=groups[0]["params"]),
    ):
        change(optimizer.param_groups)
        train(optimizer, [2])
        assert optimizer._numbers(optimizer.param_groups) == [
            adam_group(group, i) for i, group in enumerate(optimizer.param_groups)
        ]
