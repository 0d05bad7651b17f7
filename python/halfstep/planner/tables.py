"""A plan as rich tables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .quantities import shown
from .result import Plan, describe, margin_text

Section = list[RenderableType]


def render(plan: Plan) -> Group:
    verdict = "trains" if plan.fits else "does not fit"
    style = "bold green" if plan.fits else "bold red"
    title = Text(f"{plan.model.name} ({plan.model.parameters:,} parameters) on {describe(plan.hardware)}: ")
    title.append(verdict, style=style)
    parts: list[RenderableType] = [title, *_settings(plan), *_memory(plan), *_time(plan)]
    if plan.remedies:
        parts += _remedies(plan)
    if plan.levers:
        parts += _levers(plan)
    parts += [f"\n[bold]note:[/] {escape(text)}" for text in plan.advice]
    if plan.learning_rate is not None:
        parts.append(f"\n[bold]note:[/] {escape(str(plan.learning_rate))}")
    if plan.unavailable:
        parts += _unavailable(plan)
    return Group(*parts)


def _table(*columns: str, numbers: Iterable[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    right = set(numbers)
    for index, column in enumerate(columns):
        justify = "right" if index in right else "left"
        table.add_column(column, overflow="fold", justify=justify, no_wrap=index in right)
    return table


def _under(title: str, table: Table, note: str = "") -> Section:
    return ["", Text(title, style="bold"), table, *([Text(note, style="italic")] if note else [])]


def _settings(plan: Plan) -> Section:
    table = _table("", "")
    table.show_header = False
    for topic, text in plan.settings.items():
        table.add_row(topic, escape(text))
    return _under("What to set" if plan.fits else "The way that needs the least", table)


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    title = f"Memory of one GPU: {shown(memory.peak, 'bytes')} at the peak ({memory.peak_phase}), "
    title += margin_text(plan.margin)
    table = _table("part", *memory.phases, numbers=range(1, 6))
    for part in memory.parts:
        table.add_row(part.replace("_", " "), *(_gigabytes(parts.get(part, 0)) for parts in memory.phases.values()))
    table.add_row("[bold]in all, GB[/]", *(f"[bold]{_gigabytes(total)}[/]" for total in memory.totals.values()))
    note = f"The first step, before optimizer states: {shown(memory.first_step_peak, 'bytes')}."
    if plan.fits:
        note += f" The largest micro-batch that fits is {plan.largest_micro_batch:,}."
    if memory.host:
        host = ", ".join(f"{part.replace('_', ' ')} {shown(size, 'bytes')}" for part, size in memory.host.items())
        note += f" RAM for each GPU: {host}."
    return _under(title, table, note)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else "-"


def _time(plan: Plan) -> Section:
    seconds = plan.time.total
    title = f"A step by the time model: {seconds:.3g} s, {plan.tokens_per_second:,.0f} tokens/s on all GPUs"
    table = _table("", "s", "share", numbers=(1, 2))
    for name, value in plan.time.parts.items():
        if value:
            table.add_row(name.replace("_", " "), f"{value:.3g}", f"{value / seconds:.0%}")
    return _under(title, table)


def _remedies(plan: Plan) -> Section:
    title = "Compared with other ways" if plan.fits else "What would make it train"
    table = _table("change", "trains", "peak", "left", "RAM", numbers=(2, 3, 4))
    for each in plan.remedies:
        verdict = "yes" if each.fits else "no"
        verdict += f", {_gigabytes(each.host_missing)} of RAM missing" if each.host_missing else ""
        verdict += "" if each.available else ", not available yet"
        table.add_row(
            escape(each.change), verdict, _gigabytes(each.peak), f"{each.margin / 1e9:,.2f}", _gigabytes(each.host)
        )
    return _under(title, table, "GB for one GPU, one sequence at a time.")


def _levers(plan: Plan) -> Section:
    table = _table("lever", "change", "parameters", "peak saved", numbers=(2, 3))
    for each in plan.levers:
        change = each.change if each.available else f"{each.change} (not available yet)"
        count = f"{each.parameters / 1e9:,.3g} B"
        if each.active_parameters != each.parameters:
            count += f" ({each.active_parameters / 1e9:,.3g} active)"
        table.add_row(each.name, escape(change), count, f"{each.peak_saved / 1e9:+,.2f}")
    return _under(
        "Changes of the model, one at a time", table, "GB of one GPU's peak, parallelism and batch as planned."
    )


def _unavailable(plan: Plan) -> Section:
    table = _table("", "would save, GB", numbers=(1,))
    for each in plan.unavailable:
        table.add_row(escape(each.change), _gigabytes(each.saves))
    return _under("Not available in this version", table)
