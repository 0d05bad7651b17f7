"""Optimizer states of one parameter: made, exported in torch's layout, and taken in from anyone's checkpoint.

In memory a state holds `step` (0-d int64), `exp_avg`, `exp_avg_sq`, with amsgrad `max_exp_avg_sq`, and for a 16-bit
parameter `master` (float32) or `remainder` (int16, the lower half of a split master). Exported, `step` is float32, as
torch.optim wants it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .ops.layout import NARROW
from .reference.rounding import join_master, round_to, split_master

MASTER_MODES = ("auto", "fp32", "split", None)
STATE_DTYPES = (torch.float32, torch.bfloat16)
_EXACT_IN_FLOAT32 = 2**24


def master_kind(mode: str | None, dtype: torch.dtype) -> str | None:
    """What a parameter of this dtype keeps beside itself: "master", "remainder" or None. ValueError if it cannot."""
    if mode not in MASTER_MODES:
        raise ValueError(f"master={mode!r}: expected 'auto', 'fp32', 'split' or None")
    if mode is None or dtype not in NARROW:
        return None
    if mode == "split" and dtype is not torch.bfloat16:
        raise ValueError(
            f"master='split' keeps the lower half of a float32 under a bfloat16 weight; this parameter is {dtype}. "
            "Use master='fp32' for it (a group of its own may say so)"
        )
    return "remainder" if mode == "split" else "master"


def rounds_stochastically(param: Tensor, group: dict[str, Any], stochastic_weight: bool) -> bool:
    """True if the weight or its states round stochastically: their elements must then lie in logical order."""
    bare = param.dtype in NARROW and master_kind(group["master"], param.dtype) is None
    return group["state_dtype"] in NARROW or (stochastic_weight and bare)


def zeros(param: Tensor, dtype: torch.dtype, logical_order: bool) -> Tensor:
    """A state of the parameter's kind: same shape, device, sharding (DTensor), and memory order unless logical."""
    order = torch.contiguous_format if logical_order else torch.preserve_format
    return torch.zeros_like(param, dtype=dtype, memory_format=order)


def new_state(param: Tensor, group: dict[str, Any], logical_order: bool) -> dict[str, Tensor]:
    """The state of a parameter that was never updated."""
    state = {"step": torch.zeros((), dtype=torch.int64, device=param.device)}
    for key in _moments(group):
        state[key] = zeros(param, group["state_dtype"], logical_order)
    kind = master_kind(group["master"], param.dtype)
    if kind == "master":
        state["master"] = zeros(param, torch.float32, logical_order).copy_(param)
    elif kind == "remainder":
        state["remainder"] = zeros(param, torch.int16, logical_order)
    return state


def complete(param: Tensor, state: dict[str, Any], group: dict[str, Any], logical_order: bool) -> None:
    """Adds what the state lacks for the group's modes and the parameter's dtype, in place; drops a master it cannot use."""
    fresh = new_state(param, group, logical_order)
    for key in {"master", "remainder"} & (state.keys() - fresh.keys()):
        del state[key]  # the parameter changed its dtype
    for key in fresh.keys() - state.keys():
        state[key] = fresh[key]


def exported(state: dict[str, Any]) -> dict[str, Any]:
    """The state as torch.optim writes it: `step` as a 0-d float32 tensor (float64 past 2**24, where float32 has gaps)."""
    if "step" not in state:
        return state
    step = state["step"]
    wide = int(step) > _EXACT_IN_FLOAT32
    return {**state, "step": step.to(torch.float64 if wide else torch.float32)}


def imported(
    param: Tensor, saved: dict[str, Any], group: dict[str, Any], logical_order: bool, name: str
) -> dict[str, Any]:
    """A copy of a saved state in this optimizer's modes; what is missing or untrue is rebuilt. Raises ValueError.

    May rewrite the parameter by one rounding where a float32 master becomes a split one or the reverse: the two show an
    exact tie differently, and the master is what must not change.
    """
    for key, value in saved.items():
        if isinstance(value, Tensor) and key != "step" and value.shape != param.shape:
            raise ValueError(
                f"{name}: the saved {key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}; the "
                "checkpoint belongs to another model, or its parameters come in another order"
            )
    state = new_state(param, group, logical_order)
    state["step"].fill_(_step(saved.get("step", 0), name))
    for key in _moments(group):
        if key in saved:
            state[key].copy_(saved[key])
    if "master" in state or "remainder" in state:
        _import_master(param, saved, state, name)
    known = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "remainder"}
    state.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items() if k not in known})
    return state


def refresh_master(param: Tensor, state: dict[str, Any]) -> None:
    """Rebuilds the master from the weight."""
    if "master" in state:
        state["master"].copy_(param)
    if "remainder" in state:
        state["remainder"].zero_()


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _step(value: Any, name: str) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or number != int(number) or number < 0:
        raise ValueError(f"{name}: the saved step is {value!r}; expected a whole number of updates, 0 or more")
    return int(number)


def _import_master(param: Tensor, saved: dict[str, Any], state: dict[str, Any], name: str) -> None:
    """Fills state["master"] or ["remainder"] from the saved one if it is true to the weight."""
    weight = param.detach()
    wide, why_not = None, None
    if "master" in saved:
        candidate = saved["master"]
        if candidate.dtype is not torch.float32:
            why_not = f"the saved master is {candidate.dtype}, not float32 (another optimizer has cast it)"
        elif not _same_bits(round_to(candidate.to(weight.device), weight.dtype), weight):
            why_not = "the saved master does not round to the weight (load the model before the optimizer)"
        else:
            wide = candidate.to(weight.device)
    elif "remainder" in saved:
        candidate = saved["remainder"]
        if candidate.dtype is not torch.int16 or weight.dtype is not torch.bfloat16:
            why_not = f"the saved remainder is {candidate.dtype} for a {weight.dtype} weight (another optimizer has cast it)"
        else:
            wide = join_master(weight, candidate.to(weight.device))
    if why_not:
        warnings.warn(f"{name}: {why_not}; the master starts again from the weight", UserWarning, stacklevel=4)
    if wide is None:
        return  # new_state() made it from the weight
    if "master" in state:
        state["master"].copy_(wide)
        shown = round_to(wide, weight.dtype)
    else:
        shown, remainder = split_master(wide)
        state["remainder"].copy_(remainder)
    if not _same_bits(shown, weight):
        weight.copy_(shown)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())
