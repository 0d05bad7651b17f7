"""Rows of a results file as tables: for the terminal, and in Markdown for the README.

python -m halfstep.bench.table optimizer                     prints the newest run's table
python -m halfstep.bench.table optimizer --into README.md    writes it between the README's two markers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from halfstep.bench import machine
from halfstep.bench.harness import PROBE

Row = dict[str, Any]
_HOST_COLUMNS = (("ms", 8), ("p20-p80", 11), ("speed-up", 8), ("of probe", 8), ("CPU/wall", 8))
_GPU_COLUMNS = (("ms", 7), ("GPU ms", 7), ("host us", 11), ("speed-up", 8), ("of probe", 8), ("kernels", 7))
# Of rows that are about memory
_HOST_MEMORY_COLUMNS = (("ms", 8), ("p20-p80", 11), ("speed-up", 8), ("extra MiB", 9), ("CPU/wall", 8))
_GPU_MEMORY_COLUMNS = (("ms", 7), ("GPU ms", 7), ("speed-up", 8), ("TFLOP/s", 7), ("extra MiB", 9), ("kernels", 7))


def read(path: Path, run: str | None = None) -> list[Row]:
    """The rows of one run (the newest if None). ValueError if there are none."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = run or (rows[-1]["run"] if rows else None)
    found = [row for row in rows if row["run"] == wanted]
    if not found:
        known = ", ".join(dict.fromkeys(row["run"] for row in rows)) or "none"
        raise ValueError(f"{path} has no rows of run {wanted!r}; it has: {known}")
    return found


def terminal(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """All figures of all rows, a table for each job; 80 columns suffice."""
    for (case, what), job in groupby(rows, key=lambda row: (row["case"], row["what"])):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("", width=26 if rows[0]["device"] == "cpu" else 20)
        for name, width in _columns(rows[0]):
            table.add_column(name, width=width, justify="right", no_wrap=True)
        for row in job:
            table.add_row(escape(row["provider"]), *(("skipped",) if row["skipped"] else _figures(row)))
        yield f"[bold]{escape(f'{case}: {what}')}[/]"
        yield table
    for provider, reason in _skipped(rows).items():
        yield escape(f"{provider} was skipped: {reason}")


def _skipped(rows: Sequence[Row]) -> dict[str, str]:
    return {row["provider"]: row["skipped"] for row in rows if row["skipped"]}


def _figures(row: Row) -> tuple[str, ...]:
    compared = _shown(row["speedup"], "{:.2f}x"), _shown(row["of_probe"], "{:.0%}")
    extra = f"{row['extra_bytes'] / 2**20:,.1f}" if "extra_bytes" in row else ""
    if row["device"] == "cpu":
        spread = f"{_ms(row['p20_ms'])}-{_ms(row['p80_ms'])}"
        compared = (compared[0], extra) if extra else compared
        return _ms(row["median_ms"]), spread, *compared, f"{row['cpu_per_wall']:.2f}"
    kernels = _shown(row["launches"], "{}")
    if extra:
        tflops = _shown(row["tflops"], "{:.0f}")
        return _ms(row["median_ms"]), _ms(row["device_ms"]), compared[0], tflops, extra, kernels
    hosts = f"{row['host_us']:.0f} / {row['host_busy_us']:.0f}"
    return _ms(row["median_ms"]), _ms(row["device_ms"]), hosts, *compared, kernels


def _columns(row: Row) -> tuple[tuple[str, int], ...]:
    if row["device"] == "cpu":
        return _HOST_MEMORY_COLUMNS if "extra_bytes" in row else _HOST_COLUMNS
    return _GPU_MEMORY_COLUMNS if "extra_bytes" in row else _GPU_COLUMNS


def markdown(rows: Sequence[Row]) -> str:
    """Jobs and providers down, cases across; in a cell: median ms, speed-up over the baseline, share of the probe."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["provider"] == PROBE):  # stable: providers in order, the probe last
        line = lines.setdefault((row["what"], row["provider"]), {})
        if not row["skipped"]:
            line[row["case"]] = _cell(row)
    baselines = {row["what"]: row["baseline"] for row in rows}
    text = [f"| ms | {' | '.join(cases)} |", f"|---|{'---|' * len(cases)}"]
    for job in baselines:
        for (what, provider), line in lines.items():
            if what == job and line:
                text.append(f"| {what}: {provider} | " + " | ".join(line.get(case, "") for case in cases) + " |")
    for provider, reason in _skipped(rows).items():
        text += ["", f"{provider} was skipped: {reason}."]
    if "note" in rows[0]:
        text += ["", rows[0]["note"]]
    text += [
        "",
        "In brackets: the speed-up ("
        + "; ".join(f"{what}: over {name}" for what, name in baselines.items())
        + "), and "
        "the bytes the job cannot avoid over its time, as a share of what the bandwidth probe reached in the same run.",
        "",
        f"{caption(rows)}.",
    ]
    return "\n".join(text)


def _cell(row: Row) -> str:
    more = [_shown(row["speedup"], "{:.1f}x"), _shown(row["of_probe"], "{:.0%}") if row["provider"] != PROBE else ""]
    if row.get("extra_bytes") is not None:
        more.append(f"{row['extra_bytes'] / 2**20:,.1f} MiB")
    detail = ", ".join(part for part in more if part)
    return _ms(row["median_ms"]) + (f" ({detail})" if detail else "")


def caption(rows: Sequence[Row]) -> str:
    """Machine, versions, commit, date and command of the run."""
    row = rows[0]
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items() if number)
    commit = (
        f"commit {row['commit'][:10]}" + (" with changes" if row["dirty"] else "") if row["commit"] else "no commit"
    )
    device = f"{row['cpu']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}, {row['isa']}"
    if row["device"] == "cuda":
        device = f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}; {row['cpu']}"
    facts = [
        device,
        versions,
        f"{commit}, {row['date'][:10]}",
        f"`{row['command']}`",
    ]
    return "; ".join(facts)


def insert(text: str, name: str, table: str) -> str:
    """The text with the table between its markers. ValueError if they are not there exactly once."""
    begin, end = (f"<!-- bench {name}: {word} -->" for word in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected the lines {begin!r} and {end!r} once each, to write the table between them")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def _ms(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def command(arguments: Sequence[str] | None = None) -> None:
    """What `python -m halfstep.bench.table` does."""
    parser = argparse.ArgumentParser(description="Print the table of a run in Markdown, or write it into a file.")
    parser.add_argument("bench", help="the name of a bench: its file in the results folder")
    parser.add_argument("--run", help="a run's id (default: the newest)")
    parser.add_argument("--results", type=Path, default=machine.results_folder(), help="folder (default: %(default)s)")
    parser.add_argument(
        "--into", type=Path, help="a Markdown file with the lines <!-- bench NAME: begin --> and ... end"
    )
    given = parser.parse_args(arguments)
    table = markdown(read(given.results / f"{given.bench}.jsonl", given.run))
    if given.into is None:
        print(table)
    else:
        given.into.write_text(insert(given.into.read_text("utf-8"), given.bench, table), encoding="utf-8")


if __name__ == "__main__":
    command()
