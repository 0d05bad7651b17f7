"""Launches of attention's kernels. Tensors are [batch, heads, rows, D] on the current device, and `movable`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import backward as second
from . import bias as biases
from . import choices
from . import forward as first
from .scores import LOG2E, Rules, Stats
from .segments import Config
from .tiles import Tile, tile

# Triton's interpreter is in place of its compiler (TRITON_INTERPRET=1)
INTERPRETED = not isinstance(first.forward_kernel, triton.JITFunction)
LONGEST = 2**29  # rows: positions, their differences and ends of blocks stay within int32
_STRIDE = 2**23  # elements: a tile's offsets stay within int32
_PROGRAMS = 512  # that the gradient of a bias is shared out to, at least


def plain(n: int) -> int:
    """Of a number that goes to a kernel in a tuple. Triton would compile another kernel for a 1, and for a multiple of
    16; this is never one of them."""
    return 4 * n + 2


def reachable(x: Tensor) -> bool:
    """Whether the rows of a tile lie within int32 of each other."""
    return x.stride(2) < _STRIDE


def movable(x: Tensor) -> Tensor:
    """x, or a copy of it: the last dim contiguous, all else at multiples of 8 elements and of 16 bytes."""
    strides = x.stride()
    steps = [step for step, size in zip(strides[:-1], x.shape[:-1], strict=True) if size > 1]
    good = strides[-1] == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in steps)
    return x if good and reachable(x) else x.clone(memory_format=torch.contiguous_format)


class Operands(NamedTuple):
    """What all kernels of a call get."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    rules: Rules
    top_left: bool
    is_plain: bool
    precision: str  # of float32 dot products: "ieee" or "tf32"
    shared_memory: int  # bytes that a program may have; 0 is the interpreter

    @property
    def kind(self) -> str:
        """Of work, as tiles.py sorts it."""
        if self.q.element_size() > 2:
            return "tf32" if self.precision == "tf32" else "exact"
        d_k, d_v = self.q.shape[3], self.v.shape[3]
        padded = max(_width(d_k), _width(d_v)) <= 64 and (_width(d_k), _width(d_v)) != (d_k, d_v)
        plain = self.is_plain and self.rules.mask is None and self.rules.seed is None and not padded
        return "plain" if plain else "heavy"

    @property
    def segments(self) -> int:
        return self.q.shape[0] if self.cu_q is None else self.cu_q.numel() - 1

    @property
    def shape(self) -> tuple[int, ...]:
        heads = self.q.shape[1]
        sizes = (heads, heads // self.k.shape[1], self.q.shape[2], self.k.shape[2], self.segments)
        return tuple(map(plain, sizes))

    def blocks(self, cu: Tensor | None, x: Tensor, size: int) -> int:
        """Blocks of `size` rows of all segments and heads of x, or some more."""
        rows = x.shape[2]
        return x.shape[1] * (self.segments * triton.cdiv(rows, size) if cu is None else rows // size + self.segments)

    def tile(self, kernel: str) -> Tile:
        width = max(_width(self.q.shape[3]), _width(self.v.shape[3]))
        if choices.anything():
            return choices.tile_of(self._work(kernel), width, self.shared_memory)
        return tile(kernel, width, self.kind, self.shared_memory)

    def _work(self, kernel: str) -> choices.Work:
        q, v = self.q, self.v
        rules = [name for name, value in self.rules._asdict().items() if value is not None]
        lengths = (self.segments, q.shape[2], self.k.shape[2])
        return choices.Work(
            str(q.device), kernel, (q.shape[3], v.shape[3]), str(q.dtype), self.kind,
            tuple(rules if self.cu_q is None else [*rules, "cu_seqlens"]), tuple(map(choices.bucket, lengths)),
        )  # fmt: skip

    def config(self, t: Tile) -> Config:
        d_k, d_v = self.q.shape[3], self.v.shape[3]
        upcast = INTERPRETED and self.q.dtype == torch.bfloat16
        return Config(
            d_k,
            d_v,
            _width(d_k),
            _width(d_v),
            t.block_m,
            t.block_n,
            t.edge_stages,
            self.is_plain,
            self.top_left,
            upcast,
            self.precision,
        )


def _width(d: int) -> int:
    """Columns of a tile: powers of 2, at least what a dot product takes."""
    return max(16, triton.next_power_of_2(d))


def rows_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Strides of batch, head and row in units of 8 elements."""
    return tuple(None if t is None else tuple(plain(step // 8) for step in t.stride()[:3]) for t in tensors)


def _options(t: Tile) -> dict[str, Any]:
    return {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": True}


def forward(a: Operands, out: Tensor, lse: Tensor, log_sum: Tensor | None) -> None:
    t = a.tile("forward")
    first.forward_kernel[(a.blocks(a.cu_q, a.q, t.block_m),)](
        a.q, a.k, a.v, out, lse, log_sum, a.cu_q, a.cu_k, rows_of(a.q, a.k, a.v, out), a.shape, a.rules, a.config(t),
        **_options(t),
    )  # fmt: skip


def row_stats(
    a: Operands, out: Tensor, d_out: Tensor, lse: Tensor, log_sum: Tensor | None, d_lse: Tensor | None
) -> Stats:
    """What the other kernels of the backward pass read."""
    size = 32 if INTERPRETED else max(16, 4096 // _width(out.shape[3]))  # rows
    stats, t = Stats(torch.empty_like(lse), log_sum, torch.empty_like(lse)), Tile(size, 16, 4, 1, 1)
    second.delta_kernel[(triton.cdiv(out.shape[2], size) * out.shape[0] * out.shape[1],)](
        out, d_out, lse, d_lse, stats, rows_of(out, d_out), a.shape, size, a.config(t), **_options(t)
    )
    return stats


def keys(a: Operands, d_out: Tensor, stats: Stats, d_k: Tensor | None, d_v: Tensor | None) -> None:
    t = a.tile("keys")
    second.keys_kernel[(a.blocks(a.cu_k, a.k, t.block_n),)](
        a.q, a.k, a.v, d_out, d_k, d_v, stats, a.cu_q, a.cu_k, rows_of(a.q, a.k, a.v, d_out, d_k, d_v), a.shape,
        a.rules, a.config(t), **_options(t),
    )  # fmt: skip


def queries(a: Operands, d_out: Tensor, stats: Stats, d_q: Tensor) -> None:
    t = a.tile("queries")
    second.queries_kernel[(a.blocks(a.cu_q, a.q, t.block_m),)](
        a.q, a.k, a.v, d_out, d_q, stats, a.cu_q, a.cu_k, rows_of(a.q, a.k, a.v, d_out, d_q), a.shape, a.rules,
        a.config(t), **_options(t),
    )  # fmt: skip


def bias(a: Operands, d_out: Tensor, stats: Stats, bias: Tensor) -> Tensor:
    """The gradient of a bias of 4 sizes, each of them 1 or the scores'."""
    t = a.tile("bias")
    batch, heads, q_length, k_length = a.q.shape[0], a.q.shape[1], a.q.shape[2], a.k.shape[2]
    batches, b_heads, queries, keys = bias.shape
    tiles_m, tiles_n = triton.cdiv(q_length, t.block_m), triton.cdiv(k_length, t.block_n)
    shared = (batch // batches, heads // b_heads, tiles_m if queries == 1 else 1, tiles_n if keys == 1 else 1)
    tiles = batches * b_heads * triton.cdiv(queries, t.block_m) * triton.cdiv(keys, t.block_n)
    shares = min(math.prod(shared), triton.cdiv(_PROGRAMS, tiles))
    dtype = stats.delta.dtype if shares > 1 or INTERPRETED else bias.dtype
    d_bias = torch.empty((shares, *bias.shape), dtype=dtype, device=bias.device)
    biases.bias_kernel[(tiles * shares,)](
        a.q, a.k, a.v, d_out, d_bias, stats, rows_of(a.q, a.k, a.v, d_out),
        tuple(map(plain, (*bias.shape, shares, *shared))), a.shape, a.rules, a.config(t), **_options(t),
    )  # fmt: skip
    return d_bias.sum(0).to(bias.dtype)


def rules(
    scale: float, softcap: float, left: int | None, right: int | None, mask: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, seed: Tensor | None, drop_below: int, dropout_p: float, sizes: tuple[int, int, int, int],
) -> tuple[Rules, bool]:  # fmt: skip
    """And whether scores may stay unscaled until their exponentials (PLAIN).

    Args:
        sizes: [segments, heads, queries, keys] that mask and bias are broadcast to.
    """
    is_plain = softcap == 0 and bias is None and slopes is None and scale > 0
    log2e = LOG2E.value

    def steps(x: Tensor | None) -> tuple[int | None, ...] | None:
        if x is None:
            return None
        *others, last = x.expand(sizes).stride()
        return (*map(plain, others), None if last == 1 else plain(last))

    where = None if slopes is None else tuple(map(plain, slopes.expand(sizes[:2]).stride()))
    return Rules(
        factor=scale * log2e if is_plain else log2e,
        scale=scale,
        softcap=softcap or None,
        left=None if left is None else plain(min(left, LONGEST - 1)),
        right=plain(LONGEST - 1 if right is None else min(right, LONGEST - 1)),  # one kernel, causal or not
        mask=None if mask is None else mask.view(torch.uint8),
        mask_strides=steps(mask),
        bias=bias,
        bias_strides=steps(bias),
        slopes=slopes,
        slope_strides=where,
        seed=seed,
        threshold=None if seed is None else (plain(drop_below >> 16), plain(drop_below & 0xFFFF)),
        keep=None if seed is None else 1 / (1 - dropout_p),
    ), is_plain
