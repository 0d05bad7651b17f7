"""One function run plainly and under torch.compile, on twin optimizers that get the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from adversarial import BFLOAT16, FLOAT32
from bits import assert_all_same_bits
from optimizer_runs import assert_same, held, parameters, params_of, set_grads
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs

BACKENDS = ["eager", "aot_eager"]  # the graph as it was traced; the same graph without writes in place
Function = Callable[[hs.Adam, list[Parameter]], Any]  # of an optimizer and its parameters


def two_groups(cls: type[hs.Adam] = hs.AdamW, **options: Any) -> hs.Adam:
    """Six parameters, float32 and bfloat16, in two groups with learning rates of their own."""
    params = parameters(FLOAT32) + parameters(BFLOAT16, seed=9)
    return cls([{"params": params[:4]}, {"params": params[4:], "lr": 3e-3}], **{"lr": 1e-2, **options})


def keep_grad_mode() -> torch.enable_grad:
    """torch's "eager" backend does not end the step's no_grad when an operator raises."""
    return torch.enable_grad()


def only_step(optimizer: hs.Adam, params: list[Parameter]) -> None:
    optimizer.step()


def step(optimizer: hs.Adam, params: list[Parameter]) -> list[torch.Tensor]:
    """What a region sees behind the step: new weights, and what the step says of itself."""
    optimizer.step()
    results = [optimizer.grad_norm * 2, optimizer.skipped.int(), optimizer.healed + 1]
    return [*results, *(p * 2 for p in params)]


def compiled(function: Function, backend: str, *, fullgraph: bool = True) -> Function:
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def graphs() -> int:
    """How many were made since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def tensors(result: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]


def run_both(
    function: Function, backend: str, *, make: Callable[[], hs.Adam] = two_groups, steps: int = 5,
    between: Callable[[hs.Adam, int], Any] = lambda optimizer, t: None, fullgraph: bool = True,
) -> None:  # fmt: skip
    """The same results, weights, gradients, states and reports after every step.

    between: called before each step, outside of the graph, on both.
    """
    plain, traced = make(), make()
    call = compiled(function, backend, fullgraph=fullgraph)
    for t in range(steps):
        results, kept = [], []
        for optimizer, run in ((plain, function), (traced, call)):
            set_grads(params_of(optimizer), t)
            between(optimizer, t)
            params = params_of(optimizer)
            grads = [p.grad for p in params]
            results.append([copy.copy(r) for r in tensors(run(optimizer, params))])
            kept.append([p.grad is grad for p, grad in zip(params, grads, strict=True)])
        assert kept[1] == kept[0], "another tensor is the gradient"
        assert_all_same_bits(results[1], results[0], f"result of step {t}")
        assert_same(held(traced), held(plain))
        for name in ("grad_norm", "skipped", "healed"):
            assert_all_same_bits([getattr(traced, name)], [getattr(plain, name)], name)
        grads = [[p.grad for p in params_of(o)] for o in (traced, plain)]
        assert_all_same_bits(*grads, "gradient")
