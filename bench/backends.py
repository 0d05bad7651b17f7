"""On a GPU: each of halfstep's providers with the native kernels and with Triton's, side by side in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.bench.clocks import Runner
from halfstep.bench.harness import Comparison, Provider, UnavailableError
from halfstep.ops import backend

OURS = "halfstep"  # how the names of halfstep's providers begin
NAMES = {"native": OURS, "triton": f"{OURS}, Triton"}


def kernels_of(name: str, device: torch.device) -> tuple[Any, str | None]:
    """(the backend, None), or (None, why it cannot run on this device)."""
    return backend._native_for(device) if name == "native" else backend._triton_for(device)


def with_each(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """Providers that are not halfstep's stay; the others are there twice, and skipped where their kernels are not."""
    for comparison in comparisons:
        device, providers = comparison.case.device, []
        for provider in comparison.providers:
            if provider.name.startswith(OURS):
                providers += [_redirected(provider, name, device) for name in NAMES]
            else:
                providers.append(provider)
        yield replace(comparison, providers=providers)


def _redirected(provider: Provider, name: str, device: torch.device) -> Provider:
    def make() -> Runner:
        kernels, why_not = kernels_of(name, device)
        if kernels is None:
            raise UnavailableError(why_not)
        return Redirected(provider.make, kernels)

    return provider._replace(name=provider.name.replace(OURS, NAMES[name], 1), make=make)


class Redirected(Runner):
    """A job whose calls go to one backend, whatever halfstep would choose."""

    def __init__(self, make: Callable[[], Runner], kernels: Any) -> None:
        self._kernels = kernels
        self._runner = self._inside(make)

    def _inside(self, work: Callable[[], Any]) -> Any:
        # not backend.override, whose counting would be timed
        previous, backend._override = backend._override, self._kernels
        try:
            return work()
        finally:
            backend._override = previous

    def __call__(self) -> None:
        self._inside(self._runner)

    def prepare(self) -> None:
        self._runner.prepare()

    def results(self) -> dict[str, Sequence[Tensor]]:
        return self._runner.results()
