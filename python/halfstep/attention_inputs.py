"""What attention's arguments may be: each is brought into the form that backends take, or refused with what to do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .shards import is_sharded

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF, torch.float64)
LARGEST_HEAD = 256


def check_tensor(t: Any, name: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {_kind(t)}; expected a tensor")
    if is_sharded(t):
        raise TypeError(f"{name} is a DTensor; pass its local part, {name}.to_local(), if that has whole sequences")
    if t.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass its values() and offsets() to hs.attention_varlen")
    if t.layout is not torch.strided:
        raise TypeError(f"{name} is sparse ({t.layout}); attention takes dense tensors: pass {name}.to_dense()")


def cast_for_autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under torch.autocast for their device all in its dtype, as scaled_dot_product_attention; float64 stays."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in DTYPES and t.dtype is not torch.float64 else t for t in tensors)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, dims: tuple[str, ...]) -> None:
    """Dtypes, devices and sizes. `dims` names the dimensions; the heads are the second."""
    if not q.dtype is k.dtype is v.dtype:
        raise TypeError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; attention takes one dtype: convert them, or run under "
            "torch.autocast, which does"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v are {q.dtype}; expected bfloat16, float16 or float32 (on the CPU also float64)")
    if q.dtype is torch.float64 and q.device.type not in ("cpu", "meta"):
        raise TypeError(f"q, k and v are float64 on {q.device}; kernels for it are on the CPU alone: pass float32")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")
    if not q.ndim == k.ndim == v.ndim == len(dims):
        raise ValueError(f"{_shapes(q, k, v)}; expected [{', '.join(dims)}]{_other(dims)}")
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if k_shape[:-1] != v_shape[:-1]:
        raise ValueError(f"{_shapes(q, k, v)}; k and v need the same {', '.join(dims[:-1])}: a value for each key")
    if len(dims) == 4 and q_shape[0] != k_shape[0]:
        raise ValueError(
            f"{_shapes(q, k, v)}; q, k and v need the same batch: expand() one that is shared, which copies nothing"
        )
    heads, shared = q_shape[1], k_shape[1]
    if heads == 0 or shared == 0 or heads % shared:
        raise ValueError(
            f"{_shapes(q, k, v)}; the heads of q ({heads}) must be a multiple of those of k and v ({shared}), each of "
            "which serves a group of them"
        )
    if q_shape[-1] != k_shape[-1]:
        raise ValueError(f"{_shapes(q, k, v)}; q and k need the same dim, since their product is summed over it")
    for name, size in (("q and k", q_shape[-1]), ("v", v_shape[-1])):
        if size % 8 or not 8 <= size <= LARGEST_HEAD:
            raise ValueError(
                f"{_shapes(q, k, v)}; the dim of {name} is {size}, expected a multiple of 8 from 8 to {LARGEST_HEAD}. "
                "Zeros appended with F.pad change no result if scale= is given; cut them off v's output"
            )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _other(dims: tuple[str, ...]) -> str:
    other = "hs.attention_varlen takes [total, heads, dim]", "hs.attention takes [batch, heads, length, dim]"
    return f" for all three; {other[len(dims) == 3]}"


def broadcast(t: Any, name: str, q: Tensor, k: Tensor) -> Tensor:
    """A view of four dimensions, each 1 or that of the scores [B, Hq, Lq, Lk]."""
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q on {q.device}; move them to one device")
    scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    shape = (1,) * (4 - t.ndim) + tuple(t.shape)
    if t.ndim > 4 or any(size != 1 and size != full for size, full in zip(shape, scores, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}; expected one that broadcasts to the scores' [batch, heads, query, "
            f"key] = {tuple(scores)}, each size 1 or that one"
        )
    return t.reshape(shape)


def read_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    check_tensor(mask, "mask")
    if mask.dtype.is_floating_point:
        raise TypeError(f"mask is {mask.dtype}; what is added to the scores is passed as bias=, a mask is bool")
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask is {mask.dtype}; expected bool, True where a query may see a key: pass mask.bool()")
    return broadcast(mask, "mask", q, k)


def read_bias(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    check_tensor(bias, "bias")
    if bias.dtype is torch.bool:
        raise TypeError("bias is bool; a mask of the visible keys is passed as mask=")
    if bias.dtype not in DTYPES or (bias.dtype is torch.float64 and q.dtype is not torch.float64):
        raise TypeError(
            f"bias is {bias.dtype}; expected float32, bfloat16 or float16 (float64 only where q is): pass bias.float()"
        )
    return broadcast(bias, "bias", q, k)


def read_slopes(slopes: Any, q: Tensor, heads: int, batch: int, per: str) -> Tensor:
    check_tensor(slopes, "alibi_slopes")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires grad, and attention has none for it; pass alibi_slopes.detach()")
    if slopes.dtype is not torch.float32:
        raise TypeError(f"alibi_slopes is {slopes.dtype}; expected float32: pass alibi_slopes.float()")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes is on {slopes.device}, q on {q.device}; move them to one device")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; expected [heads of q] = ({heads},) or [{per}, heads of q] "
            f"= ({batch}, {heads})"
        )
    return slopes


def read_window(causal: Any, window: Any) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) of AttentionCall."""
    if causal is not False and causal is not True and causal not in ("bottom-right", "top-left"):
        raise ValueError(f"causal={causal!r}: expected False, True (the same as 'bottom-right') or 'top-left'")
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(side is None or (_is_int(side) and side >= -1) for side in sides):
        raise ValueError(
            f"window={window!r}: expected None, an int (keys seen on each side) or (left, right) of ints; None and -1 "
            "are no limit"
        )
    # no tensor has 2^31 rows on a side; an operator's integers have 64 bits
    left, right = (None if side is None or side == -1 or side >= 2**31 else side for side in sides)
    return left, (0 if causal else right), causal == "top-left"


