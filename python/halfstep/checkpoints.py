"""A checkpoint of an optimizer, and what of it belongs to which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from . import states
from .hyper import merged_group

if TYPE_CHECKING:
    from .fused_adam import FusedAdam


class SavedState(NamedTuple):
    """One parameter's saved state, and whom it is for."""

    saved: dict[str, Any]
    group: dict[str, Any]
    param: Tensor
    name: str


def matched(
    optimizer: FusedAdam, state_dict: dict[str, Any], keep: Sequence[str]
) -> tuple[list[dict[str, Any]], list[SavedState]]:
    """(the groups as they will be, the states that the checkpoint has), checked; changes nothing.

    keep: keys of a group that stay the optimizer's own. Raises ValueError if groups, parameters or shapes do not match.
    """
    if not {"param_groups", "state"} <= state_dict.keys():
        raise ValueError(
            "expected an optimizer's state_dict with 'param_groups' and 'state', got the keys "
            f"{sorted(map(str, state_dict))[:4]}; is it the model's?"
        )
    saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
    ours, theirs = [len(g["params"]) for g in optimizer.param_groups], [len(g["params"]) for g in saved_groups]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has parameter groups of {theirs} parameters, this optimizer of {ours}; build it with "
            "the same groups"
        )
    groups = [
        merged_group(index, {**optimizer.defaults, **mine}, saved, keep=keep)
        for index, (mine, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True))
    ]
    keys = chain.from_iterable(saved["params"] for saved in saved_groups)
    params = [(group, p) for group in groups for p in group["params"]]
    found = [
        SavedState(saved_states[key], group, param, name)
        for key, (group, param), name in zip(keys, params, optimizer.names(), strict=True)
        if key in saved_states
    ]
    for one in found:
        states.check_saved(one.param, one.saved, one.name)
    return groups, found
