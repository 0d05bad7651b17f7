"""The bench of attention: its truth is the formula's, wrong results are seen, memory is what calls take.

Guards: a bound so wide that everything passes, memory of the wrong moment, a provider's absence taken for its failure.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from halfstep.bench import attention, attention_providers, cases, clocks, command, harness, table
from halfstep.bench.attention_truth import Job, truths

pytest.importorskip("halfstep._cpu", reason="the benches' rows name the native kernels, and they are not built here")
JOBS = [Job("causal", True), Job("all visible", False), Job("window", True, 5)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[table.Row]:
    """Of a quick run of what is causal."""
    folder = tmp_path_factory.mktemp("results")
    attention.main(["--quick", "--rounds", "1", "--only", ": causal, ", "--out", str(folder)])
    return table.read(folder / "attention.jsonl")


def test_a_quick_run_checks_everyone(rows: list[table.Row]) -> None:
    assert {row["provider"] for row in rows} == {*attention_providers.ON_CPU}
    directions = {f"{job}, {way}" for job in ("causal", "causal, window of 128") for way in ("forward", "backward")}
    assert {row["what"] for row in rows} == directions
    for row in rows:
        assert row["skipped"] is None
        assert 0 < row["error"] <= 1
        assert "tflops" not in row
        assert row["note"].startswith("extra MiB")


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_memory_grows_with_the_length_and_where_scores_are_kept_with_its_square(
    rows: list[table.Row], way: str
) -> None:
    """From 64 to 256; what is the same for every length is the reason for the bounds' distance from 4 and 16."""
    for provider, least, most in (("halfstep", 3.5, 4.5), ("torch SDPA, math", 7, 16)):
        short, long = (
            row["extra_bytes"] for row in rows if (row["what"], row["provider"]) == (f"causal, {way}", provider)
        )
        assert least <= long / short <= most, (provider, short, long)


def test_tables_show_the_memory(rows: list[table.Row], capsys: pytest.CaptureFixture[str]) -> None:
    command._show(rows, None)
    assert "extra MiB" in capsys.readouterr().out
    assert f"{rows[0]['extra_bytes'] / 2**20:,.1f} MiB)" in table.markdown(rows)


def test_memory_is_that_of_the_worst_moment() -> None:
    class Job(clocks.Runner):
        kept = torch.zeros(0)

        def prepare(self) -> None:
            self.kept = torch.zeros(10**6)  # before the call: not counted

        def __call__(self) -> None:
            for _ in range(3):
                torch.zeros(2000)
            self.kept = torch.zeros(1000)

        def results(self) -> dict[str, Any]:
            return {}

    assert clocks.HOST.extra_bytes(Job()) == 8000


# ---- the truth -------------------------------------------------------------------------------------------------------
def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 33, 16, generator=generator).to(dtype).requires_grad_() for _ in range(4)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_truth_is_the_formulas(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.bench.attention_truth._AT_ONCE", 2 * 3 * 33 * 10)  # 10 rows at a time
    q, k, v, d_out = tensors()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(2, 3) * 16**-0.5
    distance = torch.arange(33)[:, None] - torch.arange(33)
    if job.causal:
        scores = scores.masked_fill((distance < 0) | (distance >= (job.window or 33)), -torch.inf)
    out = scores.softmax(-1) @ wide[2]
    expected = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, wide, d_out.double()), strict=True))
    found = truths(job, q, k, v, d_out, False) | truths(job, q, k, v, d_out, True)
    for name, value in {"out": out, **expected}.items():
        truth, allowed = found[name]
        torch.testing.assert_close(truth, value, msg=name)
        assert (allowed > 0).all()
        assert allowed.mean() < 1e-3 * value.abs().mean(), f"{name}: a bound that says something"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_wrong_result_is_seen(job: Job, dtype: torch.dtype, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of scores that are 5 % too large, or a key too many is seen."""
    case = cases.Case("", ((2, 3, 33, 16),), bandwidth=False)
    right = attention_providers.hs.attention

    def planted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return right(q, k, v, **{**options, "scale": 1.05 * 16**-0.5})

    comparison = attention.comparison(case, job, "", dtype, backward)
    list(harness.run([comparison], rounds=1))
    monkeypatch.setattr(attention_providers.hs, "attention", planted)
    with pytest.raises(harness.WrongResultError, match="halfstep gives"):
        list(harness.run([comparison], rounds=1))


# ---- who is there ----------------------------------------------------------------------------------------------------
def skipped(name: str, job: Job = JOBS[0]) -> str:
    q, k, v, d_out = tensors(torch.bfloat16)
    with pytest.raises(harness.UnavailableError) as found:
        attention_providers.ready(name, job, (q, k, v), d_out, False)
    return str(found.value)


def test_providers_that_are_not_there_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped("torch SDPA, cudnn").startswith("it does not do this here: No viable backend")
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    assert skipped("flash-attn").startswith("flash-attn cannot be imported: ")

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_providers.F, "scaled_dot_product_attention", full)
    assert skipped(attention_providers.MATH) == "it runs out of memory"


@pytest.mark.parametrize("job", JOBS[:2], ids=lambda job: job.name)
def test_flex_attention_is_given_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled; on a CPU it has no backward pass."""
    compiled = torch.compile  # which the function itself calls, too, where nobody compiles it
    monkeypatch.setattr(torch, "compile", lambda f, **options: f if "dynamic" in options else compiled(f, **options))
    q, k, v, d_out = (x.detach() for x in tensors())
    runner = attention_providers.ready("FlexAttention", job, (q, k, v), d_out, False)
    truth, allowed = truths(job, q, k, v, d_out, False)["out"]
    assert ((runner.results()["out"][0] - truth).abs() <= allowed).all()


def test_every_backend_of_sdpa_is_forced() -> None:
    assert {*attention_providers._SDPA.values()} == {
        getattr(SDPBackend, name) for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    }


def test_the_cases_and_their_operations() -> None:
    on_gpu = cases.on_gpu(torch.device("cpu"), 2**37, quick=False)
    chosen = attention.cases(on_gpu, quick=False)
    assert {case.shapes[0][0] * case.shapes[0][2] for case in chosen} == {16384, 32768}
    assert {case.shapes[0][1] * case.shapes[0][3] for case in chosen} == {2048}
    assert {case.shapes[0][3] for case in chosen} == {64, 128, 256}
    assert [case.shapes[0][2] for case in chosen[:6]] == [1024, 2048, 4096, 8192, 16384, 32768]
    # two products of 2 operations for each score and dim
    assert attention.flop((2, 3, 10, 8), False, False) == 2 * 3 * 100 * 8 * 4
    assert attention.flop((2, 3, 10, 8), True, True) == 2 * 3 * 100 * 8 * 5


def test_the_committed_rows_are_of_this_bench(root: Path) -> None:
    lines = (root / "bench" / "results" / "attention.jsonl").read_text("utf-8").splitlines()
    kept = [json.loads(line) for line in lines]
    for provider, low, high in (("halfstep", 1.5, 2.1), ("torch SDPA, math", 3.5, 4.1)):
        sizes = [r["extra_bytes"] for r in kept if r["provider"] == provider and r["what"] == "causal, forward"]
        assert len(sizes) == 4
        assert all(low <= long / short <= high for short, long in pairwise(sizes))
