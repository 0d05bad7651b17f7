"""The kernels on one tensor, or one flat buffer of many: no table, no optimizer object, one or two launches.

    from halfstep.triton_kernels import flat
    flat.adam_(weights, grads, exp_avg, exp_avg_sq, t=step, lr=1e-3, weight_decay=0.1, master=master)

Tensors are contiguous, on one GPU; work goes to the current stream there, and nothing waits for it. The same bits as
the optimizers and list operators of halfstep, which take any layout and check more. torch.compile ends its graph before
a call and begins another behind it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from . import sizes
from .flat_kernels import flat_adam_kernel, flat_cast_kernel, flat_chunks_kernel, flat_scale_kernel, flat_total_kernel
from .launch import EXACT, INTERPRETED, ITEM_SIZES, tiles
from .update import CHECKED_MASTER, MASTER, NOTHING_WIDER, REMAINDER

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from . import untraced

            return untraced.call(function, *args, **options)
        return function(*args, **options)

    return cast(_Function, call)


# ---- what users call -------------------------------------------------------------------------------------------------
@_untraced
def adam_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, t: int, lr: float,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, decoupled: bool = True,
    maximize: bool = False, max_exp_avg_sq: Tensor | None = None, master: Tensor | None = None,
    scale: Tensor | None = None, found_inf: Tensor | None = None, heal: bool = True, stochastic: bool = False,
    seed: int = 0, param_id: int = 0, first_index: int = 0,
) -> Tensor:  # fmt: skip
    """One AdamW step (Adam's, with decoupled=False) of one tensor, in place: one launch, and one to zero the result.

    Moves 28 bytes an element where all is float32; 28 (30 with heal) where param and grad are 16-bit and a master is
    there; 26 with a split one.

    Args:
        param: float32, bfloat16 or float16, any shape; as many elements in all that follow, all contiguous.
        grad: float32, bfloat16 or float16; only read.
        exp_avg, exp_avg_sq, max_exp_avg_sq: of one dtype, float32, or 16-bit, which round stochastically. The third one
            makes it AMSGrad.
        t: number of this update, from 1. A CUDA graph would keep it: optimizers count on the device.
        lr, betas, eps, weight_decay, decoupled, maximize: as in torch.optim.AdamW; numbers of the host.
        master: float32, the wide copy of a 16-bit param; or int16, the remainder of a split bfloat16 one.
        scale: None, or float32 of one element: the loss scale that the gradient still carries.
        found_inf: None, or float32 of one element: if it is > 0 nothing is changed.
        heal: where a float32 master does not round to the weight, go on from the weight.
        stochastic: round a 16-bit param without master stochastically.
        seed, param_id, first_index: of the random words; first_index of element 0 in the whole parameter.

    Returns: 0-d int64 on the device, how many elements healed.

    Raises:
        TypeError: not a tensor, or of a dtype that does not belong there; a tensor or another thing for a number.
        ValueError: not contiguous, of another size or device, a number out of range, no GPU.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        tensors["max_exp_avg_sq"] = max_exp_avg_sq
    p, g, state, *more = _codes(tensors)
    if len({state, *more}) != 1:
        moments = [tensor.dtype for tensor in list(tensors.values())[2:]]
        raise TypeError(f"exp_avg, exp_avg_sq, max_exp_avg_sq: expected one dtype, got {moments}")
    held = _held(param, master, heal)
    _check_integer(t, "t", 2**63, least=1)
    _check_integer(seed, "seed", 2**32)
    _check_integer(param_id, "param_id", 2**32)
    _check_integer(first_index, "first_index", 2**63 - param.numel())
    numbers = _checked_numbers(lr, betas, eps, weight_decay)
    healed = torch.zeros((), dtype=torch.int64, device=param.device)
    if not param.numel():
        return healed
    at_random = stochastic and held == NOTHING_WIDER.value and p != 0
    where = [0 if x is None else x.data_ptr() for x in (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master)]
    with _current(param.device):
        flat_adam_kernel[(triton.cdiv(param.numel(), sizes.SHARE),)](
            *where, param.numel(), _number(scale, "scale", param), _number(found_inf, "found_inf", param), healed,
            *struct.unpack("5q", struct.pack("5d", *numbers)), 0x80000000 if maximize else 0, t, seed, param_id,
            first_index, DECOUPLED=decoupled, PARAM_DTYPE=p, GRAD=g, STATE=state, HELD=held,
            AMSGRAD=max_exp_avg_sq is not None, AT_RANDOM=at_random, **tiles(4, _lanes(param.device)), **EXACT,
        )  # fmt: skip
    written = (param, exp_avg, exp_avg_sq, max_exp_avg_sq, master)
    increment_version([x for x in written if x is not None])  # what autograd may have saved
    return healed


@_untraced
def unscale_(grad: Tensor, factor: Tensor, found_inf: Tensor) -> None:
    """grad = round(f32(grad) * factor), in place; found_inf becomes 1 if a value is not finite then, else it stays.

    Moves 8 bytes an element of float32, 4 of a 16-bit dtype.

    Args:
        grad: float32, bfloat16 or float16, contiguous. factor, found_inf: float32 of one element on the same GPU.

    Raises: TypeError, ValueError: as adam_.
    """
    (code,) = _codes({"grad": grad})
    factor, found_inf = _number(factor, "factor", grad), _number(found_inf, "found_inf", grad)
    if grad.numel():
        with _current(grad.device):
            flat_scale_kernel[(triton.cdiv(grad.numel(), sizes.SHARE),)](
                grad.data_ptr(), grad.numel(), factor, found_inf, DTYPE=code,
                **tiles(ITEM_SIZES[code], _lanes(grad.device)), **EXACT,
            )  # fmt: skip
        increment_version(grad)


@_untraced
def cast_(dst: Tensor, src: Tensor, *, stochastic: bool = False, seed: int = 0) -> None:
    """dst = src, rounded to dst's dtype: to nearest even, or stochastically (Philox key (seed, 0), parameter id 0).

    Moves the bytes of both once.

    Args:
        dst, src: float32, bfloat16 or float16, contiguous, of as many elements, in memory of their own.

    Raises: TypeError, ValueError: as adam_.
    """
    to, of = _codes({"dst": dst, "src": src})
    _check_integer(seed, "seed", 2**32)
    if dst.numel():
        with _current(dst.device):
            flat_cast_kernel[(triton.cdiv(dst.numel(), sizes.SHARE),)](
                dst.data_ptr(), src.data_ptr(), dst.numel(), seed, DST=to, SRC=of, AT_RANDOM=stochastic,
                **tiles(max(ITEM_SIZES[to], ITEM_SIZES[of]), _lanes(dst.device)), **EXACT,
            )  # fmt: skip
        increment_version(dst)


@_untraced
def sum_of_squares(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Of x, or of x * f32(1 / scale): 0-d float64 on the device, finite exactly where all elements are.

    Reads x once. Its square root is the 2-norm that the optimizers clip by (reference/sum_squares.py has the order).

    Args:
        x: float32, bfloat16 or float16, contiguous. scale: None, or float32 of one element on the same GPU.

    Raises: TypeError, ValueError: as adam_.
    """
    (code,) = _codes({"x": x})
    chunks, lanes = triton.cdiv(x.numel(), sizes.CHUNK), _lanes(x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if chunks:
        sums = torch.empty(chunks, dtype=torch.float64, device=x.device)
        with _current(x.device):
            flat_chunks_kernel[(chunks,)](
                x.data_ptr(), x.numel(), _number(scale, "scale", x), sums, DTYPE=code, CHUNK=sizes.CHUNK,
                num_warps=sizes.warps(sizes.LANES, ITEM_SIZES[code], lanes), **EXACT,
            )  # fmt: skip
            flat_total_kernel[(1,)](sums, chunks, total, num_warps=1, **EXACT)
    return total


# ---- checks ----------------------------------------------------------------------------------------------------------
def _codes(tensors: dict[str, Tensor]) -> list[int]:
    """The dtypes' codes of tensors that kernels can take together."""
    first, like = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _CODES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a float32, bfloat16 or float16 tensor, got {kind}")
        _check_place(name, tensor, first, like)
    return [_CODES[tensor.dtype] for tensor in tensors.values()]


def _check_place(name: str, tensor: Tensor, first: str, like: Tensor) -> None:
    if tensor.device.type != ("cpu" if INTERPRETED else "cuda"):
        interpreter = "Triton's interpreter, which TRITON_INTERPRET=1 asks for, on the CPU"
        where = interpreter if INTERPRETED else "on GPUs; use halfstep's own functions"
        raise ValueError(f"{name} is on {tensor.device}: Triton kernels run {where}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous(), or a view of it as a flat buffer")
    if tensor.numel() != like.numel() or tensor.device != like.device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements on {tensor.device}, {first} has {like.numel()} on {like.device}"
        )


def _held(param: Tensor, master: Tensor | None, heal: bool) -> int:
    if master is None:
        return NOTHING_WIDER.value
    if not isinstance(master, Tensor):
        raise TypeError(f"master: expected a tensor or None, got {type(master).__name__}")
    fits = master.dtype is torch.float32 and param.dtype is not torch.float32
    if not fits and not (master.dtype is torch.int16 and param.dtype is torch.bfloat16):
        raise TypeError(
            f"master: {master.dtype} for a param of {param.dtype}; expected float32 for a 16-bit param, or int16 for a "
            "bfloat16 one"
        )
    _check_place("master", master, "param", param)
    if master.dtype is torch.int16:
        return REMAINDER.value
    return CHECKED_MASTER.value if heal else MASTER.value


def _check_integer(value: int, name: str, end: int, least: int = 0) -> None:
    if not isinstance(value, int):  # of a tensor the value would have to be waited for
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not least <= value < end:
        raise ValueError(f"{name}={value}: expected an integer from {least} to {end - 1}")


def _checked_numbers(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> tuple[float, ...]:
    """lr, both betas, eps, weight_decay."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")
    numbers = {"lr": lr, "betas[0]": betas[0], "betas[1]": betas[1], "eps": eps, "weight_decay": weight_decay}
    for name, value in numbers.items():
        if isinstance(value, Tensor) or not hasattr(type(value), "__float__"):
            raise TypeError(f"{name}: expected a number of the host, got {type(value).__name__}; pass float({name})")
        if name.startswith("betas") and not 0 <= value < 1:
            raise ValueError(f"{name}={value}: expected a number in [0, 1)")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: expected a finite number >= 0")
    return tuple(map(float, numbers.values()))


def _number(value: Tensor | None, name: str, like: Tensor) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a float32 tensor of one element, got {type(value).__name__}; pass "
            f"torch.full((), {name}, device={str(like.device)!r})"
        )
    if value.dtype is not torch.float32 or value.numel() != 1 or value.device != like.device:
        raise ValueError(
            f"{name}: expected one float32 number on {like.device}, got {tuple(value.shape)} of {value.dtype} on "
            f"{value.device}"
        )
    return value


def _lanes(device: torch.device) -> int:
    return 32 if device.type == "cpu" else torch.cuda.get_device_properties(device).warp_size


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
