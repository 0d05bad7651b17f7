"""Into how many parts a model can be split: what `layouts` tries, and what is wrong with a number that was given."""

from __future__ import annotations

from .hardware import Hardware
from .memory import Model
from .model import ModelShape


def splits(model: ModelShape, hardware: Hardware, tensor: int) -> bool:
    """Whether each layer's heads, KV heads and FFN can be split evenly over `tensor` GPUs of one node."""
    return tensor <= hardware.gpus_per_node and not any(
        size % tensor for size in (model.heads, model.kv_heads, model.ffn)
    )


def stages(model: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> bool:
    """Whether every stage has a layer, and the GPUs are a multiple of what one replica takes."""
    return pipeline <= model.layers and hardware.gpus % (tensor * pipeline) == 0


def check_degrees(model: Model, hardware: Hardware, tensor: int | None, pipeline: int | None) -> None:
    """Raises with the field, its value and what it may be."""
    if not isinstance(model, ModelShape):
        for name, value in (("tensor_parallel", tensor), ("pipeline_parallel", pipeline)):
            if value not in (None, 1):
                raise ValueError(f"{name}={value}: expected 1 or None for a measured model; plan its shape instead")
        return
    if tensor is not None:
        numbers = range(1, hardware.gpus_per_node + 1)
        possible = [n for n in numbers if splits(model, hardware, n) and stages(model, hardware, n, 1)]
        sizes = f"gpus={hardware.gpus:,}, heads={model.heads}, kv_heads={model.kv_heads} and ffn={model.ffn}"
        most = f"at most gpus_per_node={hardware.gpus_per_node}"
        _check("tensor_parallel", tensor, possible, f"which divides {sizes} and is {most}")
    if pipeline is not None:
        possible = [n for n in range(1, model.layers + 1) if stages(model, hardware, tensor or 1, n)]
        split = f" / tensor_parallel={tensor}" if tensor is not None and tensor > 1 else ""
        reason = f"which divides gpus={hardware.gpus:,}{split} and is at most layers={model.layers}"
        _check("pipeline_parallel", pipeline, possible, reason)


def _check(name: str, value: int, possible: list[int], reason: str) -> None:
    if value not in possible:
        raise ValueError(f"{name}={value:,}: expected {', '.join(map(str, possible))}, {reason}")
