"""Is a result of attention as good as its dtype allows? Judged against the formula in float64.

The allowance for each element is `factor` times the largest error of the naive computation in the call's dtype (2 for
outputs, 3 for gradients) plus two roundings; the mean error may be 1.5 times the naive one's, plus a rounding. A
rounding is half an epsilon of the element. Where the terms of an element cancel, so that what is left says nothing
about how it was rounded, it is an epsilon of the sum of the terms' magnitudes. Gradients come from exp(score - lse),
with lse as it was stored: half an epsilon of lse in each row's terms is added to their rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attention_case import Drawn
from torch import Tensor

from halfstep.ops.attention_call import AttentionCall
from halfstep.reference import attention as reference

OUTPUTS = ("out", "lse", "log_sum")
GRADIENTS = ("dq", "dk", "dv", "dbias")


class Judged(NamedTuple):
    """What a result is held against, by name; what a call does not have is None."""

    truth: dict[str, Tensor | None]
    naive: dict[str, Tensor | None]
    terms: dict[str, Tensor | None]  # the sum of the magnitudes of what is added up
    lse_terms: dict[str, Tensor | None]  # the same with each row's terms times |lse|


def judge(drawn: Drawn, result: dict[str, Tensor | None]) -> None:
    """Fails with the name of what is worse than the budget; `result` has what of OUTPUTS and GRADIENTS is to be judged.

    Gradients have to be of their inputs' shape and dtype; without a bias log_sum has to be empty.
    """
    against = judged(drawn)
    like = {"dq": drawn.call.q, "dk": drawn.call.k, "dv": drawn.call.v, "dbias": drawn.call.bias}
    for name, got in result.items():
        want = against.truth[name]
        if want is None:
            assert got is None or got.numel() == 0, f"{name} of a call that has none"
            continue
        assert got is not None, f"{name} is missing"
        tensor = like.get(name)
        if tensor is not None:
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), f"{name}: {got.shape}, {got.dtype}"
        naive, terms, lse_terms = against.naive[name], against.terms[name], against.lse_terms[name]
        assert naive is not None
        assert terms is not None
        assert lse_terms is not None
        rounding = _rounding(name, want, terms, _epsilon(name, got, drawn))
        if name in GRADIENTS:
            rounding += torch.finfo(_statistics(drawn.call)).eps / 2 * lse_terms
        _within(name, got, want, naive, rounding)


def judged(drawn: Drawn) -> Judged:
    naive = _computed(drawn, drawn.call.q.dtype)
    # lse and log_sum are float32 and come from float32 scores: what 16 bits would make of them is no excuse.
    naive |= {
        name: x for name, x in _computed(drawn, _statistics(drawn.call), gradients=False).items() if name != "out"
    }
    truth = _computed(drawn, torch.float64)
    lse, log_sum = truth["lse"], truth["log_sum"]
    assert lse is not None
    weight = _finite(lse).abs()
    if log_sum is not None:  # beyond 2^23 lse is the maximum alone, and exact as that
        weight = torch.where(weight < 2**23, weight, log_sum)
    ones = torch.ones_like(weight)
    return Judged(truth, naive, _terms(drawn, truth, ones), _terms(drawn, truth, weight))


def _statistics(call: AttentionCall) -> torch.dtype:
    """Of lse and log_sum."""
    return torch.promote_types(call.q.dtype, torch.float32)


def _computed(drawn: Drawn, dtype: torch.dtype, gradients: bool = True) -> dict[str, Tensor | None]:
    """Outputs and gradients of the whole-matrix formula with every operation rounded to `dtype`."""
    call, d_out, d_lse = drawn
    if not gradients:
        return _outputs(call, reference.attention(call, dtype))
    # Leaves of the computation's dtype, or autograd would round the truth to the inputs'.
    inputs: dict[str, Tensor] = {"q": call.q, "k": call.k, "v": call.v}
    if call.bias is not None:
        inputs["bias"] = call.bias
    wide = {name: x.detach().to(_wider(x.dtype, dtype)).requires_grad_() for name, x in inputs.items()}
    outputs = reference.attention(call._replace(**wide), dtype)
    flowing: list[tuple[Tensor, Tensor]] = [(outputs[0], d_out.to(dtype))]
    if d_lse is not None:
        flowing.append((outputs[1], d_lse.to(dtype)))
    found = torch.autograd.grad(
        [x for x, _ in flowing], [*wide.values()], [d for _, d in flowing], allow_unused=True, materialize_grads=True
    )
    named: dict[str, Tensor | None] = {f"d{name}": x for name, x in zip(wide, found, strict=True)}
    return {**_outputs(call, outputs), **dict.fromkeys(GRADIENTS), **named}


def _outputs(call: AttentionCall, outputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    named: dict[str, Tensor | None] = dict(zip(OUTPUTS, (x.detach() for x in outputs), strict=True))
    return named if call.bias is not None else {**named, "log_sum": None}


def _wider(given: torch.dtype, computed: torch.dtype) -> torch.dtype:
    return torch.float64 if computed == torch.float64 else given


def _terms(drawn: Drawn, truth: dict[str, Tensor | None], weight: Tensor) -> dict[str, Tensor | None]:
    """The formulas with every term's magnitude in place of the term, each row's times its weight [B, Hq, Lq]."""
    call = drawn.call
    out, lse = truth["out"], truth["lse"]
    assert out is not None
    assert lse is not None
    q, k, v = (x.double().abs() for x in (call.q, call.k, call.v))
    d_out, d_lse = drawn.d_out.double().abs(), torch.zeros_like(lse) if drawn.d_lse is None else drawn.d_lse.double()
    delta = (out.abs() * d_out).sum(3) + d_lse.abs()
    sums: dict[str, Tensor] = {"out": torch.zeros_like(out), "lse": _finite(lse).abs()}
    sums |= {name: torch.zeros_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    dbias = None
    for span in reference.spans(call):
        part = reference.probabilities(call, span, torch.float64)
        part = part._replace(P=part.P * weight[:, :, span.q_rows, None])
        kept = part.P if part.keep is None else part.P * part.keep
        rows, keys = span.q_rows, span.k_rows
        v_here, k_here = (reference.for_each_head(x[:, :, keys], call) for x in (v, k))
        dP = d_out[:, :, rows] @ v_here.transpose(2, 3)
        dS = part.P * ((dP if part.keep is None else dP * part.keep) + delta[:, :, rows, None])
        sums["out"][:, :, rows] = kept @ v_here
        sums["lse"][:, :, rows] += (part.P * _score_terms(call, span, q[:, :, rows] @ k_here.transpose(2, 3))).sum(3)
        sums["dq"][:, :, rows] = abs(call.scale) * dS @ k_here
        sums["dk"][:, :, keys] = _grouped(abs(call.scale) * dS.transpose(2, 3) @ q[:, :, rows], call)
        sums["dv"][:, :, keys] = _grouped(kept.transpose(2, 3) @ d_out[:, :, rows], call)
        dbias = None if call.bias is None else dS.sum_to_size(call.bias.shape)
    return {**sums, "dbias": dbias, "log_sum": None if call.bias is None else sums["lse"]}


def _score_terms(call: AttentionCall, span: reference.Span, products: Tensor) -> Tensor:
    """Of the scores, from |q| |k|^T. An infinite bias is none: its entry counts for nothing."""
    terms = abs(call.scale) * products
    if call.softcap:
        terms = terms.clamp(max=call.softcap)
    if call.bias is not None:
        terms = terms + _finite(call.bias.double()).abs()
    slopes = call.alibi_slopes
    if slopes is not None:
        slopes = slopes[span.segments.start : span.segments.stop] if slopes.ndim == 2 else slopes[None]
        terms = terms + slopes.double()[:, :, None, None] * reference.offsets(call, *terms.shape[2:]).abs()
    return terms


def _grouped(x: Tensor, call: AttentionCall) -> Tensor:
    """[B, Hq, Lk, D] summed over the heads of q that share one of k."""
    return x.unflatten(1, (call.k.shape[1], -1)).sum(2)


def _finite(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), 0.0)


def _epsilon(name: str, got: Tensor, drawn: Drawn) -> float:
    """Of the coarsest dtype on the way."""
    if name in ("lse", "log_sum"):
        return torch.finfo(got.dtype).eps
    return max(torch.finfo(got.dtype).eps, torch.finfo(drawn.call.q.dtype).eps)


def _rounding(name: str, want: Tensor, terms: Tensor, epsilon: float) -> Tensor:
    # The statistics are no sums over keys whose terms can cancel, but the scores in them are such sums over dimensions.
    size = terms if name in ("lse", "log_sum") else _finite(want).abs()
    return torch.where(size < epsilon * terms, epsilon * terms, epsilon / 2 * size)


def _within(name: str, got: Tensor, want: Tensor, naive: Tensor, rounding: Tensor) -> None:
    assert not want.isnan().any(), f"{name}: the reference is NaN"
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, naive = got.detach().double(), naive.double()
    nowhere = want.isinf()
    assert torch.equal(got.where(nowhere, 0), want.where(nowhere, 0)), f"{name}: infinite elsewhere"
    if want.numel() == 0:
        return
    error, naive_error = ((x.where(~nowhere, 0) - want.where(~nowhere, 0)).abs() for x in (got, naive))
    assert error.isfinite().all(), f"{name}: not finite at {(~error.isfinite()).nonzero()[0].tolist()}"
    assert naive_error.isfinite().all(), f"{name}: the naive computation is not finite, so it allows everything"
    factor = 2 if name in OUTPUTS else 3
    allowed = factor * naive_error.max() + 2 * rounding
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"{name}: error {error.flatten()[worst]:.3g} at {_place(worst, error)}, value {want.flatten()[worst]:.6g}, "
        f"allowed {allowed.flatten()[worst]:.3g}; the naive computation's largest is {naive_error.max():.3g}"
    )
    mean, mean_allowed = error.mean(), 1.5 * naive_error.mean() + rounding.mean()
    assert mean <= mean_allowed, f"{name}: mean error {mean:.3g}, allowed {mean_allowed:.3g}"


def _place(flat: Tensor, x: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(flat, x.shape)]
