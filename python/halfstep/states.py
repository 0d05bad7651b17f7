"""Optimizer states of one parameter: made, exported in torch's layout, and taken in from anyone's checkpoint.

In memory a state holds `step` (0-d int64), `exp_avg`, `exp_avg_sq`, with amsgrad `max_exp_avg_sq`, and for a 16-bit
parameter `master` (float32) or `remainder` (int16, the lower half of a split master). Exported, `step` is float32, as
torch.optim wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .ops import devices
from .ops.cast import join_master, round_to, split_master
from .ops.layout import NARROW
from .reports import warn
from .shards import is_sharded, local

MASTER_MODES = ("auto", "fp32", "split", None)
STATE_DTYPES = (torch.float32, torch.bfloat16)
_EXACT_IN_FLOAT32 = 2**24
_LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "remainder")


def master_kind(mode: str | None, dtype: torch.dtype, name: str = "a parameter") -> str | None:
    """What a parameter of this dtype keeps beside itself: "master", "remainder" or None. ValueError if it cannot."""
    if mode not in MASTER_MODES:
        raise ValueError(f"{name}: master={mode!r}: expected 'auto', 'fp32', 'split' or None")
    if mode is None or dtype not in NARROW:
        return None
    if mode == "split" and dtype is not torch.bfloat16:
        raise ValueError(
            f"{name}: master='split' keeps the lower half of a float32 under a bfloat16 weight; this is {dtype}. "
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
    state = {"step": _counter(0, param.device)}
    for key in _moments(group):
        state[key] = zeros(param, group["state_dtype"], logical_order)
    kind = master_kind(group["master"], param.dtype)
    if kind == "master":
        state["master"] = zeros(param, torch.float32, logical_order).copy_(param)
    elif kind == "remainder":
        state["remainder"] = zeros(param, torch.int16, logical_order)
    return state


def complete(param: Tensor, state: dict[str, Any], group: dict[str, Any], logical_order: bool, name: str) -> None:
    """Brings a state that others may have written into this optimizer's form, in place.

    Adds what the group's modes and the parameter's dtype need, drops a useless master, and converts a step as
    torch.optim has it: float32, on the CPU, or a plain number. ValueError if that is no whole number, RuntimeError if
    a moment has not the group's state_dtype.
    """
    kind = master_kind(group["master"], param.dtype)
    for key in {"master", "remainder"} & (state.keys() - {kind}):
        del state[key]  # the parameter changed its dtype
    foreign_step = "step" in state and not _is_counter(state["step"], param.device)
    if foreign_step:
        _check_not_capturing(param, name)
        state["step"] = _counter(_step(state["step"], f"{name}: its step"), param.device)
    for key in _moments(group):
        if key in state and state[key].dtype is not group["state_dtype"]:
            raise RuntimeError(
                f"{name}: its {key} is {state[key].dtype}, the group's state_dtype {group['state_dtype']}. Load states "
                "through load_state_dict(), which converts them: optimizer.load_state_dict(optimizer.state_dict())"
            )
    if state.keys() >= {"step", *_moments(group), *([kind] if kind else [])}:
        return  # the usual case, which must not allocate
    _check_not_capturing(param, name)
    for key, value in new_state(param, group, logical_order).items():
        state.setdefault(key, value)


def _check_not_capturing(param: Tensor, name: str) -> None:
    if devices.is_capturing(param.device):
        raise RuntimeError(
            f"{name} has no state yet: made while a CUDA graph is captured, it would start again from 0 at every "
            "replay. Call step() once before the capture, with a gradient for every parameter"
        )


def exported(state: dict[str, Any]) -> dict[str, Any]:
    """The state as torch.optim writes it: `step` as 0-d float32 (float64 past 2**24, where float32 has gaps)."""
    if not isinstance(state, dict) or "step" not in state:
        return state
    step = state["step"]  # others may have written a number, or one of shape (1,)
    step = step if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
    step = step.reshape(()) if step.numel() == 1 else step
    wide = bool((step > _EXACT_IN_FLOAT32).any())
    return {**state, "step": step.to(torch.float64 if wide else torch.float32)}


def check_saved(param: Tensor, saved: dict[str, Any], name: str) -> None:
    """Raises ValueError unless the saved state can be this parameter's."""
    for key in ("step", *_LIKE_THE_PARAMETER):
        if isinstance(saved.get(key), Tensor) and local(saved[key]).is_meta:
            raise ValueError(
                f"{name}: the saved {key} is on the meta device, which holds no numbers; read the checkpoint with "
                "map_location='cpu' (mmap=True reads no more than it must)"
            )
    if saved and local(param).is_meta:
        raise ValueError(
            f"{name} is on the meta device, which holds no numbers; give the model memory (to_empty()) and load its "
            "weights, then load the optimizer"
        )
    _step(saved.get("step", 0), f"{name}: the saved step")
    for key in _LIKE_THE_PARAMETER:
        if key not in saved:
            continue
        value = saved[key]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
            kind = f"{value.layout} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name}: the saved {key} is {kind}; expected a dense tensor of real numbers")
        if saved[key].shape != param.shape:
            raise ValueError(
                f"{name}: the saved {key} has shape {tuple(saved[key].shape)}, the parameter {tuple(param.shape)}; the "
                "checkpoint belongs to another model, or its parameters come in another order"
            )
        if is_sharded(saved[key]) != is_sharded(param):
            kinds = ("a DTensor", "a plain tensor") if is_sharded(param) else ("a plain tensor", "a DTensor")
            raise ValueError(
                f"{name} is {kinds[0]} but the saved {key} is {kinds[1]}; bring the checkpoint into the parameter's "
                "form first (distribute_tensor() or full_tensor(), or load through torch.distributed.checkpoint)"
            )


