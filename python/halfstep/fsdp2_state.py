"""What FSDP2's modules keep to themselves: the one place that reads it, since there is no public way to ask."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .ops.layout import NARROW


def is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is one
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.10 has one or none
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def check_settings(part: Any, params: Sequence[Tensor], at_the_end: bool) -> None:
    """ValueError for settings with which sums would be wrong or in 16 bits."""
    if any(group.gradient_divide_factor is not None for group in _groups(part)):
        raise ValueError(
            "set_gradient_divide_factor() was called on an FSDP2 module; the accumulator divides by the number of "
            "valid tokens of all ranks. Leave the factor as fully_shard() sets it"
        )
    policy = part._get_fsdp_state()._mp_policy
    sums = policy.reduce_dtype or policy.param_dtype or next((p.dtype for p in params if p.dtype in NARROW), None)
    if at_the_end and sums in NARROW:
        raise ValueError(
            f'sync="last" lets FSDP2 add up gradients in {sums}, which stalls. Give fully_shard() '
            'MixedPrecisionPolicy(..., reduce_dtype=torch.float32), or use sync="every", whose sums are float32'
        )


def drop_unreduced(part: Any) -> None:
    """Sums of whole gradients that the module keeps for a later reduction."""
    for group in _groups(part):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):  # since its first forward
                param._unsharded_param.grad = None
