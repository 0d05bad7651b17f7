"""Which backend runs an operator, by device: native if built, else Triton, else the plain-PyTorch reference.

Attention has no native kernels: Triton on GPUs, else plain PyTorch.

The one place that decides, and the one place a test can redirect (`override`).
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from . import attention_torch, native_cpu, native_cuda, reference_torch, triton_gpu

NAMES = ("native", "triton", "reference")
OPERATORS = ("grad_stats", "adam_", "unscale_", "cast_", "clip_grad_norm_", "l2_norms", "accumulate_")

_ATTENTION_ON_CPU = "torch's matrix products over chunks of queries, float32 inside: memory linear in the length"

# None, or what stands in for every backend: see `override`.
_override: Any = None


def native_cpu_module() -> tuple[ModuleType | None, str | None]:
    """(halfstep._cpu, None), or (None, why it cannot be used)."""
    return _native_module("halfstep._cpu", "C++ compiler")


def native_cuda_module() -> tuple[ModuleType | None, str | None]:
    """(halfstep._cuda, None), or (None, why it cannot be used). It loads without a driver and without a device."""
    return _native_module("halfstep._cuda", "nvcc")


@cache
def _native_module(name: str, compiler: str) -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as error:
        if error.name != name:
            return None, f"{name} failed to import: {error}"
        return None, f"{name} is not built (no {compiler} at install time?)"
    except ImportError as error:
        return None, f"{name} does not load here: {error}"


def choose(device: torch.device, forced: str | None = None) -> Any:
    """The backend for tensors on `device`.

    Args:
        forced: None, or one of "native", "triton", "reference" (the optimizers' `backend=`).

    Raises:
        ValueError: `forced` is none of those.
        RuntimeError: `forced` is not available for this device; the message says why.
    """
    if forced is not None and forced not in NAMES:
        raise ValueError(f"backend={forced!r}: expected None, 'native', 'triton' or 'reference'")
    if _override is not None:
        return _override
    if forced == "reference":
        return reference_torch
    chosen, why_not = _native_for(device) if forced != "triton" else _triton_for(device)
    if chosen is None and forced is None:
        chosen, no_triton = _triton_for(device)
        why_not = f"{why_not}; {no_triton}"
    if chosen is not None:
        return chosen
    if forced is None:
        _say_once(device.type, why_not)
        return reference_torch
    raise RuntimeError(
        f"backend={forced!r} cannot run on {device.type} tensors: {why_not}; leave backend=None to use what is there"
    )


def choose_attention(device: torch.device) -> Any:
    """What has attention_forward and attention_backward for tensors on `device`."""
    if _override is not None:
        return _override.with_attention()
    if device.type == "cpu":
        return attention_torch
    chosen, why_not = _triton_for(device)
    if chosen is None:
        _say_once(device.type, why_not)
        return attention_torch
    return chosen


def why_no_triton_attention(device: torch.device) -> str | None:
    """Why attention does not run on Triton's kernels there; None if it does, or if an override has its place."""
    if _override is not None:
        return None
    return "Triton's kernels run on GPUs" if device.type == "cpu" else triton_gpu.why_not(device)


def _triton_for(device: torch.device) -> tuple[Any, str | None]:
    why_not = triton_gpu.why_not(device)
    return (None if why_not else triton_gpu.of_device(device)), why_not


def _native_for(device: torch.device) -> tuple[Any, str | None]:
    if device.type == "cpu":
        module, why_not = native_cpu_module()
        return (native_cpu if module else None), why_not
    if device.type == "cuda" and torch.version.hip is None:
        return _native_for_cuda(device)
    return None, f"halfstep has no native kernels for {device.type} tensors in this version"


@cache
def _native_for_cuda(device: torch.device) -> tuple[Any, str | None]:
    module, why_not = native_cuda_module()
    if module is None:
        return None, why_not
    try:
        module.device_count()  # torch found a device, but may be built with an older CUDA than ours
    except RuntimeError as error:
        return None, str(error).removeprefix("halfstep, ")  # the callers say whose words these are
    capability = torch.cuda.get_device_capability(device)
    if not native_cuda.covers(module.archs, capability):
        arch = "".join(map(str, capability))
        return None, (
            f"halfstep._cuda has no code for this GPU (sm_{arch}; it was built for {module.archs}): rebuild halfstep "
            f"with CUDAARCHS={arch} in the environment"
        )
    return native_cuda.of_module(module), None


@cache
def _say_once(device: str, why: str) -> None:
    warnings.warn(
        f"halfstep: {why}; plain PyTorch runs on {device} tensors instead, with the same results and many times slower "
        "(`halfstep doctor` says more)",
        RuntimeWarning,
        stacklevel=2,
    )


@contextmanager
def override(backend: Any) -> Iterator[Counter[str]]:
    """For tests: every public function goes to `backend` (a module like native_cpu), whatever the device.

    Yields a Counter of the backend's operators by name (a plan's methods count as "AdamPlan.update" ...).
    """
    global _override
    counts: Counter[str] = Counter()
    previous, _override = _override, _Counting(backend, counts)
    try:
        yield counts
    finally:
        _override = previous


class _Counting:
    """A backend, or one of its plans, whose calls are counted."""

    def __init__(self, target: Any, counts: Counter[str], prefix: str = "") -> None:
        self._target, self._counts, self._prefix = target, counts, prefix
        self.name = getattr(target, "name", "override")

    def with_attention(self) -> _Counting:
        """Itself, or plain PyTorch's attention where the target has none."""
        return self if hasattr(self._target, "attention_forward") else _Counting(attention_torch, self._counts)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._target, attribute)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._counts[self._prefix + attribute] += 1
            result = found(*args, **kwargs)
            return _Counting(result, self._counts, "AdamPlan.") if attribute == "AdamPlan" else result

        return call


