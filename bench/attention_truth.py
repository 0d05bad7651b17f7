"""What attention must give, with twice the digits, and how far its dtype's arithmetic may be from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.bench.accuracy import unit

_AT_ONCE = 2**28  # scores
# In the tensors' dtype: of a weight before its product, of the output within delta, of the result
_ROUNDINGS = 3


class Job(NamedTuple):
    name: str
    causal: bool
    window: int | None = None  # keys that a query sees, itself the last

    def hidden(self, rows: slice, length: int, device: torch.device) -> Tensor | None:
        """[rows, length], True where a query does not see a key."""
        if not self.causal:
            return None
        distance = torch.arange(length, device=device)[rows, None] - torch.arange(length, device=device)
        return (distance < 0) | (distance >= (self.window or length))


def truths(
    job: Job, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, backward: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """(truth, allowed error) of out, or of dq, dk and dv.

    In float32 for 16-bit tensors, in float64 for float32 ones; a block of rows at a time. Allowed are _ROUNDINGS of the
    dtype and, of sums and scores in float32, one for each term, all of the sum of the terms' magnitudes.
    """
    dtype, (batch, heads, length, dim) = q.dtype, q.shape
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    q, k, v, d_out = (x.detach().to(wide) for x in (q, k, v, d_out))
    scale = dim**-0.5
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * scale
    allowed = _ROUNDINGS * unit(dtype) + (length + dim * (1 + largest)) * unit(torch.float32)
    names = ("dq", "dk", "dv") if backward else ("out",)
    sums = {name: (torch.zeros_like(q), torch.zeros_like(q)) for name in names}
    step = max(1, _AT_ONCE // (batch * heads * length))
    for begin in range(0, length, step):
        rows = slice(begin, begin + step)
        scores = q[:, :, rows] @ k.transpose(2, 3) * scale
        hidden = job.hidden(rows, length, q.device)
        P = (scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)).softmax(-1)
        if not backward:
            for total, values in zip(sums["out"], (v, v.abs()), strict=True):
                total[:, :, rows] = P @ values
            continue
        for i, (dS, q_rows, keys, d) in enumerate(_derivatives(P, v, d_out[:, :, rows], q[:, :, rows], k)):
            sums["dq"][i][:, :, rows] = dS @ keys * scale
            sums["dk"][i].add_(dS.transpose(2, 3) @ q_rows, alpha=scale)
            sums["dv"][i].add_(P.transpose(2, 3) @ d)
    return {name: (truth, terms.mul_(allowed)) for name, (truth, terms) in sums.items()}


def _derivatives(
    P: Tensor, v: Tensor, d_out: Tensor, q: Tensor, k: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(dS, q, k, d_out), and the same with the magnitude of each term in its place."""
    dP, products = d_out @ v.transpose(2, 3), (P @ v) * d_out
    dS = P * (dP - products.sum(-1, keepdim=True))
    terms = P * (dP.abs() + products.abs().sum(-1, keepdim=True))
    return [(dS, q, k, d_out), (terms, q.abs(), k.abs(), d_out.abs())]
