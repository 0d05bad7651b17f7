"""Where numbers are: on the host, which reads them at once, or on a device, which makes whoever reads them wait.

The one place that asks, and the one place where a test makes the CPU look like a device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """True if reading a tensor there waits for nothing."""
    return device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """True while the current stream's work on the device is recorded in a CUDA graph instead of done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream(device: torch.device) -> int:
    """The caller's current stream there, as a number; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def scalar_on(value: Tensor, device: torch.device, dtype: torch.dtype, name: str) -> Tensor:
    """A 1-element tensor as a 0-d one of this dtype on this device. Waits only if the value has to come to the host.

    Raises:
        ValueError: more or less than one element.
        RuntimeError: it is on the host and the device captures a CUDA graph, which would keep today's value.
    """
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, got shape {tuple(value.shape)}")
    if value.device != device and is_host(value.device) and not torch.compiler.is_compiling():
        if is_capturing(device):
            raise RuntimeError(
                f"{name} is on {value.device}, so a CUDA graph would replay the value it has now; make it a tensor on "
                f"{device}"
            )
        return torch.full((), value.item(), dtype=dtype, device=device)  # a copy from unpinned memory would wait
    return value.to(device, dtype).reshape(())
