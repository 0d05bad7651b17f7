"""What transformers' layers need: their own checkpointing is not used twice, and no cache is filled twice."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_known_layer(module: nn.Module) -> bool:
    """Whether transformers says that this is a layer to checkpoint. It is not imported: who has one has imported it."""
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def require_no_other_checkpointing(model: nn.Module) -> None:
    """transformers' switch is an attribute of layers, in older versions of the module around them."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"gradient checkpointing of transformers is on in {name or type(module).__name__!r}, so every "
                "activation would be recomputed twice; call model.gradient_checkpointing_disable() (and leave "
                "gradient_checkpointing out of TrainingArguments), or do without halfstep.checkpoint"
            )


def without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(args, kwargs) with None in place of caches of keys and values, which the recomputation would fill again; None if
    there are none. Layers that only read the cache keep it, as under transformers' own checkpointing."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or getattr(module, "_can_checkpoint_with_cache", False):
        return None
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, caches.Cache)]
    if not given:
        return None
    for cache in given:
        if cache.get_seq_length() > 0:
            raise ValueError(
                f"a checkpointed block cannot record gradients with a cache that holds keys and values already; got a "
                f"{type(cache).__name__} of length {cache.get_seq_length()}: undo the checkpoint with "
                "halfstep.checkpoint(model, None), or run under torch.no_grad()"
            )
    args = tuple(None if isinstance(value, caches.Cache) else value for value in args)
    kwargs = {key: None if isinstance(value, caches.Cache) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


CACHE_LEFT_OUT = (
    "halfstep.checkpoint leaves the cache of keys and values out while gradients are recorded, since the recomputation "
    "would fill it again: set model.config.use_cache = False (or pass use_cache=False) to say the same"
)
