"""halfstep._cpu checks what it is given itself: a caller's mistake is an exception, never an access out of bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from conditions import ISAS

from halfstep import _cpu
from halfstep.ops import native_cpu

F32, BF16, F16 = range(3)
X = torch.zeros(4)
P = X.data_ptr()
SUMS = torch.zeros(4, dtype=torch.float64)
Q = SUMS.data_ptr()
RUN = (1, "")  # threads, isa
GROUP = (1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)


def plan(**changes: list[int]) -> Any:
    """A plan of two rows of 4 and 0 elements in which some columns are replaced."""
    columns = {
        "numel": [4, 0], "first_index": [0, 0], "param_id": [0, 1], "group": [0, 1], "param_dtype": [BF16, F32],
        "state_dtype": [F32, F32],
    }  # fmt: skip
    return _cpu.AdamPlan(**{**columns, **changes})


def tensors(a_plan: Any, **changes: list[int]) -> Any:
    names = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "remainder", "step")
    columns = {name: [P, P] if name in ("param", "exp_avg", "exp_avg_sq", "step") else [0, 0] for name in names}
    a_plan.set_tensors(**{**columns, **changes})
    return a_plan


def ready() -> Any:
    """A plan that could step: 4 bfloat16 weights, and an empty row."""
    a_plan = tensors(plan())
    a_plan.set_grads([P, 0], [F32, F32])
    return a_plan


REFUSED = [
    # lists of equal length
    (lambda: _cpu.grad_stats([P], [4, 4], [F32], 1.0, *RUN), "numel has 2 entries, expected 1"),
    (lambda: _cpu.grad_stats([P], [4], [], 1.0, *RUN), "dtype has 0 entries, expected 1"),
    (lambda: _cpu.scale_([P, P], [4], [F32, F32], 1.0, *RUN), "numel has 1 entries, expected 2"),
    (lambda: _cpu.cast_([P], [F32], [P, P], [F32], [4], False, 0, *RUN), "src has 2 entries, expected 1"),
    (lambda: _cpu.cast_([P], [F32], [P], [F32], [4, 4], False, 0, *RUN), "numel has 2 entries, expected 1"),
    (lambda: _cpu.cast_([P], [F32], [P], [], [4], False, 0, *RUN), "dtype has 0 entries, expected 1"),
    (lambda: _cpu.sums_of_squares([P], [4, 4], [F32], Q, 1, *RUN), "numel has 2 entries, expected 1"),
    (lambda: _cpu.sums_of_squares([P], [4], [F32], Q, 2, *RUN), "sums has 2 entries, expected 1"),
    (lambda: _cpu.sums_of_squares([P], [4], [F32], Q, 0, *RUN), "sums has 0 entries, expected 1"),
    (lambda: _cpu.accumulate_([P, P], [F32, F32], [P], [F32], [4, 4], *RUN), "src has 1 entries, expected 2"),
    (lambda: _cpu.accumulate_([P], [F32], [P], [F32], [4, 4], *RUN), "numel has 2 entries, expected 1"),
    (lambda: _cpu.accumulate_([P], [F32], [P], [F32, F32], [4], *RUN), "dtype has 2 entries, expected 1"),
    *(
        (lambda name=name: plan(**{name: [0]}), f"{name} has 1 entries, expected 2")
        for name in ("first_index", "param_id", "group", "param_dtype", "state_dtype")
    ),
    *(
        (lambda name=name: tensors(plan(), **{name: [P]}), f"{name} has 1 entries, expected 2")
        for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "remainder", "step")
    ),
    (lambda: tensors(plan()).set_grads([P], [F32, F32]), "grad has 1 entries, expected 2"),
    (lambda: tensors(plan()).set_grads([P, P], [F32]), "dtype has 1 entries, expected 2"),
    # codes, sizes, addresses
    (lambda: _cpu.grad_stats([P], [4], [3], 1.0, *RUN), "dtype code 3 is not 0 (f32), 1 (bf16) or 2 (f16)"),
    (lambda: _cpu.grad_stats([P], [4], [-1], 1.0, *RUN), "dtype code -1 is not 0 (f32), 1 (bf16) or 2 (f16)"),
    (lambda: plan(state_dtype=[F32, 2**32]), f"dtype code {2**32} is not 0"),
    (lambda: tensors(plan()).set_grads([P, P], [F32, 7]), "dtype code 7 is not 0"),
    (lambda: _cpu.sums_of_squares([P], [4], [5], Q, 1, *RUN), "dtype code 5 is not 0 (f32), 1 (bf16) or 2 (f16)"),
    (lambda: _cpu.sums_of_squares([P], [4], [F32], Q, -1, *RUN), "sums has a negative size"),
    (lambda: _cpu.sums_of_squares([P], [4], [F32], 0, 1, *RUN), "sums has no storage"),
    (lambda: _cpu.sums_of_squares([0], [4], [F32], Q, 1, *RUN), "tensor 0 has no storage"),
    (lambda: _cpu.accumulate_([P], [F32], [P], [3], [4], *RUN), "dtype code 3 is not 0 (f32), 1 (bf16) or 2 (f16)"),
    (lambda: _cpu.accumulate_([0], [F32], [P], [F32], [4], *RUN), "tensor 0 has no storage"),
    (lambda: _cpu.accumulate_([P, P], [F32, F32], [P, 0], [F32, F32], [4, 4], *RUN), "tensor 1 has no storage"),
    (lambda: _cpu.accumulate_([P], [F32], [P], [F32], [-4], *RUN), "tensor 0 has a negative size"),
    (lambda: _cpu.scale_([P, P], [4, -1], [F32, F32], 1.0, *RUN), "tensor 1 has a negative size"),
    (lambda: _cpu.scale_([P, 0], [4, 1], [F32, F32], 1.0, *RUN), "tensor 1 has no storage"),
    (lambda: tensors(plan()).set_grads([0, P], [F32, F32]), "tensor 0 has no storage"),
    *(
        (lambda name=name: plan(**{name: [0, -1]}), "row 1 has a negative size, index, id or group")
        for name in ("numel", "first_index", "param_id", "group")
    ),
    *(
        (lambda name=name: tensors(plan(), **{name: [0, 0]}), "row 0 lacks param, exp_avg or exp_avg_sq")
        for name in ("param", "exp_avg", "exp_avg_sq")
    ),
    (lambda: tensors(plan(), step=[P, 0]), "row 1 lacks a step counter"),
    (lambda: tensors(plan(), master=[P, 0], remainder=[P, 0]), "row 0 has both a master and a remainder"),
    (lambda: tensors(plan(), master=[0, P]), "row 1 has a master for a float32 param"),
    (lambda: tensors(plan(), remainder=[0, P]), "row 1 has a remainder for a param that is not bfloat16"),
    (
        lambda: tensors(plan(param_dtype=[F16, F32]), remainder=[P, 0]),
        "row 0 has a remainder for a param that is not bfloat16",
    ),
    # order of calls, groups, how to run
    (lambda: plan().set_grads([P, P], [F32, F32]), "set_tensors comes before set_grads"),
    (lambda: plan().grad_stats(1.0, *RUN), "set_tensors and set_grads come before a step"),
    (lambda: tensors(plan()).update([GROUP] * 2, 1.0, 0, False, True, *RUN), "set_tensors and set_grads come before"),
    (lambda: tensors(ready()).grad_stats(1.0, *RUN), "set_tensors and set_grads come before a step"),
    (lambda: ready().update([GROUP], 1.0, 0, False, True, *RUN), "got 1 groups, the rows need 2"),
    (lambda: ready().update([GROUP] * 2, 1.0, 0, False, True, 0, ""), "threads must be at least 1, got 0"),
    (lambda: _cpu.grad_stats([P], [4], [F32], 1.0, -2, ""), "threads must be at least 1, got -2"),
    (lambda: _cpu.scale_([P], [4], [F32], 1.0, 1, "sse9"), "isa 'sse9' is not in this build; see supported_isas()"),
    (lambda: _cpu.sums_of_squares([P], [4], [F32], Q, 1, 0, ""), "threads must be at least 1, got 0"),
    (lambda: _cpu.accumulate_([P], [BF16], [P], [F32], [4], *RUN), "accumulate_ adds to float32 tensors only"),
    (lambda: _cpu.accumulate_([P], [F32], [P], [F32], [4], 1, "avx3"), "isa 'avx3' is not in this build"),
    (lambda: _cpu.probe_(P, P, P, 0, 4, *RUN), "probe needs four float32 buffers"),
    (lambda: _cpu.probe_(P, P, P, P, -1, *RUN), "probe needs four float32 buffers"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_callers_mistake_is_an_error(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    assert not X.any()
    assert not SUMS.any()


def test_lists_of_different_shapes_are_not_cast():
    read = [_cpu.read_list(native_cpu.tensor_reader(), [torch.zeros(*s)]) for s in ((4,), (5,), (2, 2))]
    for other in read[1:]:
        with pytest.raises(ValueError, match="the lists of cast_ have different shapes"):
            _cpu.cast_(read[0], other, False, 0, *RUN)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        _cpu.grad_stats(read[0], 1.0, 0, "")


def test_lists_that_accumulate_and_sums_of_squares_do_not_take():
    """Read lists too: shapes, a dst that is not float32, room for another number of sums."""
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    dst, narrow, other = (
        _cpu.read_list(native_cpu.tensor_reader(), given) for given in ([x, x], [x, y], [x.view(2, 2)] * 2)
    )
    _cpu.accumulate_(dst, narrow, *RUN)
    with pytest.raises(ValueError, match="the lists of accumulate_ have different shapes"):
        _cpu.accumulate_(dst, other, *RUN)
    with pytest.raises(ValueError, match="accumulate_ adds to float32 tensors only"):
        _cpu.accumulate_(narrow, dst, *RUN)
    assert _cpu.sums_of_squares(dst, Q, 2, *RUN) == 0
    with pytest.raises(ValueError, match="sums has 3 entries, expected 2"):
        _cpu.sums_of_squares(dst, Q, 3, *RUN)
    with pytest.raises(ValueError, match="sums has no storage"):
        _cpu.sums_of_squares(dst, 0, 2, *RUN)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _cpu.cast_([P], [F32], [P], [F32], [4], True, -1, *RUN),
        lambda: _cpu.cast_([P], [F32], [P], [F32], [4], True, 2**32, *RUN),
        lambda: _cpu.grad_stats([-P], [4], [F32], 1.0, *RUN),
        lambda: _cpu.grad_stats([P], [2**63], [F32], 1.0, *RUN),
        lambda: ready().update([GROUP[:-1]] * 2, 1.0, 0, False, True, *RUN),
    ],
)
def test_numbers_that_do_not_fit_are_type_errors(call):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call()


def test_a_failed_set_tensors_leaves_a_plan_that_cannot_run():
    """Half of the pointers of the new tensors, half of the old: never."""
    a_plan = ready()
    with pytest.raises(ValueError, match="row 1 lacks a step counter"):
        tensors(a_plan, step=[P, 0])
    with pytest.raises(ValueError, match="come before a step"):
        a_plan.update([GROUP] * 2, 1.0, 0, False, True, *RUN)


def test_an_isa_this_machine_cannot_run_is_refused():
    """On a machine that runs everything in the build there is nothing to refuse, which is then what is checked."""
    cannot = set(_cpu.compiled_isas()) - set(ISAS)
    for isa in cannot:
        with pytest.raises(ValueError, match=re.escape(f"isa '{isa}' is built, but this CPU cannot run it")):
            _cpu.grad_stats([P], [4], [F32], 1.0, 1, isa)
    assert ISAS
    assert set(_cpu.compiled_isas()) == {*ISAS, *cannot}


def test_nothing_to_do():
    """Empty lists, and plans without rows."""
    assert _cpu.grad_stats([], [], [], 1.0, *RUN) == (0.0, -1)
    assert _cpu.scale_([], [], [], 1.0, *RUN) == -1
    _cpu.cast_([], [], [], [], [], False, 0, *RUN)
    _cpu.accumulate_([], [], [], [], [], *RUN)
    assert _cpu.sums_of_squares([], [], [], 0, 0, *RUN) == 0.0
    empty = _cpu.AdamPlan([], [], [], [], [], [])
    empty.set_tensors([], [], [], [], [], [], [])
    empty.set_grads([], [])
    assert empty.grad_stats(1.0, *RUN) == (0.0, -1)
    assert empty.update([], 1.0, 0, False, True, *RUN) == 0


@pytest.mark.parametrize("isa", ISAS)
def test_probe(isa):
    """Adam's traffic without its arithmetic, for the benches: adds the gradient to the three others."""
    g, *rest = (torch.arange(70001.0) * k for k in range(1, 5))
    expected = [x + g for x in rest]
    p, m, v = rest
    _cpu.probe_(p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), g.numel(), 2, isa)
    for got, want in zip(rest, expected, strict=True):
        assert_same_bits(got, want, isa)