def imported(
    param: Tensor, saved: dict[str, Any], group: dict[str, Any], logical_order: bool, name: str
) -> dict[str, Any]:
    """A copy of a checked saved state in this optimizer's modes; what is missing or untrue is rebuilt.

    May rewrite the parameter by one rounding where a float32 master becomes a split one or the reverse: the two show an
    exact tie differently, and the master is what must not change.
    """
    state = new_state(param, group, logical_order)
    state["step"].fill_(_step(saved.get("step", 0), f"{name}: the saved step"))
    for key in _moments(group):
        if key in saved:
            state[key].copy_(saved[key])
    if "master" in state or "remainder" in state:
        _import_master(param, saved, state, name)
    state.update({k: deepcopy(v) for k, v in saved.items() if k not in ("step", *_LIKE_THE_PARAMETER)})
    return state


def refresh_master(param: Tensor, state: dict[str, Any]) -> None:
    """Rebuilds the master from the weight."""
    if "master" in state:
        state["master"].copy_(param)
    if "remainder" in state:
        state["remainder"].zero_()


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _is_counter(step: Any, device: torch.device) -> bool:
    return isinstance(step, Tensor) and step.dtype is torch.int64 and step.ndim == 0 and step.device == device


def _counter(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=torch.int64, device=device)


def _step(value: Any, what: str) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    if not isinstance(number, (int, float)) or not 0 <= number < 2**63 or number != int(number):
        raise ValueError(f"{what} is {value!r}; expected a whole number of updates, 0 or more")
    return int(number)


def _import_master(param: Tensor, saved: dict[str, Any], state: dict[str, Any], name: str) -> None:
    """Fills state["master"] or ["remainder"] from the saved one if it is true to the weight."""
    key = "master" if "master" in saved else "remainder"
    if key not in saved:
        return  # new_state() made it from the weight
    weight, source = local(param.detach()), local(saved[key])
    why_not = _untrue_master(weight, source) if key == "master" else _untrue_remainder(weight, source)
    if why_not:
        warn(f"{name}: {why_not}; the master starts again from the weight", UserWarning)
    elif key == "master" and key in state:
        local(state["master"]).copy_(source)
    else:
        kept = local(state["master"] if "master" in state else state["remainder"])
        for part, given, target in _pieces(weight, source, kept):
            given = given.to(part.device)
            wide = given if key == "master" else join_master(part, given)
            split = target.dtype is torch.int16
            shown, value = split_master(wide) if split else (round_to(wide, part.dtype), wide)
            target.copy_(value)
            if not _same_bits(shown, part):
                part.copy_(shown)


def _untrue_master(weight: Tensor, source: Tensor) -> str | None:
    if source.dtype is not torch.float32:
        return f"the saved master is {source.dtype}, not float32 (another optimizer has cast it)"
    if all(_same_bits(round_to(wide.to(part.device), part.dtype), part) for part, wide in _pieces(weight, source)):
        return None
    return "the saved master does not round to the weight (load the model before the optimizer)"


def _untrue_remainder(weight: Tensor, source: Tensor) -> str | None:
    if source.dtype is torch.int16 and weight.dtype is torch.bfloat16:
        return None
    return f"the saved remainder is {source.dtype} for a {weight.dtype} weight (another optimizer has cast it)"


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the parts of equally shaped tensors; what is computed on one part is small beside the whole."""
    # few enough that launches and looks at the device cost nothing, small enough that 50 bytes an element do not
    limit = min(max(tensors[0].numel() // 128, 2**14), 2**20)
    waiting = [tensors]
    while waiting:
        parts = waiting.pop()
        first = parts[0]
        if first.numel() <= limit:
            yield parts
            continue
        outermost = max(range(first.ndim), key=lambda dim: (first.shape[dim] > 1, first.stride(dim)))
        waiting += zip(*(part.tensor_split(2, outermost) for part in parts), strict=True)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())
