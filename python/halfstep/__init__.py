"""halfstep: the memory- and time-hungry half of a mixed-precision training step. `import halfstep as hs`."""

from typing import TYPE_CHECKING, Any

from . import integrations as integrations
from ._version import __version__
from .accumulate import Accumulator
from .activations import ByteBudget, checkpoint, measure_activations, offload_activations
from .attention import attention, attention_varlen
from .attention_tuning import tune_attention
from .batch_norm import EffectiveBatchNorm
from .cast import accumulate_, cast_
from .gradients import clip_grad_norm_, grad_stats, l2_norms, unscale_
from .optim import Adam, AdamW
from .scaler import LossScaler

if TYPE_CHECKING:
    from .planner import plan

__all__ = [
    "Accumulator",
    "Adam",
    "AdamW",
    "ByteBudget",
    "EffectiveBatchNorm",
    "LossScaler",
    "__version__",
    "accumulate_",
    "attention",
    "attention_varlen",
    "cast_",
    "checkpoint",
    "clip_grad_norm_",
    "grad_stats",
    "l2_norms",
    "measure_activations",
    "offload_activations",
    "plan",
    "tune_attention",
    "unscale_",
]


def __getattr__(name: str) -> Any:
    """The planner is imported when it is first asked for: a training run does without its 30 modules."""
    if name == "plan":
        from .planner import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
