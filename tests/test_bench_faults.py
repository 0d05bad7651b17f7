"""The benches time nothing that computes the wrong thing, and break nothing that others of a comparison need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.bench import cases, gradient_jobs, harness, jobs, phases
from halfstep.bench.harness import Comparison, Provider, Runner, WrongResultError

pytest.importorskip("halfstep._cpu", reason="the benches time the native kernels, and they are not built here")

CASE = cases.Case("small", ((300, 7), (5,), (1,), (64, 9)))


def with_provider(comparison: Comparison, make: Callable[[], Runner]) -> Comparison:
    providers = [*comparison.providers, Provider("planted", make, None)]
    return Comparison(**{**vars(comparison), "providers": providers})


def planted(change: Callable[[phases.Halfstep], Any]) -> Comparison:
    """The bf16 phase with one more halfstep, changed."""
    w, g = phases.narrow(CASE, torch.bfloat16)

    def make() -> Runner:
        runner = phases.Halfstep(phases.clones(w), g, max_grad_norm=phases.MAX_NORM)
        change(runner)
        return runner

    return with_provider(jobs.bf16_phase(CASE), make)


def set_in_group(key: str, factor: float) -> Callable[[phases.Halfstep], None]:
    def change(runner: phases.Halfstep) -> None:
        value = runner.optimizer.param_groups[0][key]
        scaled = tuple(factor * v for v in value) if isinstance(value, tuple) else factor * value
        runner.optimizer.param_groups[0][key] = scaled

    return change


def after_the_job(damage: Callable[[dict[str, Sequence[Tensor]]], Any]) -> Callable[[phases.Halfstep], None]:
    def change(runner: phases.Halfstep) -> None:
        results = runner.results

        def damaged() -> dict[str, Sequence[Tensor]]:
            found = results()
            with torch.no_grad():
                damage(found)
            return found

        runner.results = damaged  # type: ignore[method-assign]

    return change


def truncate(found: dict[str, Sequence[Tensor]]) -> None:
    for weight, master in zip(found["weight"], found["master"], strict=True):
        weight.copy_((master.view(torch.int32) & ~0xFFFF).view(torch.float32))


FAULTS: dict[str, Callable[[phases.Halfstep], Any]] = {
    "learning rate": set_in_group("lr", 1.0001),
    "no weight decay": set_in_group("weight_decay", 0.0),
    "betas": set_in_group("betas", 0.9999),
    "no clipping": lambda runner: setattr(runner.optimizer, "max_grad_norm", None),
    "a step too many": lambda runner: runner.optimizer.step(),
    "weights truncated": after_the_job(truncate),
    "last element of v": after_the_job(lambda found: found["exp_avg_sq"][-1].view(-1)[-1:].zero_()),
    "a NaN": after_the_job(lambda found: found["master"][1].view(-1)[3:4].fill_(float("nan"))),
    "a tensor less": after_the_job(lambda found: found.update(exp_avg=found["exp_avg"][:-1])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_is_not_timed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "measure", lambda *_: pytest.fail("timed before all were checked"))
    with pytest.raises(WrongResultError, match=r"planted gives \w+\[\d+\] = .*, expected|planted: exp_avg has"):
        list(harness.run([planted(FAULTS[fault])], rounds=1))


def test_the_unchanged_step_passes_where_the_wrong_ones_fail() -> None:
    rows = list(harness.run([planted(lambda runner: None)], rounds=1))
    assert next(row for row in rows if row["provider"] == "planted")["calls"] > 0


def test_nobody_may_leave_out_clipping() -> None:
    """Also torch's providers, which are checked given torch's own norm."""
    comparison = jobs.bf16_phase(CASE)
    w, g = phases.narrow(CASE, torch.bfloat16)
    for provider in comparison.providers:
        with pytest.raises(WrongResultError, match="planted gives"):
            harness.check(comparison, provider._replace(name="planted"), phases.Halfstep(phases.clones(w), g))


def test_a_forgotten_loss_scale_is_not_timed() -> None:
    w, g = phases.narrow(CASE, torch.float16, phases.LOSS_SCALE)
    comparison = with_provider(jobs.fp16_phase(CASE), lambda: phases.Halfstep(w, g))
    with pytest.raises(WrongResultError, match="planted gives"):
        list(harness.run([comparison], rounds=1))


@pytest.mark.parametrize(
    ("comparison", "result", "damage"),
    [
        (lambda: gradient_jobs.cast(CASE, torch.float32, torch.bfloat16), "nearest", 1 - 2**-8),
        (lambda: gradient_jobs.cast(CASE, torch.float32, torch.float16), "stochastic", 1 - 2**-9),
        (lambda: gradient_jobs.unscale(CASE), "grad", 1 + 2**-22),
        (lambda: gradient_jobs.accumulate(CASE, torch.bfloat16), "sum", 1 + 2**-22),
        (lambda: gradient_jobs.clip(CASE, 1.0), "grad", 1 + 2**-20),
        (lambda: gradient_jobs.norm(CASE, torch.bfloat16), "norm", 1 + 2**-20),
        (lambda: gradient_jobs.norms(CASE, torch.bfloat16), "norm", 1 + 2**-20),
    ],
)
def test_a_wrong_list_function_is_not_timed(comparison: Callable[[], Comparison], result: str, damage: float) -> None:
    job = comparison()
    provider = job.providers[0]
    right = provider.make()
    harness.check(job, provider, right)

    class Damaged(Runner):
        def __call__(self) -> None: ...

        def results(self) -> dict[str, Sequence[Tensor]]:
            (tensors,) = right.results().values()
            return {result: [(t.double() * damage).to(t.dtype) for t in tensors]}

    with pytest.raises(WrongResultError, match=rf"damaged gives {result}\[\d+\]"):
        harness.check(job, provider._replace(name="damaged"), Damaged())


def test_the_bench_leaves_halfsteps_own_gradients_alone() -> None:
    """Providers of a comparison share their gradients, so none may write them."""
    w, g = phases.narrow(CASE, torch.bfloat16)
    before = phases.clones(g)
    for make in (lambda: phases.Halfstep(phases.clones(w), g, max_grad_norm=1.0), lambda: phases.TorchExpert(w, g)):
        make()()
    assert all(torch.equal(a, b) for a, b in zip(g, before, strict=True))
    assert hs.AdamW is type(phases.Halfstep(w, g).optimizer)
