"""The benches: they run, their rows are complete, and their figures and tables are those of the times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from halfstep import doctor
from halfstep.bench import cases, command, gradient_jobs, harness, host, jobs, machine, table
from halfstep.bench.harness import Comparison, Provider, Runner

pytest.importorskip("halfstep._cpu", reason="the benches time the native kernels, and they are not built here")

FIGURES = {"median_ms", "p20_ms", "p80_ms", "cpu_ms", "cpu_per_wall"}
GPU_FIGURES = {"device_ms", "host_us", "host_busy_us", "launches"}
FIELDS = FIGURES | {
    "run", "date", "bench", "command", "quick", "device", "cpu", "cores", "threads", "isa", "torch_isa", "openmp",
    "compiler", "platform", "versions", "commit", "dirty", "case", "tensors", "elements", "what", "provider",
    "baseline", "calls", "bytes_per_element", "speedup", "gb_per_s", "of_probe", "error", "load", "skipped",
    *GPU_FIGURES,
}  # fmt: skip


def run(name: str, comparisons: command.Comparisons, *options: str) -> None:
    command.run_bench(name, "", comparisons, ["--quick", "--rounds", "1", *options])


@pytest.mark.parametrize(
    ("name", "comparisons"), [("optimizer", jobs.comparisons), ("cast", gradient_jobs.comparisons)]
)
def test_a_quick_run_times_and_checks_everyone(
    name: str, comparisons: command.Comparisons, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, comparisons, "--json", "--out", str(tmp_path))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()]
    assert {row["case"] for row in rows} == {case.name for case in cases.standard(quick=True)}
    for row in rows:
        assert row.keys() == FIELDS
        if row["skipped"]:
            assert row["provider"] in ("DeepSpeed CPUAdam", "bitsandbytes AdamW32bit")
            continue
        assert all(row[key] > 0 for key in FIGURES)
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        is_probe = row["provider"] == harness.PROBE
        assert (row["error"] is None) == is_probe
        assert is_probe or row["error"] <= 1
        assert (row["speedup"] is None) == is_probe
        assert row["bench"] == name
        assert row["command"].startswith(f"halfstep bench {name} --quick")
    probed = {row["case"] for row in rows if row["provider"] == harness.PROBE}
    assert probed == {case.name for case in cases.standard(quick=True) if case.bandwidth}


def test_results_are_appended_and_quick_ones_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "results_folder", lambda: tmp_path / "results")
    run("cast", gradient_jobs.comparisons, "--only", "tensors: unscale_")
    assert not (tmp_path / "results").exists()
    for _ in range(2):
        run("cast", gradient_jobs.comparisons, "--only", "tensors: unscale_", "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "cast.jsonl").read_text("utf-8").splitlines()]
    assert len({row["run"] for row in rows}) == 2
    assert {row["what"] for row in rows} == {"unscale_ f32"}
    shown = capsys.readouterr().out
    assert "halfstep" in shown
    assert f"rows appended to {tmp_path / 'cast.jsonl'}" in shown


def test_a_full_run_is_kept_in_the_source_tree(root: Path) -> None:
    assert machine.results_folder() == root / "bench" / "results"


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no job's name contains 'nonsense'"):
        run("cast", gradient_jobs.comparisons, "--only", "nonsense")


def test_without_native_kernels_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    unbuilt = SimpleNamespace(native_cpu={"built": False, "error": "no C++ compiler", "remedy": "Install one."})
    monkeypatch.setattr(doctor, "collect", lambda: unbuilt)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler.*Install one"):
        run("cast", gradient_jobs.comparisons)


def test_rows_name_the_commit(root: Path) -> None:
    if not (root / ".git").exists():
        assert machine.facts()["commit"] is None
        return
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    assert (
        machine.facts()["commit"] == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


# ---- timing ----------------------------------------------------------------------------------------------------------
class Recorder(Runner):
    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def prepare(self) -> None:
        self.log.append(f"prepare {self.name}")

    def __call__(self) -> None:
        self.log.append(self.name)

    def results(self) -> dict[str, Sequence[Tensor]]:
        return {"x": [torch.ones(4)]}


def exactly_one(begin: int, end: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {"x": (torch.ones(end - begin), torch.zeros(end - begin))}


def test_rounds_are_shuffled_and_everyone_has_a_turn_in_each() -> None:
    log: list[str] = []
    timings = harness.measure({name: Recorder(name, log) for name in "abc"}, rounds=12, seed=0)
    calls = [entry for entry in log if entry in "abc"]
    assert [f"prepare {name}" for name in calls] == log[::2], "every call is prepared, outside the clock"
    turns = calls[3:]  # the first call of each finds out how often a turn repeats it
    sizes = {name: len(timing.wall) // 12 for name, timing in timings.items()}
    orders = []
    while turns:
        order = list(dict.fromkeys(turns))[:3]
        assert [name for name, _ in groupby(turns[: sum(sizes.values())])] == order
        orders.append(tuple(order))
        del turns[: sum(sizes.values())]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) == 12
    assert len(set(orders)) > 1


def test_figures_come_from_the_times() -> None:
    case = cases.Case("four", ((4,),))
    provider = Provider("x", lambda: Recorder("x", []), 14.0)
    comparison = Comparison(case, "job", "base", [provider], exactly_one)
    timings = {
        "x": harness.Timing([0.004, 0.002, 0.003], [0.008, 0.004, 0.006]),
        "base": harness.Timing([0.006, 0.006], [0.1, 0.1]),
        harness.PROBE: harness.Timing([0.003], [0.003]),
    }
    row = harness._row(comparison, provider, timings, 28 * 4)
    assert row["median_ms"] == pytest.approx(3.0)
    assert row["speedup"] == pytest.approx(2.0)
    assert row["cpu_per_wall"] == pytest.approx(2.0)
    assert row["of_probe"] == pytest.approx(0.5), "half the probe's bytes in the probe's time"
    assert row["gb_per_s"] == pytest.approx(14 * 4 / 0.003 / 1e9)


def test_what_is_not_there_is_listed_with_the_reason() -> None:
    def missing() -> Runner:
        raise harness.UnavailableError("not installed")

    providers = [Provider("there", lambda: Recorder("there", []), 8.0), Provider("away", missing, 8.0)]
    comparison = Comparison(cases.Case("four", ((4,),), bandwidth=False), "job", "there", providers, exactly_one)
    there, away = harness.run([comparison], rounds=2)
    assert there["skipped"] is None
    assert there["speedup"] == 1.0
    assert away["skipped"] == "not installed"
    assert all(away[key] is None for key in FIGURES)


def test_tensors_of_a_job_are_gone_before_the_next_is_made() -> None:
    alive: set[str] = set()
    most = 0

    class Held(Recorder):
        def __init__(self, name: str):
            nonlocal most
            super().__init__(name, [])
            alive.add(name)
            most = max(most, len(alive))

        def __del__(self) -> None:
            alive.discard(self.name)

    def two() -> Iterator[Comparison]:
        for name in ("first", "second"):
            provider = Provider(name, lambda name=name: Held(name), None)
            yield Comparison(cases.Case(name, ((4,),), bandwidth=False), "job", name, [provider], exactly_one)

    assert len(list(harness.run(two(), rounds=1))) == 2
    assert most == 1


def test_flat_sees_a_list_as_one_vector() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.empty(0), torch.arange(6.0, 7.0), torch.arange(7.0, 20.0)]
    seen = cases.Flat(tensors)
    assert len(seen) == 20
    for begin, end in ((0, 20), (5, 8), (6, 7), (19, 25)):
        assert seen[begin:end].tolist() == list(range(begin, min(end, 20)))


def test_the_gpt2_case_has_gpt2s_tensors() -> None:
    case = cases.gpt2(768, 50257, 1024, 12)
    assert case.elements == 124_439_808, "the published size of the smallest GPT-2"
    assert len(cases.standard(quick=False)[1].shapes) == 148


# ---- tables ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[table.Row]:
    folder = tmp_path_factory.mktemp("results")
    run("optimizer", jobs.comparisons, "--only", "tensors of 64-4,096: fp32", "--out", str(folder))
    return table.read(folder / "optimizer.jsonl")


def test_markdown_holds_the_rows_figures(rows: list[table.Row]) -> None:
    text = table.markdown(rows)
    for row in rows:
        if not row["skipped"]:
            detail = "" if row["provider"] == harness.PROBE else f" ({row['speedup']:.1f}x, {row['of_probe']:.0%})"
            assert f"| fp32 step: {row['provider']} | {table._ms(row['median_ms'])}{detail} |" in text
    for fact in (
        rows[0]["cpu"],
        rows[0]["isa"],
        rows[0]["command"],
        rows[0]["versions"]["torch"],
        rows[0]["date"][:10],
    ):
        assert fact in text


def test_the_newest_run_is_read_unless_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"run": name}) + "\n" for name in ("old", "old", "new")), encoding="utf-8")
    assert [row["run"] for row in table.read(path)] == ["new"]
    assert len(table.read(path, "old")) == 2
    with pytest.raises(ValueError, match="no rows of run 'other'; it has: old, new"):
        table.read(path, "other")


def test_a_table_replaces_the_one_between_its_markers(rows: list[table.Row], tmp_path: Path) -> None:
    (tmp_path / "optimizer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench optimizer: begin -->\nstale\n<!-- bench optimizer: end -->\nafter\n", "utf-8")
    for _ in range(2):
        table.command(["optimizer", "--results", str(tmp_path), "--into", str(page)])
    text = page.read_text("utf-8")
    assert text.startswith("before\n")
    assert text.endswith("-->\nafter\n")
    assert text.count(table.markdown(rows)) == 1
    assert "stale" not in text
    with pytest.raises(ValueError, match="once each"):
        table.insert("no markers", "optimizer", "x")


def test_the_hosts_share_is_timed_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: from then on Triton launches nothing in it. Each row says what is not in it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    options = ["--quick", "--rounds", "1", "--json", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "halfstep", "bench", "host", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = table.read(tmp_path / "host.jsonl")
    step = ["native", "native, moved", "Triton", "Triton, moved", "Triton, no C++"]
    assert [row["provider"] for row in rows if "bf16 phase" in row["what"]] == [f"halfstep, {name}" for name in step]
    assert [row["provider"] for row in rows if "unscale_" in row["what"]] == ["halfstep, native", "halfstep, Triton"]
    for row in rows:
        assert row["skipped"] is None
        assert row["median_ms"] > 0
        assert "Not in them: the launcher and the driver" in row["note"]
    assert rows[0]["note"] in table.markdown(rows)


def test_the_hosts_share_is_not_timed_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    host.main(["--device", "cuda"])
    assert "runs without --device" in capsys.readouterr().out