def read_numbers(dim: int, scale: Any, softcap: Any, dropout_p: Any) -> tuple[float, float, float]:
    scale = dim**-0.5 if scale is None else _number(scale, "scale")
    softcap = 0.0 if softcap is None else _number(softcap, "softcap")
    if softcap < 0:
        raise ValueError(f"softcap={softcap!r}: expected None or 0 for none, or the positive bound of the scores")
    dropout_p = _number(dropout_p, "dropout_p")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p!r}: expected a probability from 0 up to, but not, 1")
    return scale, softcap, dropout_p


def read_seed(seed: Any, dropout_p: float, device: torch.device) -> Tensor | None:
    """One int64 on the device, drawn from torch's generator there if none is given; nothing waits for it."""
    if dropout_p == 0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if _is_int(seed):
        if not -(2**63) <= seed < 2**63:
            seed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits, as int64 writes them
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(
            f"seed is {_kind(seed)}; expected an int, or an int64 tensor of one element on {device}, where q is"
        )
    return seed.reshape(1)


def read_boundaries(cu_seqlens_q: Any, cu_seqlens_k: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both in int32. Their values are looked at where that does not wait: on the CPU, by the operator."""
    read = []
    for name, boundaries in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(boundaries, name)
        if boundaries.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {boundaries.dtype}; expected int32 (or int64, which is converted)")
        if boundaries.ndim != 1 or boundaries.shape[0] == 0:
            raise ValueError(f"{name} has shape {tuple(boundaries.shape)}; expected [segments + 1]")
        if boundaries.device != device:
            raise ValueError(f"{name} is on {boundaries.device}, q on {device}; move them to one device")
        if boundaries.dtype is torch.int64:  # a number that does not fit stays a wrong one
            boundaries = boundaries.clamp(-1, 2**31 - 1).to(torch.int32)
        read.append(boundaries)
    if read[0].shape != read[1].shape:
        raise ValueError(
            f"cu_seqlens_q has {read[0].shape[0]} elements and cu_seqlens_k {read[1].shape[0]}; both list the same "
            "segments, so give as many of each (a segment may be empty)"
        )
    return read[0], read[1]


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {_kind(value)}; expected a Python number, which kernels take as a constant")
    if not -math.inf < value < math.inf:  # a comparison: torch.compile cannot trace isfinite of a variable
        raise ValueError(f"{name}={value!r}: expected a finite number")
    # 1 and 1.0 are the same number and two kernels; a size that torch.compile keeps open stays open
    return value if isinstance(value, (torch.SymInt, torch.SymFloat)) else float(value)  # type: ignore[return-value]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)} on {value.device}"
    shown = repr(value)
    article = "an" if type(value).__name__[0] in "aeiou" else "a"
    named = f"{article} {type(value).__name__}"
    return f"{shown}, {named}" if len(shown) < 60 and "\n" not in shown else named
