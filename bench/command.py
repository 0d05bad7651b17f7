"""The command line that all benches share: what is asked for, the run, the results file, the table."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from halfstep.bench import backends, cases, clocks, harness, machine, table
from halfstep.bench.gpu_clock import CudaClock

Comparisons = Callable[[list[cases.Case], str], Iterator[harness.Comparison]]
CasesOf = Callable[[list[cases.Case], bool], list[cases.Case]]


def run_bench(
    name: str, about: str, comparisons: Comparisons, arguments: Sequence[str] | None = None, *, note: str = "",
    on_gpu: bool = True, cases_of: CasesOf | None = None, each_backend: bool = True,
) -> None:  # fmt: skip
    """Runs one bench as its `main` does; `arguments` as in sys.argv[1:].

    Args:
        note: what the rows' figures mean, if they are not what they seem; every row carries it.
        on_gpu: it has something to time there.
        cases_of: its cases, if they are others than cases.py has: given those, and whether it shall be quick.
        each_backend: on a GPU halfstep's providers are there with each backend.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parser(name, about).parse_args(arguments)
    if given.device != "cpu" and not on_gpu:
        print(f"halfstep bench {name} is about the host and runs without --device; GPU benches time the host, too")
        return
    if given.threads:
        torch.set_num_threads(given.threads)
    folder = given.out or (None if given.quick else machine.results_folder())
    path = None if folder is None else folder / (f"{name}.jsonl" if given.device == "cpu" else f"{name}-gpu.jsonl")
    rounds = given.rounds or (3 if given.quick else 15)
    try:
        run = {
            "run": uuid.uuid4().hex[:12],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "bench": name,
            "command": shlex.join(["halfstep", "bench", name, *arguments]),
            "quick": given.quick,
            **({"note": note} if note else {}),
            **machine.facts(given.device),
        }
        chosen, clock = _place(given.device, given.quick)
        jobs = comparisons(cases_of(chosen, given.quick) if cases_of else chosen, given.only)
        if given.device != "cpu" and each_backend:
            jobs = backends.with_each(jobs)
        found = harness.run(jobs, rounds, clock=clock, go_on=given.device != "cpu")
        rows = [_kept(run | row, path) for row in found]
    except (harness.WrongResultError, machine.NothingToTimeError) as error:
        sys.exit(f"halfstep bench {name}: {error}")
    if not rows:
        sys.exit(f"halfstep bench {name}: no job's name contains {given.only!r}")
    if given.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        _show(rows, path)
    failures = [f"{row['case']}, {row['what']}: {row['provider']}" for row in rows if harness.failed(row)]
    if failures:
        sys.exit(f"halfstep bench {name}: not timed because of failures: {'; '.join(failures)}")


def _place(device: str, quick: bool) -> tuple[list[cases.Case], clocks.Clock]:
    """The cases for a device, and how to time there."""
    if device == "cpu":
        return cases.standard(quick), clocks.HOST
    gpu = machine.gpu()
    return cases.on_gpu(gpu, torch.cuda.mem_get_info(gpu)[0], quick), CudaClock(gpu)


def _show(rows: list[dict[str, Any]], path: Path | None) -> None:
    console = Console(highlight=False)
    for part in table.terminal(rows):
        console.print(part)
    console.print("\nspeed-up: against the provider at 1.00x; of probe: the bytes the job cannot avoid over its time")
    if rows[0]["device"] != "cpu":
        console.print(
            "ms: on an idle GPU; GPU ms: its own share; host us: until the call returns, GPU idle / busy; "
            "kernels: of one call; probe: a copy on the device"
        )
    if "note" in rows[0]:
        console.print(rows[0]["note"])
    console.print(table.caption(rows), soft_wrap=True, markup=False)
    kept = f"rows appended to {path}" if path else "a quick run is not kept (unless --out is given)"
    console.print(kept, soft_wrap=True)


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"halfstep bench {name}", description=about)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")
    parser.add_argument(
        "--json", action="store_true", help="print the rows, one JSON object a line, instead of a table"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    parser.add_argument("--only", default="", metavar="TEXT", help='only jobs whose "case: job" contains TEXT')
    parser.add_argument("--rounds", type=_positive, help="turns of every provider (default: 15, quick: 3)")
    parser.add_argument("--threads", type=_positive, help="torch.set_num_threads (default: as torch has it)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"where {name}.jsonl is (default: bench/results)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number above 0")
    return number


def _kept(row: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The row, appended to the file at once: what a run of many minutes has found survives its end."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if sys.stderr.isatty() and row["provider"] == row["baseline"]:
        print(f"timed {row['case']}: {row['what']}", file=sys.stderr)
    return row
