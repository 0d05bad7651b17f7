"""Optimizers whose `state` is in the hands of others, and how to see that their steps are right all the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from adversarial import BFLOAT16, FLOAT32
from optimizer_runs import assert_same, held, parameters, params_of, train
from torch.nn import Parameter

import halfstep as hs

SHAPES = [(4, 4)] * 3
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {"amsgrad": True}),
    "master": (BFLOAT16, {}),
    "split": (BFLOAT16, {"master": "split", "max_grad_norm": 1.0}),
}
State = dict[str, torch.Tensor]


def trained(mode: str = "float32", steps: int = 3) -> hs.AdamW:
    dtype, options = MODES[mode]
    optimizer = hs.AdamW(parameters(dtype, SHAPES), lr=0.1, **options)
    train(optimizer, range(steps))
    return optimizer


def assert_steps_are_right(optimizer: hs.AdamW) -> None:
    """As those of a copy without a memory; in both, every tensor of the state takes part."""
    other = copy.deepcopy(optimizer)
    before = held(optimizer)
    train(optimizer, range(20, 23))
    train(other, range(20, 23))
    after = held(optimizer)
    assert_same(after, held(other))
    for key, value in after.items():
        assert "step" not in key or value == before.get(key, 0) + 3, key


def second(optimizer: hs.AdamW) -> Parameter:
    return params_of(optimizer)[1]


def one_other_tensor(state: State) -> None:
    state["exp_avg"] = state["exp_avg"] / 2
