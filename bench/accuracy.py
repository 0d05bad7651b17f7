"""What the jobs must give, in float64, and how far float32 arithmetic may be from it: bounds from counted roundings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.bench import torch_lists
from halfstep.bench.cases import Flat
from halfstep.bench.harness import Expected
from halfstep.bench.phases import HYPER

STEPS_CHECKED = 2  # the second one has a history and another bias correction

# float32 roundings that can pile up in two steps, each worth half an eps: on m 4 a step and 4 in the gradient's factor;
# on v 6 a step and twice 4; so on the update, in whatever order it is computed, m's + half of v's + 10 = 32.
# On the weight itself 3 a step, so the update's count covers both.
_ROUNDINGS = 32
# A beta rounded to float32 before 1 - beta is taken, as DeepSpeed does, is worth this many more on its moment.
_CANCELLATION = {beta: beta / (1 - beta) for beta in HYPER["betas"]}

# In a norm as halfstep sums it: one rounding for the square and 7 for the 8 added in float32, halved by the root; the
# rest is float64. Then one each for the coefficient and the product.
_EXACT_NORM_ROUNDINGS = 4
_CLIP_ROUNDINGS = 2


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def rounded(truth: Tensor, dtype: torch.dtype, roundings: float = 1) -> tuple[Tensor, Tensor]:
    """The truth, and what `roundings` roundings to the dtype may do to it."""
    return truth, roundings * unit(dtype) * truth.abs().clamp(min=torch.finfo(dtype).smallest_normal)


def float32_norm(grads: list[Tensor]) -> Tensor:
    """The global norm as torch's own clipping computes it, 0-d float32.

    Not a truth: torch sums a tensor's squares in float32, in order, in a few SIMD lanes, and additions to a large sum
    get lost (half a percent of the norm on the flat 64 M case). So what torch does with its norm is checked given that
    norm.
    """
    return torch.linalg.vector_norm(torch.stack(torch_lists.norms(grads, 2, dtype=torch.float32)))


def exact_norm_error() -> float:
    """Largest relative error of halfstep's norm."""
    return _EXACT_NORM_ROUNDINGS * unit(torch.float32)


def torch_norm_error(elements: int, dtype: torch.dtype) -> float:
    """Largest relative error of a norm that is summed in float32 in order, and given in the gradients' dtype.

    n / lanes units for the sum (Higham, "Accuracy and stability of numerical algorithms", 2002, section 4.2), half for
    its root; torch's vectors have 4 lanes or more. Each tensor's norm and the total are rounded to the dtype.
    """
    return exact_norm_error() + elements / 8 * unit(torch.float32) + 2 * unit(dtype)


def other_order(elements: int) -> float:
    """Relative difference allowed between two float32 norms of the same numbers: random roundings add up as sqrt(n).

    Source: Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput., 2019.
    """
    return math.sqrt(elements) * unit(torch.float32)


def expected_clip(grads: list[Tensor], max_norm: float, norm: float, slack: float) -> Expected:
    """Gradients times torch's clip coefficient for `norm`, which may be `slack` off (relative)."""
    flat, factor = Flat(grads), min(1.0, max_norm / (norm + 1e-6))
    allowed = slack + (_EXACT_NORM_ROUNDINGS + _CLIP_ROUNDINGS) * unit(torch.float32)

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        truth = flat[begin:end].double() * factor
        return {"grad": (truth, allowed * truth.abs())}

    return expected


def expected_adamw(
    weights: list[Tensor], grads: list[Tensor], *, factor: float = 1.0, slack: float = 0.0, steps: int = STEPS_CHECKED
) -> Expected:
    """What AdamW makes of the weights, from zero states, with gradients * factor in each step.

    Args:
        slack: relative error of the factor beyond the usual roundings.
    """
    dtype, w, g = weights[0].dtype, Flat(weights), Flat(grads)
    (b1, b2), lr, eps, decay = HYPER["betas"], HYPER["lr"], HYPER["eps"], 1 - HYPER["lr"] * HYPER["weight_decay"]
    u = unit(torch.float32)
    m_error, v_error = ((_ROUNDINGS + _CANCELLATION[beta]) * u for beta in (b1, b2))

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        p, grad = w[begin:end].double(), g[begin:end].double() * factor
        m, v, moved, sensitive = (torch.zeros_like(p) for _ in range(4))
        start = p.abs()
        for t in range(1, steps + 1):
            m = b1 * m + (1 - b1) * grad
            v = b2 * v + (1 - b2) * grad.square()
            denominator = (v / (1 - b2**t)).sqrt() + eps
            update = lr / (1 - b1**t) * m / denominator
            p = p * decay - update
            moved = moved + update.abs()
            sensitive = sensitive + update.abs() * eps / denominator  # only eps makes an update depend on the factor
        wide = _ROUNDINGS * u * (start + moved) + slack * sensitive
        moments = {
            "exp_avg": (m, (m_error + slack) * m.abs()),
            "exp_avg_sq": (v, (v_error + 2 * slack) * v),
        }
        if dtype == torch.float32:
            return {"weight": (p, wide), **moments}
        _, rounding = rounded(p.abs() + wide, dtype)
        return {"weight": (p, rounding + wide), "master": (p, wide), **moments}

    return expected
