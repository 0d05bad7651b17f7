"""The tables of a Triton plan: what is copied to the device again from step to step, and that what is not still holds.

Guards: a copy in every step, a step with the numbers, gradients or dtypes of an earlier one.
"""

from __future__ import annotations

import pytest
import torch
from adam_rows import WEIGHTS, Case, make_case
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_all_same_bits, assert_same_bits
from optimizer_cases import GROUPS
from torch import Tensor

from halfstep.ops import native_cpu, triton_plan
from halfstep.reference.step import AdamRow, StepInputs

ROWS, SETTINGS = "rows", "settings"


class Both:
    """A plan in the interpreter and one of the CPU's kernels, of equal rows, which take the same steps."""

    def __init__(self, backend) -> None:
        cases = [make_case(WEIGHTS[2 * i], FLOAT32, FLOAT32, 6 + i, seed=i, group=i, step=i) for i in range(2)]
        self.rows, self.twins = ([copy_of(case) for case in cases] for _ in range(2))
        self.plan, self.judge = backend.AdamPlan(self.rows), native_cpu.AdamPlan(self.twins)
        self.grads = [ordinary(6 + i, FLOAT32, 10 + i) for i in range(2)]
        self.groups, self.inputs = GROUPS[:2], StepInputs(max_norm=1.0, seed=3)

    def step(self) -> None:
        for plan in (self.plan, self.judge):
            plan.set_grads(self.grads)
        result, first_bad = self.plan.run(self.groups, self.inputs, with_stats=True)
        total, bad = self.judge.grad_stats(None)
        groups = [group._replace(lr=float(group.lr)) for group in self.groups]
        expected = self.judge.update(groups, self.inputs._replace(sum_squares=total, first_bad=bad))
        assert_all_same_bits([*result, first_bad], [*expected, bad], "result")
        for mine, theirs in zip(self.rows, self.twins, strict=True):
            assert_all_same_bits(mine[:6], theirs[:6], "row")


def copy_of(case: Case) -> AdamRow:
    return AdamRow(*(field.clone() if isinstance(field, Tensor) else field for field in case.row))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a plan has copied to the device so far."""
    seen: list[str] = []
    words = triton_plan.Words

    def counted(lists, *given):
        seen.append(SETTINGS if len(lists) == 2 else ROWS)
        return words(lists, *given)

    monkeypatch.setattr(triton_plan, "Words", counted)
    return seen


@pytest.fixture
def both(backend, copied) -> Both:
    """After a step."""
    found = Both(backend)
    found.step()
    assert copied == [ROWS, SETTINGS]
    copied.clear()
    return found


def other_values(both: Both) -> None:
    for grad in both.grads:
        grad.mul_(-0.5)


def another_gradient(both: Both) -> None:
    both.grads[1] = -both.grads[1]


def another_rate(both: Both) -> None:
    both.groups = [both.groups[0], both.groups[1]._replace(lr=0.5)]


def another_seed(both: Both) -> None:
    both.inputs = both.inputs._replace(seed=4)


def another_limit(both: Both) -> None:
    both.inputs = both.inputs._replace(max_norm=0.1)


def another_dtype(both: Both) -> None:
    both.grads[0] = both.grads[0].to(BFLOAT16)


def swapped_dtypes(both: Both) -> None:
    """The addresses stay, their meaning does not."""
    both.grads = [both.grads[0].view(BFLOAT16)[:6], both.grads[1]]


def let_go(both: Both) -> None:
    both.plan.drop_grads()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_values, []),
        (let_go, []),
        (another_gradient, [SETTINGS]),
        (another_rate, [SETTINGS]),
        (another_seed, [SETTINGS]),
        (another_limit, [SETTINGS]),
        (another_dtype, [ROWS, SETTINGS]),
        (swapped_dtypes, [ROWS]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_copied_after_a_change(both, copied, change, expected):
    change(both)
    both.step()
    assert copied == expected
    both.step()
    assert copied == expected, "once"


def test_a_rate_on_the_device_is_read_where_it_is(both, copied):
    """A new value costs no copy, a new tensor does."""
    rate = torch.tensor(0.25)
    both.groups = [both.groups[0]._replace(lr=rate), both.groups[1]]
    both.step()
    rate.fill_(0.125)
    both.step()
    assert copied == [SETTINGS]
    both.groups = [both.groups[0]._replace(lr=rate.double()), both.groups[1]]
    both.step()
    assert copied == [SETTINGS] * 2


def test_the_first_pass_alone_needs_no_settings(both, copied):
    """For who adds up several devices; the update that follows has its own numbers."""
    both.plan.set_grads(both.grads)
    both.judge.set_grads(both.grads)
    for mine, theirs in zip(both.plan.grad_stats(None), both.judge.grad_stats(None), strict=True):
        assert_same_bits(mine, theirs, "statistics")
    both.step()
    assert copied == [], "nor does it take the last ones away"


def test_a_first_pass_may_come_before_every_step(backend):
    both = Both(backend)
    both.plan.set_grads(both.grads)
    both.plan.grad_stats(None)
    both.step()


def test_gradients_without_memory_are_refused(backend):
    plan = backend.AdamPlan([make_case(WEIGHTS[0], FLOAT32, FLOAT32, n, seed=n).row for n in (3, 0)])
    for grads in ([torch.ones(3)], [torch.empty(3, device="meta"), torch.ones(0)]):
        with pytest.raises(ValueError, match="expected 2 gradients with memory, got addresses"):
            plan.set_grads(grads)
    plan.set_grads([torch.ones(3), torch.empty(0)])
