"""Stacked bars of a plan as SVG, drawn by matplotlib: bytes by phase and part, seconds by part.

Readable without colours: each part has a pattern of its own, parts are separated by lines, and the large ones carry
their name.
"""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

from .quantities import shown
from .result import PART_ORDER, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's colours for all kinds of colour vision ("Color universal design", 2008), each in two tints.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#BBBBBB", "#0072B2")
# One for each part. Lines only: a pattern of circles or dots is 100 KB of SVG.
PATTERNS = ("", "///", "---", "xxx", "\\\\\\", "|||", "+++", "/", "-", "x", "\\", "|", "+", "//--", "\\\\||", "//||",
            "\\\\--", "xx--", "xx||", "++//", "++\\\\", "--||", "/|", "\\-")  # fmt: skip
LONG_NAME = 12  # letters that fit beside a number
LABELLED = 0.045  # share of the axis from which on a piece has room for its name
GIGABYTE = 1e9
EDGE = "#222222"


def memory_chart(plan: Plan) -> str:
    """One bar for each phase, its parts stacked, and a line at what the GPU has."""
    figure, axes = _axes(9.6, 5.2)
    memory = plan.memory
    phases, parts = list(memory.phases), list(memory.parts)
    top = max(memory.peak, plan.hardware.gpu_memory) / GIGABYTE * 1.08
    bottoms = [0.0] * len(phases)
    for part in parts:
        sizes = [memory.phases[phase].get(part, 0) / GIGABYTE for phase in phases]
        axes.bar(phases, sizes, bottom=bottoms, width=0.8, label=part.replace("_", " "), **_look(_place(part)))
        for x, (size, bottom) in enumerate(zip(sizes, bottoms, strict=True)):
            if size > LABELLED * top:
                _name(axes, x, bottom + size / 2, _label(part.replace("_", " "), size, size / (LABELLED * top)))
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    limit = plan.hardware.gpu_memory / GIGABYTE
    axes.axhline(limit, color=EDGE, linewidth=1.6, linestyle=(0, (6, 3)))
    axes.text(len(phases) - 0.45, limit, f" {shown(plan.hardware.gpu_memory, 'bytes')}\n on the GPU", va="bottom")
    axes.set_xlim(-0.6, len(phases) + 0.35)
    axes.set_ylim(0, top)
    axes.set_ylabel("GB on one GPU")
    axes.set_xlabel("phase of a step")
    _legend(axes)
    totals = ", ".join(f"{phase} {shown(total, 'bytes')}" for phase, total in memory.totals.items())
    return _svg(
        figure,
        "memory",
        "Memory of one GPU by phase",
        f"{totals}; the GPU has {shown(plan.hardware.gpu_memory, 'bytes')}.",
    )


def time_chart(plan: Plan) -> str:
    """One bar: the seconds of a step."""
    figure, axes = _axes(9.6, 1.9)
    parts = {name.replace("_", " "): value for name, value in plan.time.parts.items() if value}
    total, left = plan.time.total, 0.0
    for index, (name, value) in enumerate(parts.items()):
        axes.barh([""], [value], left=left, height=0.6, label=name, **_look(index))
        if value > 0.12 * total:
            _name(axes, left + value / 2, 0, f"{name} {value:.3g} s")
        left += value
    axes.set_xlim(0, total * 1.001)
    axes.set_xlabel("seconds")
    axes.tick_params(left=False)
    _legend(axes)
    described = ", ".join(f"{name} {value:.3g} s" for name, value in parts.items())
    return _svg(figure, "time", "Seconds of one step by part", f"{described}; {total:.3g} s in all.")


def _label(name: str, size: float, lines: float) -> str:
    """Name and number in a piece that has room for so many lines; a long name takes one for each word."""
    if len(name) <= LONG_NAME:
        return f"{name} {size:.1f}"
    words = [*name.split(), f"{size:.1f}"]
    return "\n".join(words) if len(words) <= lines else words[-1]


def _place(part: str) -> int:
    """So that a part looks the same in every page."""
    return PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)


def _look(index: int) -> dict[str, Any]:
    return dict(
        color=COLOURS[index % len(COLOURS)], hatch=PATTERNS[index % len(PATTERNS)], edgecolor=EDGE, linewidth=0.8
    )


def _name(axes: Axes, x: float, y: float, text: str) -> None:
    box = dict(facecolor="white", edgecolor="none", boxstyle="square,pad=0.15", alpha=0.9)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)


def _legend(axes: Axes) -> None:
    """In the order of the stack, from above."""
    handles, labels = axes.get_legend_handles_labels()
    vertical = len(axes.get_xticklabels()) and axes.get_ylabel()
    order = slice(None, None, -1) if vertical else slice(None)
    axes.legend(handles[order], labels[order], loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9,
                handlelength=2.2, handleheight=1.3)  # fmt: skip


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"the page's charts need matplotlib ({error}): pip install 'halfstep[plan]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an element of a page: text stays text, ids begin with `name`, and there is a description."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "hatch.linewidth": 0.6}
    ):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    labels = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    opening = f'<svg role="img" aria-label="{escape(title)}" {box.group(0) if box else ""}'
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return re.sub(r"<svg[^>]*>", lambda _: f"{opening} {namespaces}>{labels}", svg, count=1)
