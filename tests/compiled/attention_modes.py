"""The modes in which attention's kernels are compiled here, and which accesses of 128 bits each must have.

What kernels are compiled for follows from dtype, head dims and which options are there, not from sizes or numbers: a
case of grouped heads is the same kernel as one without. All modes have two heads of q for one of k.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from compiled.gpus import shared_limit
from compiled.triton_launches import TARGETS, Launch, recording

from halfstep.ops import triton_attention
from halfstep.ops.attention_call import AttentionCall
from halfstep.triton_kernels.attention.segments import Config

ROWS = 256
NOTHING: dict[str, Any] = {
    "mask": None, "bias": None, "alibi_slopes": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None,
    "scale": 0.125, "softcap": 0.0, "left": None, "right": None, "top_left": False, "dropout_p": 0.0,
}  # fmt: skip
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Mode:
    dtype: torch.dtype = BFLOAT16
    dims: tuple[int, int] = (64, 64)  # Dk, Dv
    what: str = "causal"
    tf32: bool = False
    everywhere: bool = False  # on all targets, not only on those that differ most
    options: dict[str, Any] = field(default_factory=lambda: {"right": 0}, hash=False)

    @property
    def name(self) -> str:
        dims = dict.fromkeys(self.dims)  # once if they are the same
        words = [str(self.dtype).removeprefix("torch."), "x".join(map(str, dims)), self.what, "TF32" * self.tf32]
        return ", ".join(word for word in words if word)


def _tensors() -> dict[str, dict[str, Any]]:
    bounds = torch.tensor([0, ROWS // 2, ROWS], dtype=torch.int32)
    return {
        "window": {"left": 64, "right": 64},
        "varlen": {"right": 0, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds},
        "mask": {"mask": torch.ones(2, 1, ROWS, ROWS, dtype=torch.bool)},
        "bias": {"bias": torch.zeros(1, 4, ROWS, ROWS, dtype=BFLOAT16)},
        "alibi": {"right": 0, "alibi_slopes": torch.ones(4)},
        "softcap": {"right": 0, "softcap": 30.0},
        "dropout": {"right": 0, "dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int64)},
    }


# Causal or not is one kernel (launch.py).
MODES = [Mode(dims=(d, d), everywhere=True) for d in (64, 128, 256)]
MODES += [Mode(FLOAT16), Mode(FLOAT32), Mode(FLOAT32, tf32=True)]
MODES += [Mode(what=what, options=options) for what, options in _tensors().items()]
MODES += [Mode(dims=dims) for dims in ((40, 40), (72, 72), (192, 192), (192, 128), (16, 16))]
MODES += [Mode(dims=(128, 128), what=what, options=_tensors()[what]) for what in ("dropout", "bias")]
# Exact products of more than 64 columns spill, whatever the tile: a thread has its operands in registers as a whole.
MODES += [Mode(FLOAT32, dims=(256, 256), tf32=True, everywhere=True)]
TARGETS_OF_ALL = ("sm_80", "sm_90", "gfx942")


@functools.cache
def recorded(target: str) -> dict[str, Launch]:
    """All modes' kernels, by name, as they are launched on a target."""
    modes = [mode for mode in MODES if mode.everywhere or target in TARGETS_OF_ALL]
    return {name: launch for mode in modes for name, launch in launches_of(mode, target).items()}


def launches_of(mode: Mode, target: str, rows: int = ROWS, heads: tuple[int, int] = (4, 2)) -> dict[str, Launch]:
    """`forward_kernel<bfloat16, 64, causal>` and its like; delta, which no option changes, of causal modes."""
    d_k, d_v = mode.dims
    varlen = "cu_seqlens_q" in mode.options
    q, k, v = (
        torch.empty(1 if varlen else 2, of, rows, d, dtype=mode.dtype)
        for of, d in ((heads[0], d_k), (heads[1], d_k), (heads[1], d_v))
    )
    call = AttentionCall(q, k, v, **{**NOTHING, **mode.options})
    with (
        mock.patch.object(triton_attention, "_shared", return_value=shared_memory(target)),
        mock.patch.object(triton_attention, "_precision", return_value="tf32" if mode.tf32 else "ieee"),
        recording(target) as launches,
    ):
        out, lse, log_sum = triton_attention.forward(call)
        needs = (True, True, True, call.bias is not None)
        triton_attention.backward(call, out, lse, log_sum, torch.empty_like(out), None, needs)
    kept = [each for each in launches if each.kernel != "delta_kernel" or (mode.what == "causal" and not mode.tf32)]
    return {f"{each.kernel}<{mode.name}>": each for each in kept}


def shared_memory(target: str) -> int:
    """Bytes that Triton says a program may have."""
    number = int(target.removeprefix("sm_")) if target.startswith("sm_") else target
    if number in (90, 100, 120):  # less what the system takes, which gpus.py only has where a tool adds it
        return shared_limit(number) - 1024
    return shared_limit(number)


# ---- what a mode must move -------------------------------------------------------------------------------------------
def vectors_of(launch: Launch, target: str, size: int) -> tuple[int, int]:
    """How many loads and stores of 128 bits a thread must have, of elements of so many bytes: of q, k, v, and what has
    their rows. What both loops over blocks read is there twice."""
    c: Config = launch.constant("C")
    threads = launch.options["num_warps"] * TARGETS[target].warp_size

    def chunks(rows: int, width: int) -> int:
        return rows * width * size // (16 * threads)  # none where there is less than 16 bytes a thread

    q, k = chunks(c.BLOCK_M, c.WIDTH_K), chunks(c.BLOCK_N, c.WIDTH_K)
    d_out, v = chunks(c.BLOCK_M, c.WIDTH_V), chunks(c.BLOCK_N, c.WIDTH_V)
    return {
        "forward_kernel": (q + 2 * (k + v), d_out),
        "keys_kernel": (k + v + 2 * (q + d_out), k + v),
        "queries_kernel": (q + d_out + 2 * (k + v), q),
        "bias_kernel": (q + k + v + d_out, 0),
        "delta_kernel": (2 * d_out, 0),
    }[launch.kernel]
