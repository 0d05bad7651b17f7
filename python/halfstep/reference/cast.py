"""Lists of tensors converted between float32, bfloat16 and float16, or added up in float32, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .philox import philox_words
from .rounding import round_stochastic, round_to


@torch.no_grad()
def cast_(dst: Sequence[Tensor], src: Sequence[Tensor], *, stochastic: bool = False, seed: int = 0) -> None:
    """Write dst[i] = src[i] in dst[i]'s dtype, in place.

    Widening is exact. Narrowing rounds to nearest even, or stochastically with the words of step 0, tensor i, stream 0.
    Between the two 16-bit dtypes the value goes through float32.

    Args:
        dst, src: equally long lists; each pair has one shape and one device; float32, bfloat16 or float16, any strides.
        stochastic: round stochastically instead of to nearest even.
        seed: of the stochastic rounding.
    """
    for index, (target, source) in enumerate(zip(dst, src, strict=True)):
        x = source.float()
        if stochastic:
            words = philox_words(seed, 0, index, 0, 0, x.numel(), x.device)
            target.copy_(round_stochastic(x, target.dtype, words))
        else:
            target.copy_(round_to(x, target.dtype))


@torch.no_grad()
def accumulate_(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    """dst[i] = dst[i] + f32(src[i]) in float32, one rounding, in place.

    Args:
        dst: float32, any strides.
        src: as many tensors of the same shapes and devices; float32, bfloat16 or float16, any strides.
    """
    for target, source in zip(dst, src, strict=True):
        target.copy_(target + source.float())
