"""One case of attention: its sizes and settings, and the tensors they stand for, the same in every run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.ops.attention_call import AttentionCall


class Drawn(NamedTuple):
    """A call and the gradients that come to its outputs."""

    call: AttentionCall
    d_out: Tensor  # [B, Hq, Lq, Dv], of q's dtype
    d_lse: Tensor | None  # [B, Hq, Lq], float32, or float64 with float64 inputs


@dataclass(frozen=True)
class Case:
    """Sizes and settings; batch and heads are above 1 in every case.

    Patterns such as "B1QK" say which dimensions a mask or a bias has in full; a 1 is broadcast. Masks hide three of ten
    entries, `rows` whole rows besides. A bias is normal, with some entries and some whole rows at `bias_low`, if given.
    Layouts: see `laid_out`. `q_lengths` and `k_lengths` make a varlen call; `uncovered` rows come before and after.
    """

    name: str
    lengths: tuple[int, int] = (33, 33)  # Lq, Lk; of no use with q_lengths
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # of q, of k and v
    dims: tuple[int, int] = (16, 16)  # Dk, Dv
    scale: float | None = None  # Dk ** -0.5
    size: float = 1.0  # standard deviation of q
    softcap: float = 0.0
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    mask: str | None = None
    rows: bool = False
    one_key: bool = False  # the mask leaves each row one key
    bias: str | None = None
    bias_dtype: torch.dtype | None = None  # the call's
    bias_low: str | None = None  # "-inf", "min": of the bias' dtype
    alibi: str | None = None  # "H", "BH"
    dropout_p: float = 0.0
    layout: str = "plain"
    d_out: str = "plain"
    d_lse: bool = False
    same_qk: bool = False  # k is q
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    uncovered: tuple[int, int] = (0, 0)
    core: bool = False  # in the covering subset

    def draw(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drawn:
        """The same numbers for every dtype and device, up to rounding."""
        normal = Normal(self.name)
        (Hq, Hkv), (Dk, Dv) = self.heads, self.dims
        B, Lq, Lk = self.sizes()
        values = [normal(B, Hq, Lq, Dk) * self.size, normal(B, Hkv, Lk, Dk), normal(B, Hkv, Lk, Dv)]
        if self.same_qk:
            values[1] = values[0]
        values = [x.to(dtype) for x in values]
        q, k, v = packed(values, device) if self.layout == "packed" else laid_out(values, self.layout, device)
        mask = None if self.mask is None else self.drawn_mask(normal).to(device)
        bias = None if self.bias is None else self.drawn_bias(normal, self.bias_dtype or dtype).to(device)
        segments = B if self.q_lengths is None else len(self.q_lengths)
        slopes = None
        if self.alibi is not None:
            slopes = normal(*({"B": segments, "H": Hq}[letter] for letter in self.alibi)).abs().to(device) / 4
        call = AttentionCall(
            q, k, v, mask, bias, slopes, self.ends(self.q_lengths, device), self.ends(self.k_lengths, device),
            seed=torch.tensor([0x0123456789ABCDEF], device=device) if self.dropout_p else None,
            scale=Dk**-0.5 if self.scale is None else self.scale, softcap=self.softcap,
            left=self.left, right=self.right, top_left=self.top_left, dropout_p=self.dropout_p,
        )  # fmt: skip
        (d_out,) = laid_out([normal(B, Hq, Lq, Dv).to(dtype)], self.d_out, device)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        return Drawn(call, d_out, normal(B, Hq, Lq).to(device, statistics) if self.d_lse else None)

    def sizes(self) -> tuple[int, int, int]:
        """B, Lq and Lk of the tensors."""
        if self.q_lengths is None or self.k_lengths is None:
            return self.batch, *self.lengths
        return 1, sum(self.q_lengths) + sum(self.uncovered), sum(self.k_lengths) + sum(self.uncovered)

    def ends(self, lengths: tuple[int, ...] | None, device: torch.device | str) -> Tensor | None:
        """cu_seqlens."""
        if lengths is None:
            return None
        return torch.tensor([*accumulate(lengths, initial=self.uncovered[0])], dtype=torch.int32, device=device)

    def shape(self, pattern: str) -> tuple[int, ...]:
        B, Lq, Lk = self.sizes()
        return tuple({"B": B, "H": self.heads[0], "Q": Lq, "K": Lk, "1": 1}[letter] for letter in pattern)

    def drawn_mask(self, normal: Normal) -> Tensor:
        assert self.mask is not None
        sizes = self.shape(self.mask)
        if self.one_key:
            key = torch.arange(sizes[2])[:, None] % sizes[3]
            return (torch.arange(sizes[3]) == key).expand(sizes).clone()
        mask = normal(*sizes) > -0.5
        return mask & ~self.whole_rows(sizes) if self.rows else mask

    def drawn_bias(self, normal: Normal, dtype: torch.dtype) -> Tensor:
        assert self.bias is not None
        sizes = self.shape(self.bias)
        bias = normal(*sizes).to(dtype)
        if self.bias_low is None:
            return bias
        low = torch.finfo(dtype).min if self.bias_low == "min" else float("-inf")
        bias = bias.masked_fill(normal(*sizes) > 1, low)
        return bias.masked_fill(self.whole_rows(sizes), low) if self.rows else bias

    @staticmethod
    def whole_rows(sizes: tuple[int, ...]) -> Tensor:
        """The first and the last row of the first batch element's last head, one row of all others."""
        rows = torch.zeros(sizes, dtype=torch.bool)
        rows[0, -1, [0, -1]] = True
        rows[:, :, sizes[2] // 2] = True
        return rows


class Normal:
    """Normal numbers in float32, by the name of what they are for."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator)


def packed(values: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """q, k and v [B, H, L, D] as views of one tensor [B, L, heads of all three, D]."""
    together = torch.cat(values, dim=1).transpose(1, 2).contiguous().to(device)
    return [*together.transpose(1, 2).split([x.shape[1] for x in values], dim=1)]


def laid_out(values: list[Tensor], layout: str, device: torch.device | str) -> list[Tensor]:
    """Tensors [B, H, L, D] of these values in another layout; expanded ones repeat their first head or number."""
    if layout == "expanded heads":  # k and v only, as somebody repeats them for the heads of q
        return [values[0].to(device), *(x[:, :1].to(device).expand(x.shape) for x in values[1:])]
    return [LAYOUTS[layout](x.to(device)) for x in values]


def _transposed(x: Tensor) -> Tensor:
    """[B, L, H, D] in memory, as a linear layer leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _odd_rows(x: Tensor) -> Tensor:
    """Rows of D + 1 numbers: no access of 16 bytes is aligned."""
    wide = x.new_zeros((*x.shape[:3], x.shape[3] + 1))
    wide[..., :-1] = x
    return wide[..., :-1]


def _offset(x: Tensor) -> Tensor:
    """Contiguous, but not from an aligned address on."""
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


def _strided(x: Tensor) -> Tensor:
    """The last dimension is not contiguous."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": _transposed,
    "odd rows": _odd_rows,
    "offset": _offset,
    "strided": _strided,
    "expanded": lambda x: x[:1, :1, :1, :1].expand(x.shape),  # the gradient of a sum
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
}
