"""What is timed: lists of tensor shapes that real models have, and data for them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

_BYTES_OF_A_COMPARISON = 120  # for each element: all providers' weights, gradients and states at once, and some room
_CPU = torch.device("cpu")
GRAD_NORM = 8.0  # of every case's gradients: clipping to 1 always has something to do


@dataclass(frozen=True)
class Case:
    """A named list of shapes.

    Args:
        host_bound: the tensors are so small that Python and bookkeeping count: the kernels are timed alone, too.
        bandwidth: there are enough bytes for a bandwidth probe to say something.
        device: where the tensors are.
        gpu: it is a GPU: others are worth comparing with than on a CPU.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    host_bound: bool = False
    bandwidth: bool = True
    device: torch.device = _CPU
    gpu: bool = False

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def at_once(self) -> int:
        """Elements that a check looks at together: few launches on a GPU, on a CPU intermediates that fit the cache."""
        return 16 * AT_ONCE if self.gpu else AT_ONCE

    def weights(self) -> list[Tensor]:
        """float32, of the size trained weights have."""
        return self._normal(seed=0, std=0.02)

    def gradients(self) -> list[Tensor]:
        """float32, with a global norm near GRAD_NORM."""
        return self._normal(seed=1, std=GRAD_NORM / math.sqrt(self.elements))

    def _normal(self, seed: int, std: float) -> list[Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        return [torch.empty(shape, device=self.device).normal_(std=std, generator=generator) for shape in self.shapes]


def flat(elements: int, name: str) -> Case:
    return Case(name, ((elements,),))


def gpt2(width: int, vocabulary: int, context: int, layers: int) -> Case:
    """GPT-2's 4 + 12 * layers tensors (Radford et al., "Language models are unsupervised multitask learners", 2019)."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    case = Case("", (*shapes, (width,), (width,)))
    return Case(f"GPT-2-like {_short(case.elements)}, {len(case.shapes)} tensors", case.shapes)


def llama(layers: int, width: int = 4096, hidden: int = 11008, vocabulary: int = 32000) -> Case:
    """Llama-7B's tensors with fewer layers than its 32 (Touvron et al., "LLaMA", 2023)."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width)]
    for _ in range(layers):
        shapes += [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    case = Case("", (*shapes, (width,), (vocabulary, width)))
    return Case(f"Llama-7B-shaped, {layers} of 32 layers, {_short(case.elements)}", case.shapes)


def tiny(count: int) -> Case:
    """Tensors of 64 to 4,096 elements: many small layers, adapters, norms."""
    sizes = torch.randint(64, 4097, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return Case(f"{count:,} tensors of 64-4,096", tuple((n,) for n in sizes), host_bound=True)


def scalars(count: int) -> Case:
    return Case(f"{count:,} one-element tensors", ((1,),) * count, host_bound=True, bandwidth=False)


def standard(quick: bool) -> list[Case]:
    """The cases of every bench. Quick ones have the same structure and fit into a test."""
    if quick:
        return [flat(2**17, "flat 128 K"), gpt2(64, 256, 64, 2), tiny(100), scalars(100)]
    return [flat(2**26, "flat 64 M"), gpt2(576, 50257, 1024, 12), tiny(5000), scalars(300), scalars(5000)]


def on_gpu(device: torch.device, memory: int, quick: bool) -> list[Case]:
    """The cases of every bench on a GPU.

    Args:
        memory: free bytes on it. The optimizer's comparisons take about 100 for each element.
    """
    if quick:
        chosen = [llama(1, 64, 172, 320), gpt2(64, 256, 64, 2), tiny(100), scalars(100)]
    else:
        fitting = [n for n in range(1, 33) if llama(n).elements * _BYTES_OF_A_COMPARISON <= memory]
        chosen = [llama(fitting[-1])] if fitting else []
        chosen += [gpt2(768, 50257, 1024, 12), tiny(5000), scalars(300)]
    return [replace(case, device=device, gpu=True) for case in chosen]


def _short(elements: int) -> str:
    return f"{elements / 1e6:.0f} M" if elements >= 10**7 else f"{elements / 1e6:.1f} M"


AT_ONCE = 2**20  # elements; keeps the float64 intermediates of a check in the cache


class Flat:
    """A list of tensors seen as one vector; a slice copies only what it touches."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = [t.detach().reshape(-1) for t in tensors]
        self._starts = [0, *accumulate(t.numel() for t in self._tensors)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, where: slice) -> Tensor:
        begin, end = where.start, min(where.stop, len(self))
        parts = []
        i = bisect_right(self._starts, begin) - 1
        while begin < end:
            stop = min(end, self._starts[i + 1])
            parts.append(self._tensors[i][begin - self._starts[i] : stop - self._starts[i]])
            begin, i = stop, i + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def norm(self) -> float:
        """2-norm, in float64."""
        slices = (self[begin : begin + AT_ONCE] for begin in range(0, len(self), AT_ONCE))
        return math.sqrt(sum(part.double().square().sum().item() for part in slices))
