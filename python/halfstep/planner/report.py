"""`halfstep plan --html`: one page with a plan's charts and tables. It asks for nothing over the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from .charts import memory_chart, time_chart
from .quantities import shown
from .result import Plan, describe, margin_text

# Nothing is fetched: no script, and no style but the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
figure { margin: 1rem 0; } figcaption { color: #4a4a4a; }
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font-size: .9em; overflow-wrap: anywhere; }
.verdict { font-weight: 600; padding: .1em .5em; border: 2px solid; border-radius: .3em; white-space: nowrap; }
@media print { body { max-width: none; margin: 0; } }
"""


def page(plan: Plan) -> str:
    """The plan as an HTML document that stands for itself.

    Raises:
        RuntimeError: matplotlib, which draws the charts, is not installed.
    """
    title = f"{plan.model.name} on {describe(plan.hardware)}"
    verdict = "trains" if plan.fits else "does not fit"
    summary = (
        f"{shown(plan.memory.peak, 'bytes')} of {shown(plan.hardware.gpu_memory, 'bytes')} per GPU at the peak, in the "
        f"{plan.memory.peak_phase} phase ({margin_text(plan.margin)}). A step takes {plan.time.total:.3g} s, "
        f"{plan.tokens_per_second:,.0f} tokens/s on all GPUs, by the time model."
    )
    body = [
        f'<h1>{escape(title)} <span class="verdict">{verdict}</span></h1>',
        f"<p>{plan.model.parameters:,} parameters. {escape(summary)}</p>",
        *_section("What to set" if plan.fits else "The way that needs the least", _settings(plan)),
        *_section("Memory of one GPU", _figure(memory_chart(plan), MEMORY_CAPTION), _memory(plan)),
        *_section("Time of a step", _figure(time_chart(plan), TIME_CAPTION), _time(plan), _assumptions(plan)),
    ]
    if plan.remedies:
        body += _section("Compared with other ways" if plan.fits else "What would make it train", _remedies(plan))
    body += _section("Changes of the model, one at a time", _levers(plan))
    if plan.unavailable:
        rows = [(each.change, shown(each.saves, "bytes")) for each in plan.unavailable]
        body += _section("Not available in this version", _table(("change", "would save of the peak"), rows, {1}))
    notes = [*plan.advice, *([str(plan.learning_rate)] if plan.learning_rate else [])]
    if notes:
        body += _section("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


MEMORY_CAPTION = (
    "What is there at the highest moment of each phase of a step, from the second step on. Patterns tell parts apart "
    "as well as colours do; the table below has every number."
)
TIME_CAPTION = "Parts of one optimizer step that do not hide behind another, by the time model."


def _section(title: str, *parts: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", *parts]


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int], sums: bool = False) -> str:
    """Rows of plain text; `numbers` are the columns to align to the right, `sums` makes the last row bold."""

    def row(texts: Sequence[str], tag: str, attributes: str = "") -> str:
        classes = [" class=number" if index in numbers else "" for index in range(len(texts))]
        cells = (f"<{tag}{attributes}{c}>{escape(text)}</{tag}>" for c, text in zip(classes, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = [row(texts, "td") for texts in (rows[:-1] if sums else rows)]
    if sums:
        body.append(row(rows[-1], "th"))
    head = f"<thead>{row(header, 'th', ' scope=col')}</thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _settings(plan: Plan) -> str:
    rows = (
        f"<tr><th scope=row>{escape(topic)}</th><td><code>{escape(text)}</code></td></tr>"
        for topic, text in plan.settings.items()
    )
    return f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>'


def _memory(plan: Plan) -> str:
    memory = plan.memory
    rows = [
        (part.replace("_", " "), *(_gigabytes(parts.get(part, 0)) for parts in memory.phases.values()))
        for part in memory.parts
    ]
    rows.append(("in all, GB", *(_gigabytes(total) for total in memory.totals.values())))
    header = ("part, GB", *memory.phases)
    first = f"The first step, before there are optimizer states: {shown(memory.first_step_peak, 'bytes')}."
    if plan.fits:
        first += f" The largest micro-batch that fits is {plan.largest_micro_batch:,}."
    host = ", ".join(f"{part.replace('_', ' ')} {shown(size, 'bytes')}" for part, size in memory.host.items())
    ram = f" RAM for each GPU: {host}." if host else ""
    return _table(header, rows, set(range(1, len(header))), sums=True) + f"<p>{escape(first + ram)}</p>"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else "-"


def _time(plan: Plan) -> str:
    seconds = plan.time.total
    rows = [
        (name.replace("_", " "), f"{value:.3g}", f"{value / seconds:.1%}")
        for name, value in plan.time.parts.items()
        if value
    ]
    return _table(("part", "seconds", "share"), rows, {1, 2})


def _assumptions(plan: Plan) -> str:
    constants = ", ".join(f"{name} = {value}" for name, value in asdict(plan.assumptions).items())
    return f"<p>Assumed: <code>{escape(constants)}</code>. Change one with <code>--assume name=value</code>.</p>"


def _remedies(plan: Plan) -> str:
    rows = [
        (
            each.change + ("" if each.available else " (not available in this version)"),
            ("yes" if each.fits else "no")
            + (f", {_gigabytes(each.host_missing)} GB of RAM missing" if each.host_missing else ""),
            _gigabytes(each.peak),
            f"{each.margin / 1e9:,.2f}",
            _gigabytes(each.host),
        )
        for each in plan.remedies
    ]
    return _table(("change", "trains", "peak, GB", "left, GB", "RAM, GB"), rows, {2, 3, 4})


def _levers(plan: Plan) -> str:
    rows = [
        (
            each.name,
            each.change + ("" if each.available else " (not available in this version)"),
            f"{each.parameters:,}",
            f"{each.active_parameters:,}",
            f"{each.peak_saved / 1e9:+,.2f}",
        )
        for each in plan.levers
    ]
    return _table(("lever", "change", "parameters", "for a token", "peak saved, GB"), rows, {2, 3, 4})
