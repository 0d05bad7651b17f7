"""What it costs to keep less: forward and backward of a stack of Transformer blocks under each policy of hs.checkpoint.

    halfstep bench activations [--quick] [--device cuda] [--only "width 512"]

Gradients are those of the plain model, bit for bit, or nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.bench.cases import Case
from halfstep.bench.clocks import Runner
from halfstep.bench.command import run_bench
from halfstep.bench.harness import Comparison, Provider

PLAIN = "nothing recomputed"
HALF_WAY = "ByteBudget, half way"  # between what "layer" keeps and what is kept without
_LAYERS, _HEAD_DIM = 8, 64


class Block(nn.Module):
    """Llama's: norms, causal attention with rotary positions left out, SwiGLU of 8/3 of the width."""

    def __init__(self, width: int):
        super().__init__()
        hidden = 64 * round(width * 8 / 3 / 64)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, _HEAD_DIM)).permute(2, 0, 3, 1, 4)
        x = x + self.out(hs.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Step(Runner):
    """Forward and backward of one batch under a policy."""

    def __init__(self, case: Case, policy: str) -> None:
        batch, length, width = case.shapes[0]
        torch.manual_seed(0)
        dtype = torch.bfloat16 if case.gpu else torch.float32
        with torch.device(case.device):
            self.model = nn.Sequential(*(Block(width) for _ in range(_LAYERS))).to(dtype)
            self.x = torch.randn(batch, length, width, dtype=dtype)
        if policy == HALF_WAY:
            plan = self._under(hs.ByteBudget(2**60)).plan  # keeps all, and says what that and the least is
            self._under(hs.ByteBudget((plan.least + plan.most) // 2))
        elif policy != PLAIN:
            hs.checkpoint(self.model, policy)

    def _under(self, budget: hs.ByteBudget) -> Any:
        handle = hs.checkpoint(self.model, budget)
        self.model(self.x)
        return handle

    def prepare(self) -> None:
        self.model.zero_grad()

    def __call__(self) -> None:
        self.model(self.x).float().square().mean().backward()

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {"gradients": [p.grad for p in self.model.parameters() if p.grad is not None]}


def cases(standard: Sequence[Case], quick: bool) -> list[Case]:
    """Batch, length and width of the blocks' input; for the device of the other benches' cases."""
    sizes = [(4, 512, 256), (1, 1024, 512)]
    if quick:
        sizes = [(2, 16, 64)]
    elif standard[0].gpu:
        sizes = [(4, 2048, 2048), (1, 8192, 2048)]
    return [
        replace(standard[0], name=f"{_LAYERS} blocks, {b} x {s}, width {h}", shapes=((b, s, h),), bandwidth=False)
        for b, s, h in sizes
    ]


def comparisons(chosen: list[Case], only: str = "") -> Iterator[Comparison]:
    what = "forward and backward"
    for case in chosen:
        if only.lower() in f"{case.name}: {what}".lower():
            yield comparison(case, what)


def comparison(case: Case, what: str) -> Comparison:
    @cache
    def plain() -> Tensor:
        step = Step(case, PLAIN)
        step()
        return torch.cat([gradient.flatten().double() for gradient in step.results()["gradients"]])

    def expected(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
        truth = plain()[begin:end]
        return {"gradients": (truth, torch.zeros_like(truth))}

    providers = [Provider(name, lambda name=name: Step(case, name), None) for name in (PLAIN, "layer", "selective")]
    providers.append(Provider(HALF_WAY, lambda: Step(case, HALF_WAY), None))
    return Comparison(case, what, PLAIN, providers, expected, elements=len(plain()), memory=True)


def main(arguments: Sequence[str] | None = None) -> None:
    about = "A stack of Transformer blocks under each policy of hs.checkpoint: time and memory of forward and backward."
    note = "extra MiB: what forward and backward take at the worst moment beside weights and input, gradients included"
    run_bench("activations", about, comparisons, arguments, note=note, cases_of=cases, each_backend=False)


if __name__ == "__main__":
    main()
