"""The comparisons of the cast bench: multi-tensor casts, sums, unscaling, norms and clipping outside the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.bench import accuracy, torch_lists
from halfstep.bench.cases import GRAD_NORM, Case, Flat
from halfstep.bench.harness import Comparison, Provider, Runner

F32 = torch.float32
INVERSE_SCALE = 0.7  # not a power of two, so that it rounds


class Call(Runner):
    """A function of the tensors it works on, which `source` restores before every call if given."""

    def __init__(
        self, job: Callable[[list[Tensor]], Any], tensors: list[Tensor], source: list[Tensor] | None, name: str | None
    ):
        self._job, self._tensors, self._source, self._name = job, tensors, source, name
        self._returned: Any = None

    def prepare(self) -> None:
        if self._source is not None:
            torch_lists.copy_(self._tensors, self._source)

    def __call__(self) -> None:
        self._returned = self._job(self._tensors)

    def results(self) -> dict[str, Sequence[Tensor]]:
        """What was written under `name`; without a name the norm that was returned."""
        return {"norm": [self._returned]} if self._name is None else {self._name: self._tensors}


def cast(case: Case, source: torch.dtype, target: torch.dtype) -> Comparison:
    """Every tensor of a list into another list of another dtype."""
    src = [t.to(source) for t in case.weights()]
    flat = Flat(src)

    def filled() -> list[Tensor]:
        return [torch.zeros_like(t, dtype=target) for t in src]

    def provider(name: str, job: Callable[[list[Tensor]], Any], result: str = "nearest") -> Provider:
        return Provider(name, lambda: Call(job, filled(), None, result), source.itemsize + target.itemsize)

    def loop(dst: list[Tensor]) -> None:
        for d, s in zip(dst, src, strict=True):
            d.copy_(s)

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        truth = flat[begin:end].double()
        # Stochastic rounding takes either neighbour: twice the error of nearest.
        return {"nearest": accuracy.rounded(truth, target), "stochastic": accuracy.rounded(truth, target, 2)}

    providers = [
        provider("halfstep", lambda dst: hs.cast_(dst, src)),
        provider("torch, foreach", lambda dst: torch_lists.copy_(dst, src)),
        provider("torch, for-loop", loop),
    ]
    if target.itemsize < source.itemsize:
        stochastic = provider("halfstep, stochastic", lambda dst: hs.cast_(dst, src, "stochastic"), "stochastic")
        providers.insert(1, stochastic)
    what = f"cast_ {_short(source)} to {_short(target)}"
    return Comparison(case, what, "torch, foreach", providers, expected)


def accumulate(case: Case, dtype: torch.dtype) -> Comparison:
    """Gradients added to float32 sums, in place."""
    source, grads = case.weights(), [t.to(dtype) for t in case.gradients()]
    sums, added = Flat(source), Flat(grads)

    def provider(name: str, job: Callable[[list[Tensor]], Any]) -> Provider:
        bytes_per_element = 2 * F32.itemsize + dtype.itemsize
        return Provider(name, lambda: Call(job, [t.clone() for t in source], source, "sum"), bytes_per_element)

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        return {"sum": accuracy.rounded(sums[begin:end].double() + added[begin:end].double(), F32)}

    providers = [
        provider("halfstep", lambda dst: hs.accumulate_(dst, grads)),
        provider("torch, foreach", lambda dst: torch_lists.add_(dst, grads)),
    ]
    return Comparison(case, f"accumulate_ {_short(dtype)}", "torch, foreach", providers, expected)


def unscale(case: Case) -> Comparison:
    """float32 gradients times 1 / scale in place, with the overflow check."""
    source = case.gradients()
    flat, inverse, found = (
        Flat(source),
        torch.tensor([INVERSE_SCALE], device=case.device),
        torch.zeros(1, device=case.device),
    )

    def provider(name: str, job: Callable[[list[Tensor]], Any]) -> Provider:
        return Provider(name, lambda: Call(job, [t.clone() for t in source], source, "grad"), 2 * F32.itemsize)

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        return {"grad": accuracy.rounded(flat[begin:end].double() * inverse.double(), F32)}

    providers = [
        provider("halfstep", lambda grads: hs.unscale_(grads, inverse, found)),
        provider("torch", lambda grads: torch_lists.unscale_(grads, found, inverse)),
    ]
    return Comparison(case, "unscale_ f32", "torch", providers, expected)


def norm(case: Case, dtype: torch.dtype) -> Comparison:
    """Global norm and overflow check, in one number each. torch's own function gives a bfloat16 norm of bfloat16."""
    grads = [t.to(dtype) for t in case.gradients()]
    truth = torch.tensor([Flat(grads).norm()], dtype=torch.float64, device=case.device)

    def torch_norm(tensors: list[Tensor]) -> Tensor:
        total = nn.utils.get_total_norm(tensors, foreach=True)
        total.isfinite().logical_not().float()  # found_inf
        return total

    def provider(name: str, job: Callable[[list[Tensor]], Any], error: float) -> Provider:
        expected = {"norm": (truth, truth * error)}
        return Provider(name, lambda: Call(job, grads, None, None), dtype.itemsize, lambda begin, end: expected)

    def stats_norm(tensors: list[Tensor]) -> Tensor:
        return hs.grad_stats(tensors)[0]

    providers = [
        provider("halfstep", stats_norm, accuracy.exact_norm_error()),
        provider("torch", torch_norm, accuracy.torch_norm_error(case.elements, dtype)),
    ]
    what = f"grad_stats {_short(dtype)}"
    return Comparison(case, what, "torch", providers, lambda begin, end: {}, elements=1)


