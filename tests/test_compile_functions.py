"""The functions on lists under torch.compile(fullgraph=True): the eager bits, and numbers that stay variables.

Guards: calls that are left out, fused or moved; a graph for every value of a number; a check that is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_all_same_bits
from compile_twins import BACKENDS, graphs, tensors
from test_schemas import OPS, adam_arguments, weights
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def whole_phase(tensors: list[Tensor], sources: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
    """Everything public that is not an optimizer, with torch operations between."""
    hs.cast_(tensors, [s * 2 for s in sources], rounding="stochastic", seed=5)
    hs.unscale_(tensors, 0.25, found_inf)
    norm, overflow = hs.grad_stats([t + 1 for t in tensors], scale=2.0)
    hs.cast_(sources, tensors)
    hs.accumulate_(sources, [t * 3 for t in tensors])
    hs.accumulate_(sources[1:], sources[1:])
    norms, total = hs.l2_norms([*sources, *tensors])
    return (
        norm * 2,
        overflow + found_inf,
        norms + total,
        *hs.grad_stats(sources),
        torch.stack([t.float().sum() for t in tensors]),
    )


def clip(params: list[Parameter]) -> Tensor:
    return hs.clip_grad_norm_(params, 0.5) * 2


def outcome(phase: Callable, clipping: Callable) -> list[Tensor]:
    tensors, sources = (
        [ordinary((4, 5), BFLOAT16, i) for i in range(3)],
        [ordinary((4, 5), FLOAT32, i) for i in range(3)],
    )
    found_inf, params = torch.zeros(()), [Parameter(torch.zeros(4, 5)) for _ in sources]
    for p, s in zip(params, sources, strict=True):
        p.grad = s.clone()
    out = phase(tensors, sources, found_inf)
    return [*out, found_inf, *tensors, *sources, clipping(params), *(p.grad for p in params)]


def test_compiled_functions_give_the_eager_bits():
    compiled = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (whole_phase, clip)]
    assert_all_same_bits(outcome(*compiled), outcome(whole_phase, clip), "compiled")


# Inductor's own imports warn
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(" " in torch.__file__, reason="torch's inductor does not quote paths: it cannot link here")
def test_inductor_keeps_the_calls_and_their_order(tmp_path, monkeypatch):
    """Reads and writes of the same tensors by several operators, none of them fused, left out or moved."""

    def between(tensors: list[Tensor], sources: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
        before = hs.grad_stats(tensors)
        hs.cast_(tensors, sources)
        hs.unscale_(tensors, 2.0, found_inf)
        hs.accumulate_(sources, tensors)
        hs.cast_(tensors, sources)
        hs.accumulate_(sources, tensors)
        return *before, *hs.grad_stats(tensors), *hs.l2_norms(sources)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(between, fullgraph=True, backend="inductor")
    assert_all_same_bits(outcome(compiled, clip), outcome(between, clip), "inductor")


def test_a_compiled_update_gives_the_eager_bits():
    def update(arguments: dict[str, Any]) -> Tensor:
        norm, skipped, healed = OPS.adam_.default(**arguments)
        return norm + healed + skipped

    results = []
    for step in (update, torch.compile(update, fullgraph=True, backend="aot_eager")):
        arguments = adam_arguments(weights(), masters=[w.float() for w in weights()], max_norm=1.0)
        results.append([step(arguments)])
        for name in ("params", "exp_avgs", "exp_avg_sqs", "masters", "steps"):
            results[-1] += arguments[name]
    assert_all_same_bits(results[1], results[0], "compiled")


# ---- numbers ---------------------------------------------------------------------------------------------------------
Lists = tuple[list[Tensor], list[Tensor], list[Parameter], Tensor]  # float32, bfloat16, with gradients, found_inf

NUMBERS: dict[str, tuple[Callable[[Lists, Any], Any], list[Any]]] = {
    "clip_grad_norm_": (lambda given, x: hs.clip_grad_norm_(given[2], x), [0.5, 0.7, 1e-3, 5.0, 0.1]),
    "cast_": (lambda given, x: hs.cast_(given[1], given[0], rounding="stochastic", seed=x), [3, 4, 5, 2**31, 6]),
    "grad_stats": (lambda given, x: hs.grad_stats(given[0], scale=x), [2.0, 3.0, 0.1, 7.0, 1e-40]),
    "unscale_": (lambda given, x: hs.unscale_(given[1], x, given[3]), [0.5, 1 / 3, 0.1, 7.0, 1e38]),
}


def given_lists(t: int) -> Lists:
    first, second = ([ordinary((4, 5), dtype, 9 * t + i) for i in range(3)] for dtype in (FLOAT32, BFLOAT16))
    params = [Parameter(torch.zeros(4, 5)) for _ in first]
    for i, p in enumerate(params):
        p.grad = ordinary((4, 5), FLOAT32, 20 * t + i)
    return first, second, params, torch.zeros(())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "values"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_becomes_a_variable_at_its_second_value(function: Callable, values: list[Any], backend: str) -> None:
    """torch.compile takes the first for a constant. No graph is made for the third value and later."""
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        results.append([])
        for t, value in enumerate(values):
            given = given_lists(t)
            results[-1] += [*tensors(call(given, value)), *tensors(given), *(p.grad for p in given[2])]
    assert_all_same_bits(results[1], results[0], "compiled")
    assert graphs() == 2


@pytest.mark.parametrize("function", ["grad_stats", "unscale_"])
def test_a_tensor_is_a_variable_from_the_start(function: str) -> None:
    call = torch.compile(NUMBERS[function][0], fullgraph=True, backend="aot_eager")
    for t, value in enumerate(NUMBERS[function][1]):
        call(given_lists(t), torch.tensor(value))
    assert graphs() == 1


def test_an_error_that_depends_on_a_value_is_raised_between_graphs() -> None:
    def clipped(given: Lists, finite: bool) -> Tensor:
        return hs.clip_grad_norm_(given[2], 0.5, error_if_nonfinite=finite) * 2

    expected, given = given_lists(0), given_lists(0)
    call = torch.compile(clipped, backend="aot_eager")
    assert torch.equal(call(given, True), clipped(expected, True))
    given[2][1].grad[0, 0] = float("inf")
    before = [p.grad.clone() for p in given[2]]
    with pytest.raises(RuntimeError, match="the gradients' norm is inf, so they were not clipped"):
        call(given, True)
    assert_all_same_bits([p.grad for p in given[2]], before, "gradient")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="keeps books in Python here"):
        torch.compile(clipped, backend="aot_eager", fullgraph=True)(given, True)
