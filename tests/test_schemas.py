"""The operators as torch sees them: schemas that tell the truth, fake tensors, torch.compile(fullgraph=True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_all_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import halfstep as hs

OPS = torch.ops.halfstep


def adam_arguments(params: list[Tensor], **changes: Any) -> dict[str, Any]:
    arguments = {
        "params": params,
        "grads": [ordinary(tuple(p.shape), p.dtype, 9) for p in params],
        "exp_avgs": [torch.zeros_like(p, dtype=FLOAT32) for p in params],
        "exp_avg_sqs": [torch.zeros_like(p, dtype=FLOAT32) for p in params],
        "max_exp_avg_sqs": [],
        "masters": [],
        "steps": [torch.tensor(3) for _ in params],
        "scale": None, "found_inf": None, "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
        "decoupled": True, "maximize": False, "max_norm": None, "skip_nonfinite": False, "seed": 0,
        "stochastic_weight": False, "heal": True,
    }  # fmt: skip
    return {**arguments, **changes}


def lists() -> tuple[list[Tensor], list[Tensor]]:
    """Of two dtypes, with an empty tensor, a transposed one, and one with gaps."""
    a = [ordinary((4, 5), FLOAT32, 0), ordinary((0,), BFLOAT16, 1), ordinary((5, 4), BFLOAT16, 2).t()]
    b = [ordinary((4, 9), BFLOAT16, 3)[:, ::2], ordinary((0,), FLOAT32, 4), ordinary((4, 5), FLOAT32, 5)]
    return a, b


def floats() -> list[Tensor]:
    """Laid out as the first list, in float32."""
    return [torch.empty_strided(t.shape, t.stride()).copy_(t) for t in lists()[0]]


def weights() -> list[Tensor]:
    return [ordinary((4, 5), BFLOAT16, 0), ordinary((7,), BFLOAT16, 1)]


SAMPLES: dict[str, tuple[Callable, Callable[[], tuple[tuple, dict[str, Any]]]]] = {
    "grad_stats": (OPS.grad_stats.default, lambda: ((lists()[0], None), {})),
    "grad_stats, scaled": (OPS.grad_stats.default, lambda: ((lists()[1], torch.tensor(8.0)), {})),
    "grad_stats, no tensors": (OPS.grad_stats.default, lambda: (([], None), {})),
    "l2_norms": (OPS.l2_norms.default, lambda: ((lists()[0],), {})),
    "l2_norms, no tensors": (OPS.l2_norms.default, lambda: (([],), {})),
    "unscale_": (OPS.unscale_.default, lambda: ((lists()[0], torch.tensor(0.5), torch.zeros(())), {})),
    "clip_grad_norm_": (OPS.clip_grad_norm_.default, lambda: ((lists()[1], 0.5), {})),
    "cast_": (OPS.cast_.default, lambda: (lists(), {})),
    "cast_, stochastic": (OPS.cast_.default, lambda: (lists(), {"stochastic": True, "seed": 3})),
    "accumulate_": (OPS.accumulate_.default, lambda: ((floats(), lists()[1]), {})),
    "adam_": (OPS.adam_.default, lambda: ((), adam_arguments(weights(), skip_nonfinite=True))),
    "adam_, all options": (
        OPS.adam_.default,
        lambda: (
            (),
            adam_arguments(
                weights(), masters=[w.float() for w in weights()], scale=torch.tensor(4.0), found_inf=torch.zeros(()),
                max_exp_avg_sqs=[torch.zeros_like(w, dtype=FLOAT32) for w in weights()], max_norm=1.0,
                skip_nonfinite=True,
            ),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "make"), SAMPLES.values(), ids=SAMPLES)
def test_opcheck(op, make):
    """Schema (what is mutated, what aliases), autograd registration, fake function, functionalisation."""
    args, kwargs = make()
    torch.library.opcheck(op, args, kwargs)


def test_every_operator_has_a_sample():
    defined = {
        name.removeprefix("halfstep::") for name in torch._C._dispatch_get_all_op_names() if "halfstep::" in name
    }
    assert defined == {name.split(",")[0] for name in SAMPLES}


@pytest.mark.parametrize(("op", "make"), SAMPLES.values(), ids=SAMPLES)
def test_fake_results_look_like_the_real_ones(op, make):
    args, kwargs = make()
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        faked = op(*fake[0], **fake[1])
    real = op(*args, **kwargs)
    as_tuple = [r if isinstance(r, tuple) else (() if r is None else (r,)) for r in (faked, real)]
    assert [(t.shape, t.dtype, t.device) for t in as_tuple[0]] == [(t.shape, t.dtype, t.device) for t in as_tuple[1]]


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
    torch._dynamo.reset()
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
    torch._dynamo.reset()
    compiled = torch.compile(between, fullgraph=True, backend="inductor")
    assert_all_same_bits(outcome(compiled, clip), outcome(between, clip), "inductor")


def test_a_compiled_update_gives_the_eager_bits():
    def update(arguments: dict[str, Any]) -> Tensor:
        norm, skipped, healed = OPS.adam_.default(**arguments)
        return norm + healed + skipped

    torch._dynamo.reset()
    results = []
    for step in (update, torch.compile(update, fullgraph=True, backend="aot_eager")):
        arguments = adam_arguments(weights(), masters=[w.float() for w in weights()], max_norm=1.0)
        results.append([step(arguments)])
        for name in ("params", "exp_avgs", "exp_avg_sqs", "masters", "steps"):
            results[-1] += arguments[name]
    assert_all_same_bits(results[1], results[0], "compiled")
