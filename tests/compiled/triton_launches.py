"""The launches of the Triton kernels as a GPU would see them, without one: what each kernel is compiled for.

Triton's own launcher is asked: under a driver that only names a target it binds and specialises the arguments of real
calls, and a hook of Triton's writes them down and stops it before it compiles. So signatures, constants, alignments
and warps are those of triton_kernels/launch.py and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)

_DTYPES = ("float32", "bfloat16", "float16")  # by their codes (triton_kernels/elements.py)
_HELD = ("", "trusted master", "checked master", "split master")  # triton_kernels/update.py
_WORDS = {"DTYPE": "{}", "PARAM_DTYPE": "{}", "GRAD": "grad {}", "STATE": "states {}", "DST": "to {}", "SRC": "from {}"}
_TILES = ("SHARE", "BLOCK", "REST", "CHUNK")  # how much a program takes: no mode of its own


@dataclass(frozen=True)
class Launch:
    """What one mode of a kernel is compiled for: plain data, which can go to another process."""

    module: str
    kernel: str
    signature: dict[str, Any]  # parameter -> type
    constants: dict[tuple[int, ...], Any]  # path of a parameter -> value
    attributes: dict[tuple[int, ...], Any]  # path of a parameter -> what is known of its value
    options: dict[str, Any]  # warps and the like

    def constant(self, name: str) -> Any:
        return self.constants[(tuple(self.signature).index(name),)]

    @property
    def mode(self) -> tuple[tuple[str, Any], ...]:
        names = tuple(self.signature)
        return tuple((names[path[0]], value) for path, value in self.constants.items() if names[path[0]] not in _TILES)

    @property
    def name(self) -> str:
        """`update_kernel<bfloat16, grad bfloat16, states float32, checked master>`."""
        words = [word for name, value in self.mode if (word := _word(name, value))]
        return f"{self.kernel}<{', '.join(words)}>" if words else self.kernel


def _word(name: str, value: Any) -> str:
    if value is None:
        return f"no {name}"
    if isinstance(value, bool):
        return name.lower().replace("_", " ") if value else ""
    if name == "HELD":
        return _HELD[value]
    return _WORDS[name].format(_DTYPES[value]) if name in _WORDS else f"{name}={value}"


class _Driver:
    """Names a target; there is nothing to launch on."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target]

    def get_current_device(self) -> str:
        return self._target  # kernels keep under this what they know of the target

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """What is launched within is written down, once for each form, and neither compiled nor run."""
    launches: list[Launch] = []

    def write_down(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}
        (attributes,) = compile["configs"]
        launch = Launch(fn.module, fn.name, compile["signature"], compile["constants"], attributes, options)
        if launch not in launches:
            launches.append(launch)
        return True  # which stops it

    runtime, driver = triton.knobs.runtime, triton.runtime.driver
    before = driver._active, runtime.jit_cache_hook
    driver.set_active(_Driver(target))  # pyright: ignore[reportArgumentType]
    runtime.jit_cache_hook = write_down
    try:
        yield launches
    finally:
        driver._active, runtime.jit_cache_hook = before
