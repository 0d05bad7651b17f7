"""Hyper-parameters of parameter groups, checked whenever they change: schedulers and users write them at any time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ops import devices
from .ops.optimizer import AdamGroup

_NUMBERS = frozenset((float, int, bool))


def number(value: Any, name: str) -> float:
    """A number or 1-element tensor as float (waits for its device); TypeError or ValueError if it is neither."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}")
        return float(value)
    if isinstance(value, (int, float)) or hasattr(type(value), "__float__"):
        return float(value)
    raise TypeError(f"{name}={value!r}: expected a number or a 1-element tensor, got {type(value).__name__}")


def adam_group(group: dict[str, Any], index: int) -> AdamGroup:
    """The numbers of one group; ValueError or TypeError names the group if one of them is out of range.

    A learning rate on a device stays there, unread and unchecked; every other tensor is read.
    """
    lr = group["lr"]
    lr = _rate_on_a_device(lr, index) if _is_on_a_device(lr) else _not_negative(lr, "lr", index)
    eps, weight_decay = (_not_negative(group[key], key, index) for key in ("eps", "weight_decay"))
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"parameter group {index}: betas={betas!r}: expected two numbers in [0, 1)")
    beta1, beta2 = (number(beta, f"parameter group {index}: betas") for beta in betas)
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"parameter group {index}: betas={betas}: expected two numbers in [0, 1)")
    decoupled = bool(group["decoupled_weight_decay"])
    return AdamGroup(lr, beta1, beta2, eps, weight_decay, decoupled, bool(group["maximize"]))


def groups_on(groups: list[AdamGroup], device: torch.device) -> list[AdamGroup]:
    """The groups as rows on this device take them: learning rates that are tensors on it, or numbers on the host."""
    if not any(isinstance(group.lr, Tensor) for group in groups):
        return groups
    moved = []
    for index, group in enumerate(groups):
        lr = group.lr
        if isinstance(lr, Tensor):
            lr = _not_negative(lr, "lr", index) if devices.is_host(device) else lr.to(device)
        moved.append(group._replace(lr=lr))
    return moved


def _not_negative(value: Any, key: str, index: int) -> float:
    value = number(value, f"parameter group {index}: {key}")
    if not 0 <= value < math.inf:
        raise ValueError(f"parameter group {index}: {key}={value}: expected a finite number >= 0")
    return value


def _is_on_a_device(value: Any) -> bool:
    return isinstance(value, Tensor) and not devices.is_host(value.device)


def _rate_on_a_device(lr: Tensor, index: int) -> Tensor:
    """0-d float32 or float64, sharing lr's memory if it is one of these. Looking at its value would wait."""
    if lr.numel() != 1:
        raise ValueError(f"parameter group {index}: lr must have one element, got shape {tuple(lr.shape)}")
    wide = lr if lr.dtype in (torch.float32, torch.float64) else lr.double()
    return wide.detach().reshape(())


def merged_group(index: int, mine: dict[str, Any], saved: dict[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    """A group with the saved hyper-parameters, our parameters and what to keep, and no tensor shared with the saved.

    Args:
        index: of the group, for messages.
        mine, saved: our group and the checkpoint's.
        keep: keys whose value no checkpoint changes.
    """
    ours = ("params", "param_names")
    for key, value in saved.items():
        if key not in ours and isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"parameter group {index}: the saved {key} is on the meta device, which holds no numbers; read the "
                "checkpoint with map_location='cpu'"
            )
    taken = {k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items() if k not in (*ours, *keep)}
    return {**mine, **taken}


class GroupNumbers:
    """The numbers of all groups at this step. What is the same as in the step before is not checked again."""

    def __init__(self) -> None:
        self._written: list[tuple] = []
        self._groups: list[AdamGroup] = []

    def __call__(self, param_groups: Sequence[dict[str, Any]]) -> list[AdamGroup]:
        written = [_written(group) for group in param_groups]
        plain = all(map(_all_numbers, written))
        if not plain or written != self._written:
            self._groups = [adam_group(group, index) for index, group in enumerate(param_groups)]
            self._written = written if plain else []  # a tensor is equal to the float it rounds to, and may be filled
        return self._groups


def _written(group: dict[str, Any]) -> tuple:
    betas = group["betas"]
    ends = tuple(betas) if isinstance(betas, (tuple, list)) else (betas,)
    return (group["lr"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"], group["maximize"], *ends)


def _all_numbers(values: tuple) -> bool:
    """Tensors are read anew at every step: they may be written in place."""
    return _NUMBERS.issuperset(map(type, values))
