"""The operators as torch sees them: schemas that tell the truth, fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from attention_cases import CASES
from compile_twins import two_groups
from optimizer_runs import params_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep  # noqa: F401  registers torch.ops.halfstep

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


STEPPED = two_groups(lr=0.0, weight_decay=0.0)  # each run of the operator is a step: none of them may change a weight
STEPPED.param_groups[1]["lr"] = torch.tensor(0.0)
STEPPED.view.groups = STEPPED.param_groups  # as tracing does


def step_arguments() -> tuple[Any, ...]:
    """All parameters but one."""
    params = [p.detach() for p in params_of(STEPPED)[1:]]
    grads = [ordinary(tuple(p.shape), p.dtype, 9) for p in params]
    return params, grads, [STEPPED.param_groups[1]["lr"]], [1, 2, 3, 4, 5], [1], STEPPED.view.name


def attention_arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of one of the cases of attention, differentiable in q, k, v and bias."""
    (drawn,) = [case.draw(FLOAT32) for case in CASES if case.name == name]
    fields = drawn.call._asdict()
    for field in ("q", "k", "v", "bias"):
        if fields[field] is not None:
            fields[field] = fields[field].detach().requires_grad_()
    return tuple(fields.values()), {}


def attention_backward_arguments(name: str, needs: list[bool]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (drawn,) = [case.draw(FLOAT32) for case in CASES if case.name == name]
    return (drawn.d_out, drawn.d_lse, *OPS.attention(*drawn.call), needs, *drawn.call), {}


SAMPLES: dict[str, tuple[Callable, Callable[[], tuple[tuple, dict[str, Any]]]]] = {
    "grad_stats": (OPS.grad_stats.default, lambda: ((lists()[0], None), {})),
    "grad_stats, scaled": (OPS.grad_stats.default, lambda: ((lists()[1], torch.tensor(8.0)), {})),
    "grad_stats, no tensors": (OPS.grad_stats.default, lambda: (([], None), {})),
    "l2_norms": (OPS.l2_norms.default, lambda: ((lists()[0],), {})),
    "l2_norms, no tensors": (OPS.l2_norms.default, lambda: (([],), {})),
    "unscale_": (OPS.unscale_.default, lambda: ((lists()[0], torch.tensor(0.5), torch.zeros(())), {})),
    "clip_grad_norm_": (OPS.clip_grad_norm_.default, lambda: ((lists()[1], torch.tensor(0.5).double()), {})),
    "cast_": (OPS.cast_.default, lambda: (lists(), {})),
    "cast_, stochastic": (OPS.cast_.default, lambda: (lists(), {"stochastic": True, "seed": 3})),
    "accumulate_": (OPS.accumulate_.default, lambda: ((floats(), lists()[1]), {})),
    **{
        f"attention, {name}": (OPS.attention.default, lambda name=name: attention_arguments(name))
        for name in ("mask in full", "dropout, bias and mask", "transposed, grouped heads and bias", "varlen, dropout",
                     "varlen, packed", "no keys")
    },
    **{
        f"attention_backward, {name}": (
            OPS.attention_backward.default,
            lambda name=name, needs=needs: attention_backward_arguments(name, needs),
        )
        for name, needs in {
            "bias and causal, fewer queries": [True] * 4,
            "transposed, grouped heads and bias": [False, True, False, True],
            "varlen, transposed": [True, False, True, False],
        }.items()
    },
    "step_": (OPS.step_.default, lambda: (step_arguments(), {})),
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
