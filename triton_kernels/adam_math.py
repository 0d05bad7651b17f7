"""The arithmetic of Adam and AdamW, as csrc/adam_math.h: every operation rounded on its own, in that order.

Kernels that use this are compiled with enable_fp_fusion=False: no multiply and add become one rounding.
"""

import triton
import triton.language as tl

from .elements import bits_of, float_of


@triton.jit
def power(base, exponent):
    """base**exponent by a fixed sequence of float64 products; float64 and int64 of one shape [n]."""
    result = base * 0.0 + 1.0
    while tl.max(exponent, 0) > 0:
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def inverse(scale):
    """f32(1 / scale), the factor of the first pass."""
    wide = scale.to(tl.float64)
    return (tl.full(wide.shape, 1.0, tl.float64) / wide).to(tl.float32)


@triton.jit
def grad_factor_of(norm, max_norm, scale):
    """Clip coefficient / loss scale, float64 rounded once. max_norm < 0: no clipping; a NaN norm stays NaN."""
    coefficient = max_norm / (norm + tl.full(norm.shape, 1e-6, tl.float64))
    coefficient = tl.where((coefficient >= 1.0) | (max_norm < 0.0), 1.0, coefficient)
    return (coefficient / scale.to(tl.float64)).to(tl.float32)


@triton.jit
def scalars_of(lr, beta1, beta2, eps, decay, decoupled, t):
    """What the update number t multiplies with: float64 (lr to decay, the weight decay), each rounded once.

    Args:
        lr to decay: float64 [n]. decoupled: int1 [n], AdamW's decay instead of Adam's L2 term. t: int64 [n].

    Returns: float32 [n] each, in the order of a record's columns (layout.py).
    """
    decay32 = decay.to(tl.float32)
    shrink = tl.where(decoupled & (decay32 != 0.0), (1.0 - lr * decay).to(tl.float32), 1.0)
    return (
        beta1.to(tl.float32), (1.0 - beta1).to(tl.float32), beta2.to(tl.float32), (1.0 - beta2).to(tl.float32),
        eps.to(tl.float32), tl.where(decoupled, 0.0, decay32), shrink,
        (lr / (1.0 - power(beta1, t))).to(tl.float32), tl.sqrt(1.0 - power(beta2, t)).to(tl.float32),
    )  # fmt: skip


@triton.jit
def root(x):
    """IEEE's square root of float32.

    Small numbers are scaled by a power of 4 and the root back, which is exact: for AMD, Triton 3.6 builds the root as
    if denormals were zeros, and of one would make a NaN, or miss by an ulp.
    """
    small = x < 2.0**-64
    return tl.sqrt_rn(x * tl.where(small, 2.0**64, 1.0)) * tl.where(small, 2.0**-32, 1.0)


@triton.jit
def adam_update(g, p, m, v, max_v, s, AMSGRAD: tl.constexpr):
    """One step of float32 elements; g is unscaled and clipped.

    Args:
        s: the scalars, in the order of a record (layout.py); `sign` flips the gradient (maximize).

    Returns: p, m, v, max_v.
    """
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, sqrt_correction2, sign = s
    g = float_of(bits_of(g) ^ sign)  # 0 - g would make 0 of -0
    g = tl.where(weight_decay != 0.0, g + weight_decay * p, g)
    p = p * decay
    m = tl.where(one_minus_beta1 >= 0.5, g - (g - m) * beta1, m + one_minus_beta1 * (g - m))
    v = beta2 * v + (one_minus_beta2 * g) * g
    second = v
    if AMSGRAD:
        max_v = tl.where((max_v > v) | (max_v != max_v), max_v, v)  # NaN propagates
        second = max_v
    denominator = tl.div_rn(root(second), sqrt_correction2) + eps
    p = p - tl.div_rn(step_size * m, denominator)
    return p, m, v, max_v
