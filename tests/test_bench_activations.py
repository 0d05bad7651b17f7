"""The bench of recomputation: everyone is held to the plain model's bits, and memory is what a step takes.

Guards: a policy that is timed though its gradients are others, a budget that is no policy of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfstep.bench import activations, cases, clocks, harness, table

pytest.importorskip("halfstep._cpu", reason="the benches' rows name the native kernels, and they are not built here")
POLICIES = [activations.PLAIN, "layer", "selective", activations.HALF_WAY]


def case() -> cases.Case:
    (quick,) = activations.cases(cases.standard(quick=True), quick=True)
    return quick


def test_a_quick_run_checks_everyone(tmp_path: Path) -> None:
    activations.main(["--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)])
    rows = table.read(tmp_path / "activations.jsonl")
    assert [row["provider"] for row in rows] == POLICIES
    for row in rows:
        assert (row["error"], row["skipped"]) == (0, None)
        assert row["extra_bytes"] > 4 * row["elements"]
        assert row["note"].startswith("extra MiB")


@pytest.mark.parametrize("name", POLICIES)
def test_other_gradients_are_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = activations.comparison(case(), "forward and backward")
    provider = next(p for p in comparison.providers if p.name == name)
    runner = provider.make()
    results = runner.results

    def wrong() -> dict[str, list[torch.Tensor]]:
        found = [gradient.clone() for gradient in results()["gradients"]]
        found[-1].view(torch.int32).view(-1)[-1] ^= 1  # the last bit of the last number
        return {"gradients": found}

    monkeypatch.setattr(runner, "results", wrong)
    with pytest.raises(harness.WrongResultError, match=rf"{name} gives gradients\["):
        harness.check(comparison, provider, runner)


def test_policies_take_less_at_the_worst_moment() -> None:
    large = activations.replace(case(), shapes=((8, 64, 64),))
    plain, layer, half = (
        clocks.HOST.extra_bytes(activations.Step(large, name)) for name in (activations.PLAIN, "layer", POLICIES[3])
    )
    assert layer < half < plain