def norms(case: Case, dtype: torch.dtype) -> Comparison:
    """The norm of every tensor, and of all together; torch sums in float32 (its own norms of bfloat16 are bfloat16)."""
    tensors = [t.to(dtype) for t in case.gradients()]
    truths = torch.tensor([Flat([t]).norm() for t in tensors], dtype=torch.float64)
    largest = max(t.numel() for t in tensors)

    def torch_norms(tensors: list[Tensor]) -> Tensor:
        each = torch.stack(torch_lists.norms(tensors, 2, dtype=F32))
        torch.linalg.vector_norm(each)
        return each

    def provider(name: str, job: Callable[[list[Tensor]], Any], error: float) -> Provider:
        def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
            return {"norm": (truths[begin:end], truths[begin:end] * error)}

        return Provider(name, lambda: Call(job, tensors, None, None), dtype.itemsize, expected)

    providers = [
        provider("halfstep", lambda tensors: hs.l2_norms(tensors)[0], accuracy.exact_norm_error()),
        provider("torch, foreach", torch_norms, accuracy.torch_norm_error(largest, F32)),
    ]
    what = f"l2_norms {_short(dtype)}"
    return Comparison(case, what, "torch, foreach", providers, lambda begin, end: {}, elements=len(tensors))


def clip(case: Case, max_norm: float) -> Comparison:
    """clip_grad_norm_ of float32 gradients, above or below the limit."""
    source = case.gradients()
    norm, torchs = Flat(source).norm(), accuracy.float32_norm(source).item()
    exact = accuracy.expected_clip(source, max_norm, norm, 0.0)
    given_norm = accuracy.expected_clip(source, max_norm, torchs, accuracy.other_order(case.elements))
    clips = norm > max_norm
    # Read; and where it clips, read and write.
    bytes_per_element = (3 if clips else 1) * F32.itemsize

    def make(job: Callable[[list[nn.Parameter]], Any]) -> Runner:
        params = [nn.Parameter(t.clone()) for t in source]  # the values do not matter
        grads = [t.clone() for t in source]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return Call(lambda _: job(params), grads, source, "grad")

    def ours(params: list[nn.Parameter]) -> Any:
        return hs.clip_grad_norm_(params, max_norm)

    def theirs(params: list[nn.Parameter]) -> Any:
        return nn.utils.clip_grad_norm_(params, max_norm, foreach=True)

    providers = [
        Provider("halfstep", lambda: make(ours), bytes_per_element),
        Provider("torch", lambda: make(theirs), bytes_per_element, given_norm),
    ]
    what = f"clip_grad_norm_ f32, {'clips' if clips else 'nothing to clip'}"
    return Comparison(case, what, "torch", providers, exact)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]


def comparisons(cases: list[Case], only: str = "") -> Iterator[Comparison]:
    """Every job on every case whose "case: job" contains `only`; tensors are made when a comparison is asked for."""
    jobs: dict[str, Callable[[Case], Comparison]] = {
        "cast_ f32 to bf16": lambda case: cast(case, F32, torch.bfloat16),
        "cast_ f32 to f16": lambda case: cast(case, F32, torch.float16),
        "cast_ bf16 to f32": lambda case: cast(case, torch.bfloat16, F32),
        "accumulate_ f32": lambda case: accumulate(case, F32),
        "accumulate_ bf16": lambda case: accumulate(case, torch.bfloat16),
        "unscale_ f32": unscale,
        "grad_stats f32": lambda case: norm(case, F32),
        "grad_stats bf16": lambda case: norm(case, torch.bfloat16),
        "l2_norms f32": lambda case: norms(case, F32),
        "l2_norms bf16": lambda case: norms(case, torch.bfloat16),
        "clip_grad_norm_ f32, clips": lambda case: clip(case, 1.0),
        "clip_grad_norm_ f32, nothing to clip": lambda case: clip(case, 2 * GRAD_NORM),
    }
    for case in cases:
        for name, job in jobs.items():
            if only.lower() in f"{case.name}: {name}".lower():
                yield job(case)
