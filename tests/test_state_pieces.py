"""A large saved master or remainder is judged and converted in pieces: every bit as if it had been done at once.

Guards: a piece that is left out or matched with another one's, a master that is judged by some of its pieces, a weight
that is rewritten though another piece refuses the master.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, awkward, ordinary
from bits import assert_same_bits
from optimizer_runs import only
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.reference import join_master, round_to, split_master

LARGE = 50_021  # a prime, and more than one piece


def with_gaps(values: Tensor) -> Tensor:
    return torch.stack((values, values), dim=-1)[..., 0]


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "0-d": ((), torch.clone),
    "empty": ((0, 5), torch.clone),
    "one piece": ((7, 9), torch.clone),
    "flat": ((LARGE,), torch.clone),
    "rows": ((3, 20_001), torch.clone),
    "many short rows": ((20_001, 3), torch.clone),
    "transposed": ((211, 307), lambda x: x.t().contiguous().t()),
    "channels last": ((13, 17, 19, 23), lambda x: x.to(memory_format=torch.channels_last)),
    "with gaps": ((211, 307), with_gaps),
    "rows of one": ((1, LARGE, 1), with_gaps),
    "sixteen dimensions": ((2,) * 16, torch.clone),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
CONVERSIONS = [("fp32", "fp32", BFLOAT16), ("fp32", "split", BFLOAT16), ("split", "fp32", BFLOAT16),
               ("split", "split", BFLOAT16), ("fp32", "fp32", FLOAT16)]  # fmt: skip


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """NaN, Inf, ties and denormals among them, as far as there is room."""
    return awkward(max(1, torch.Size(shape).numel()), dtype, seed)[: torch.Size(shape).numel()].view(shape)


def checkpoint(weight: Parameter, key: str, value: Tensor) -> dict[str, Any]:
    """Of a parameter that has a `key` (master, remainder) beside it."""
    saved = hs.AdamW([weight]).state_dict()
    return {**saved, "state": {0: {"step": 3, key: value}}}


def saved_by(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, str, Tensor]:
    """(float32 master, the weight that shows it, the key, what is saved) of a checkpoint of this kind."""
    master = values_of(shape, FLOAT32, 1)
    if kind == "split":
        weight, remainder = split_master(master)
        return join_master(weight, remainder), weight, "remainder", remainder
    return master, round_to(master, dtype), "master", master


@each_layout
@pytest.mark.parametrize("order", ["weight", "saved", "both"])
@pytest.mark.parametrize(("first", "then", "dtype"), CONVERSIONS)
def test_every_element_is_taken(first, then, dtype, order, layout):
    """The saved one may lie in memory in another order than the weight."""
    shape, lay_out = LAYOUTS[layout]
    wide, weight, key, saved = saved_by(shape, first, dtype)
    param = Parameter(lay_out(weight) if order != "saved" else weight)
    optimizer = hs.AdamW([param], master=then)
    optimizer.load_state_dict(checkpoint(param, key, lay_out(saved) if order != "weight" else saved))
    state = optimizer.state[param]
    if then == "split":
        shown, remainder = split_master(wide)
        assert_same_bits(state["remainder"], remainder, "remainder")
    else:
        shown = round_to(wide, dtype)
        assert_same_bits(state["master"], wide, "master")
    assert_same_bits(param.detach(), shown, "weight")


@pytest.mark.parametrize("layout", ["flat", "transposed", "channels last", "with gaps", "sixteen dimensions"])
@pytest.mark.parametrize("where", [0, 0.5, 1])
@pytest.mark.parametrize("then", ["fp32", "split"])
def test_one_untrue_element_refuses_the_whole_master(then, where, layout):
    """And no piece before it has changed a weight: every weight that shows an exact tie would be another."""
    shape, lay_out = LAYOUTS[layout]
    weight = torch.ones(shape, dtype=BFLOAT16)
    master = torch.full(shape, 1 + 2.0**-8)
    master.view(-1)[int(where * (master.numel() - 1))] = 2.0
    param = Parameter(lay_out(weight))
    optimizer = hs.AdamW([param], master=then)
    with pytest.warns(UserWarning, match="the saved master does not round to the weight"):
        optimizer.load_state_dict(checkpoint(param, "master", lay_out(master)))
    assert_same_bits(param.detach(), weight, "weight")
    _, state = only(optimizer)
    if then == "split":
        assert not state["remainder"].any()
    else:
        assert_same_bits(state["master"], torch.ones(shape), "master")


@pytest.mark.parametrize("then", ["fp32", "split"])
def test_weights_that_need_no_change_keep_the_bits_of_their_nans(then):
    """A weight is written where it shows another number only: its NaN may come from elsewhere, payload and all."""
    weight = ordinary(LARGE, BFLOAT16, 0)
    weight.view(torch.int16)[::1000] = 0x7FC1
    param = Parameter(weight.clone())
    hs.AdamW([param], master=then).load_state_dict(checkpoint(param, "master", weight.float()))
    assert torch.equal(param.detach().view(torch.int16), weight.view(torch.int16))
