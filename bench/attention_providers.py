"""Who computes attention in the bench: hs.attention, SDPA with one backend each, FlexAttention, flash-attn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfstep as hs
from halfstep.bench.attention_truth import Job
from halfstep.bench.clocks import Runner
from halfstep.bench.harness import UnavailableError
from halfstep.ops import backend

OURS, MATH = "halfstep", "torch SDPA, math"
_SDPA = {
    "torch SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "torch SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch SDPA, cudnn": SDPBackend.CUDNN_ATTENTION,
    MATH: SDPBackend.MATH,
}
ON_CPU = [OURS, MATH]
ON_GPU = [OURS, *_SDPA, "FlexAttention", "flash-attn"]
_BYTES_OF_A_SCORE = 12  # of SDPA's math: it holds several matrices in float32

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ready(name: str, job: Job, qkv: Sequence[Tensor], d_out: Tensor, backward: bool) -> Runner:
    """A provider that has run once. UnavailableError where it is not there, or cannot do this job on this device."""
    attention = _attention(name, job, qkv[0])
    runner = Backward(attention, qkv, d_out) if backward else Forward(attention, qkv)
    if name == OURS:
        return runner
    with warnings.catch_warnings():  # torch says in warnings why a backend of SDPA does not run
        warnings.simplefilter("ignore")
        try:
            runner.prepare()
            runner()
        except torch.OutOfMemoryError as error:
            raise UnavailableError("it runs out of memory") from error
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise UnavailableError(f"it does not do this here: {str(error).splitlines()[0]}") from error
    return runner


def _attention(name: str, job: Job, q: Tensor) -> Attention:
    if name == OURS:
        why_not = None if q.device.type == "cpu" else backend._triton_for(q.device)[1]
        if why_not:
            raise UnavailableError(why_not)
        window = None if job.window is None else (job.window - 1, 0)
        return lambda q, k, v: hs.attention(q, k, v, causal=job.causal, window=window)
    if name in _SDPA:
        return _sdpa(name, job, q)
    return {"FlexAttention": _flex, "flash-attn": _flash_attn}[name](job, q)


def _sdpa(name: str, job: Job, q: Tensor) -> Attention:
    needed = _BYTES_OF_A_SCORE * q.shape[0] * q.shape[1] * q.shape[2] ** 2
    if name == MATH and q.device.type == "cuda" and needed > torch.cuda.mem_get_info(q.device)[0] / 2:
        raise UnavailableError(f"its matrices of scores take some {needed / 2**30:.0f} GiB")
    hidden = job.hidden(slice(None), q.shape[2], q.device) if job.window else None
    mask = None if hidden is None else ~hidden

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([_SDPA[name]]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=job.causal and mask is None)

    return attention


def _flex(job: Job, q: Tensor) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # after some shapes dynamo would compile no more, and hold the scores in memory
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    length, block_mask = q.shape[2], None
    if job.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, q.device.type)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def _flash_attn(job: Job, q: Tensor) -> Attention:
    try:
        flash_attn: Any = importlib.import_module("flash_attn")
    except ImportError as error:
        raise UnavailableError(f"flash-attn cannot be imported: {error}") from error

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, length, heads, dim]
        return flash_attn.flash_attn_func(q, k, v, causal=job.causal).transpose(1, 2)

    return attention


class Forward(Runner):
    """With what a backward pass would need kept."""

    def __init__(self, attention: Attention, qkv: Sequence[Tensor]) -> None:
        self._attention, self._qkv = attention, qkv
        self._out: Tensor | None = None

    def prepare(self) -> None:
        self._out = None

    def __call__(self) -> None:
        self._out = self._attention(*self._qkv)

    def results(self) -> dict[str, Sequence[Tensor]]:
        assert self._out is not None
        return {"out": [self._out]}


class Backward(Runner):
    """After a forward pass that is not timed."""

    def __init__(self, attention: Attention, qkv: Sequence[Tensor], d_out: Tensor) -> None:
        self._attention, self._qkv, self._d_out = attention, qkv, d_out
        self._out: Tensor | None = None
        self._gradients: Sequence[Tensor] = ()

    def prepare(self) -> None:
        self._gradients = ()
        self._out = self._attention(*self._qkv)

    def __call__(self) -> None:
        assert self._out is not None
        self._gradients = torch.autograd.grad(self._out, self._qkv, self._d_out)

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {name: [x] for name, x in zip(("dq", "dk", "dv"), self._gradients, strict=True)}
