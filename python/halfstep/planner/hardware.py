"""What a job runs on: GPUs, their memory and their links.

Speeds are peaks from data sheets, for dense matrices and one direction of a link; what a job reaches of them is an
assumption of its own (`time.py`). Data sheets of NVLink and PCIe count both directions, so half of that is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .quantities import GB, TB, check_number, parse_bytes, parse_flops, parse_rate


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind in nodes of equal size. Rates are of one GPU, in one direction."""

    name: str
    gpus: int
    gpus_per_node: int
    gpu_memory: int  # bytes
    host_memory: int  # bytes of RAM in a node
    in_node: float  # bytes/s to the other GPUs of its node
    between_nodes: float  # bytes/s to GPUs of other nodes
    host_link: float  # bytes/s to or from the host's memory
    flops_16bit: float  # FLOP/s of bfloat16 and float16 matrix products summed up in float32, without sparsity
    flops_32bit: float  # FLOP/s of float32 without TF32, as torch multiplies by default
    memory_bandwidth: float  # bytes/s

    def __post_init__(self) -> None:
        for name, (low, high, unit) in RANGES.items():
            check_number(name, getattr(self, name), low, high, unit, whole=name in WHOLE)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus={self.gpus}: expected a multiple of gpus_per_node={self.gpus_per_node}, or at most one node"
            )

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def host_memory_per_gpu(self) -> int:
        """Bytes of RAM for each GPU's process."""
        return self.host_memory // min(self.gpus, self.gpus_per_node)

    def host_missing(self, parts: Mapping[str, int]) -> int:
        """Bytes of RAM that each GPU's share of the node lacks for these parts; 0 if it suffices."""
        return max(0, sum(parts.values()) - self.host_memory_per_gpu)


# Field: (least, most, unit). Wide enough for what is announced; they catch a missing unit (80 instead of 80GB).
RANGES: dict[str, tuple[float, float, str]] = {
    "gpus": (1, 1_000_000, ""),
    "gpus_per_node": (1, 1024, ""),
    "gpu_memory": (GB, 10 * TB, "bytes"),
    "host_memory": (GB, 1000 * TB, "bytes"),
    "in_node": (1e8, 1e14, "bytes/s"),
    "between_nodes": (1e7, 1e14, "bytes/s"),
    "host_link": (1e8, 1e14, "bytes/s"),
    "flops_16bit": (1e11, 1e18, "FLOP/s"),
    "flops_32bit": (1e11, 1e18, "FLOP/s"),
    "memory_bandwidth": (1e10, 1e15, "bytes/s"),
}
WHOLE = {"gpus", "gpus_per_node", "gpu_memory", "host_memory"}

# Memory, NVLink/Infinity Fabric, PCIe and peak FLOP/s: vendors' data sheets (NVIDIA A100 80GB 2021; H100 and H200
# Tensor Core GPU 2023; DGX B200 2024; L40S 2023; Ada and Ampere GA102 whitepapers for GeForce; AMD Instinct MI300X
# 2023). Network and RAM: DGX A100 (8 x 200 Gb/s, 1 or 2 TB), DGX H100, H200 and B200 (8 x 400 Gb/s, 2 TB). For the
# rest, which is sold without a system, a usual server: 100 Gb/s for the node, 512 GB of RAM, GPUs that talk over PCIe.
PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100-40gb", 8, 8, 40 * GB, TB, 300e9, 25e9, 32e9, 312e12, 19.5e12, 1555e9),
        Hardware("a100-80gb", 8, 8, 80 * GB, 2 * TB, 300e9, 25e9, 32e9, 312e12, 19.5e12, 2039e9),
        Hardware("h100", 8, 8, 80 * GB, 2 * TB, 450e9, 50e9, 64e9, 989e12, 67e12, 3350e9),
        Hardware("h200", 8, 8, 141 * GB, 2 * TB, 450e9, 50e9, 64e9, 989e12, 67e12, 4800e9),
        Hardware("b200", 8, 8, 180 * GB, 2 * TB, 900e9, 50e9, 64e9, 2250e12, 75e12, 8000e9),
        Hardware("mi300x", 8, 8, 192 * GB, 2 * TB, 448e9, 50e9, 64e9, 1307e12, 163.4e12, 5300e9),
        Hardware("l40s", 8, 8, 48 * GB, 512 * GB, 32e9, 1.5e9, 32e9, 362e12, 91.6e12, 864e9),
        Hardware("rtx-4090", 1, 8, 24 * GB, 512 * GB, 32e9, 1.5e9, 32e9, 165.2e12, 82.6e12, 1008e9),
        Hardware("rtx-3090", 1, 8, 24 * GB, 512 * GB, 32e9, 1.5e9, 32e9, 71e12, 35.6e12, 936e9),
    )
}
DEFAULT_PRESET = "h100"


def hardware(preset: str = DEFAULT_PRESET, **changes: Any) -> Hardware:
    """A preset with some fields changed; those may be texts with units.

    Args:
        preset: a name of PRESETS.
        **changes: fields of Hardware; bytes as 80GB, 80GiB or 640G, rates as 450GB/s or 400Gb/s, FLOP/s as 989T.

    Raises:
        ValueError: an unknown name or unit, or a value out of its range.

    Example:
        >>> from halfstep.planner import hardware
        >>> hardware("a100-80gb", gpus=16, between_nodes="200Gb/s").nodes
        2
    """
    known = PRESETS.get(preset.lower()) if isinstance(preset, str) else None
    if known is None:
        raise ValueError(f"hardware={preset!r}: expected one of {', '.join(PRESETS)}")
    names = {field.name for field in fields(Hardware)}
    for name in changes:
        if name not in names:
            raise ValueError(f"hardware has no field {name!r}: expected one of {', '.join(sorted(names))}")
    return replace(known, **{name: _parsed(name, value) for name, value in changes.items() if value is not None})


def _parsed(name: str, value: Any) -> Any:
    unit = RANGES[name][2] if name in RANGES else None
    if unit == "bytes":
        return parse_bytes(value, name)
    if unit == "bytes/s":
        return parse_rate(value, name)
    return parse_flops(value, name) if unit == "FLOP/s" else value