def report() -> dict[str, Any]:
    """What `halfstep doctor` shows: what is built, and which backend each operator takes on each device, and why."""
    module, error = native_cpu_module()
    isas = list(module.supported_isas()) if module else []
    if module:
        slow = "; C++ cannot read this torch's tensors, so a step costs some microseconds of Python for each of them"
        cpu = (
            "native",
            f"C++ kernels for {isas[-1]}, the best of this build that this machine runs"
            + ("" if native_cpu.tensor_reader() else slow),
        )
    else:
        cpu = ("reference", f"{error}; plain PyTorch runs instead: the same results, many times slower")
    return {
        "native_cpu": {
            "built": module is not None,
            "error": error,
            "isa": isas[-1] if isas else None,
            "isas": isas,
            "compiled_isas": list(module.compiled_isas()) if module else [],
        },
        "native_cuda": _cuda_report(),
        "triton": _triton_report(),
        "operators": {
            **{name: {"cpu": cpu, "cuda": _cuda_choice()} for name in OPERATORS},
            "attention": {"cpu": ("torch", _ATTENTION_ON_CPU), "cuda": _cuda_attention()},
        },
    }


def _cuda_report() -> dict[str, Any]:
    module, error = native_cuda_module()
    here = torch.cuda.is_available() and torch.version.hip is None
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if here else []
    return {
        "built": module is not None,
        "error": error,
        "code_for": native_cuda.arch_names(module.archs) if module else [],
        # of each device that torch sees, why the kernels do not run on it; None if they do
        "devices": [_native_for_cuda(device)[1] for device in devices],
    }


def _triton_report() -> dict[str, Any]:
    installed = triton_gpu.installed()
    if not torch.cuda.is_available():
        why = "for GPUs that have no native kernels; no device here" if installed else triton_gpu.NOT_INSTALLED
        return {"installed": installed, "used": False, "why": why}
    device = torch.device("cuda", 0)
    native, no_native = _native_for(device)
    why_not = triton_gpu.why_not(device)
    if native is not None:
        return {"installed": installed, "used": False, "why": "the native kernels run instead"}
    return {"installed": installed, "used": why_not is None, "why": why_not or no_native}


def _cuda_choice() -> tuple[str, str]:
    """(backend, why) for CUDA tensors: of the first device, or of one that the kernels were built for."""
    here = torch.cuda.is_available()
    device = torch.device("cuda", 0)
    native, why_not = _native_for(device) if here else native_cuda_module()
    without = "" if here else "; no device here"
    if native is not None:
        cost = "three launches a step for up to 580 tensors of one usual kind, at most six for 1,000 small ones"
        return "native", f"CUDA kernels, {cost}{without}"
    no_triton = triton_gpu.why_not(device) if here else (None if triton_gpu.installed() else triton_gpu.NOT_INSTALLED)
    if no_triton is None:
        return "triton", f"Triton kernels, compiled at their first use: the same results{without}. {why_not}"
    return "reference", f"{why_not}; {no_triton}; plain PyTorch runs instead: the same results, many times slower"


def _cuda_attention() -> tuple[str, str]:
    """The same for attention."""
    here = torch.cuda.is_available()
    why_not = triton_gpu.why_not(torch.device("cuda", 0)) if here else None
    if not here and not triton_gpu.installed():
        why_not = triton_gpu.NOT_INSTALLED
    if why_not is None:
        return "triton", f"Triton kernels, compiled at their first use{'' if here else '; no device here'}"
    return "torch", f"{why_not}; plain PyTorch runs instead, over chunks of queries: many times slower"
