"""The `halfstep` command: `halfstep doctor`, `halfstep bench` and `halfstep plan`."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfstep import doctor as doctor_module
from halfstep.planner.command import command as plan_command

BENCHES = Path(__file__).resolve().parent / "bench"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Mixed-precision training steps with less memory and time.",
)
app.command("plan")(plan_command)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.")] = False,
) -> None:
    """Show what is built, which backend each operator uses here, and why not a faster one.

    The exit code is 1 only if halfstep itself is broken; a missing compiler or GPU is not an error.
    """
    facts = doctor_module.collect()
    if as_json:
        print(json.dumps(asdict(facts), indent=2))
    else:
        render(facts, Console(soft_wrap=False, highlight=False))
    raise typer.Exit(1 if facts.problems else 0)


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True}
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="One operator family; all of them without a name.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Name the benchmarks and stop.")] = False,
) -> None:
    """Run the microbenchmarks; other options go to them (halfstep bench NAME --help shows what NAME takes)."""
    names = benchmark_names()
    if show:
        print("\n".join(names))
        return
    options = context.args
    if name is not None and name.startswith("-"):  # an option of the benchmarks, for all of them
        name, options = None, [name, *options]
    if name is not None and name not in names:
        known = ", ".join(names) or "none in this installation"
        raise typer.BadParameter(f"no benchmark is called {name!r}; there are: {known}", param_hint="NAME")
    arguments = sys.argv
    for each in [name] if name else names:
        sys.argv = [f"halfstep bench {each}", *options]
        try:
            importlib.import_module(f"halfstep.bench.{each}").main()
        finally:
            sys.argv = arguments


def benchmark_names() -> list[str]:
    """The modules of halfstep.bench that define `main`; found without importing them."""
    names = []
    for path in sorted(BENCHES.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            names.append(path.stem)
    return names


def render(facts: doctor_module.Facts, console: Console) -> None:
    """The facts for a person, readable at 80 columns."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _summary(facts):
        table.add_row(label, escape(text))
    console.print(table)
    console.print()
    console.print(_operators(facts))
    for problem in facts.problems:
        console.print(f"\n[bold red]problem:[/] {escape(problem)}")
    if not facts.problems and not facts.native_cpu.get("built") and facts.native_cpu.get("remedy"):
        console.print(f"\n[bold]To get the native CPU kernels:[/] {escape(facts.native_cpu['remedy'])}")


def _summary(facts: doctor_module.Facts) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {found or 'not installed'}" for name, found in facts.packages.items())
    threads, cores = facts.cpu["threads"], facts.cpu["cores"]
    runtimes = facts.cpu["openmp_runtimes"]
    rows = [
        ("halfstep", f"{facts.halfstep} in {facts.location}"),
        ("Python", f"{facts.python} on {facts.platform}"),
        ("packages", packages),
        ("CPU", f"{facts.cpu['model']}, {cores} core{'s' if cores != 1 else ''} for this process"),
        ("CPU kernels", _native_sentence(facts.native_cpu)),
        ("CUDA kernels", _cuda_sentence(facts.native_cuda)),
        ("Triton", _triton_sentence(facts.triton)),
        ("threads", f"{threads} (torch.get_num_threads()), OpenMP runtime: {', '.join(runtimes) or 'none loaded'}"),
        ("GPU", facts.gpu),
    ]
    if len(runtimes) > 1:
        rows.append(("warning", "two OpenMP runtimes in one process: their thread pools compete for the cores"))
    return rows


def _native_sentence(native: dict) -> str:
    if not native.get("built"):
        return f"not built: {native.get('reason') or native.get('error') or 'unknown reason'}"
    built = native.get("compiled_isas") or native.get("isas", [])
    compiler = f" by {native['compiler']}" if native.get("compiler") else ""
    sentence = f"{native.get('isa')} in use; built{compiler}: {', '.join(built)}"
    foreign = [isa for isa in built if isa not in native.get("isas", built)]
    if foreign:
        sentence += f"; this CPU cannot run {', '.join(foreign)}"
    if native.get("openmp") is False:
        sentence += "; one thread only, because OpenMP needs GCC"
    return sentence


def _cuda_sentence(cuda: dict) -> str:
    if not cuda.get("built"):
        return cuda["unused"]
    compiler = f" by nvcc {cuda['nvcc']}" if cuda.get("nvcc") else ""
    return f"{cuda['unused'] or 'in use'}; built{compiler}: {', '.join(cuda['code_for'])}"


def _triton_sentence(triton: dict) -> str:
    if triton.get("used"):
        return f"in use: {triton['why']}"
    return f"not used: {triton.get('why', 'unknown reason')}"


def _operators(facts: doctor_module.Facts) -> Table:
    """One row per device and backend, naming the operators that share them: they mostly do."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for operator, devices in facts.operators.items():
        for device, (backend, why) in devices.items():
            rows.setdefault((device, backend, why), []).append(operator)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("device", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("operators", overflow="fold", max_width=16)
    table.add_column("why", overflow="fold")
    for (device, backend, why), operators in sorted(rows.items()):
        table.add_row(device, backend, escape(", ".join(operators)), escape(why or "-"))
    return table


def main() -> None:
    """Entry point of the console script."""
    app()
