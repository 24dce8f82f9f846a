"""Charts drawn with matplotlib. ``charts.draw`` imports this when the first one is drawn."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from springtide.errors import legible
from springtide.report.charts import AnyChart, Bars, Chart, Columns, Parallel, Strand, Strands

_INK, _GRID, _PAPER = "#1f2937", "#e5e7eb", "#fefefe"
_PALETTE = ("#2563eb", "#93b4f5", "#dc6803", "#0f9d76")
_UNKNOWN = "#9ca3af"
_SHADES = LinearSegmentedColormap.from_list(
    "shades", ["#dc6803", "#b9a58f", "#2563eb"]
)  # distinguishable on light and on dark
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "springtide",  # the same run gives the same bytes
    "font.family": "DejaVu Sans",  # ships with matplotlib, so text has the same size everywhere
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
    "font.size": 8,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "grid.color": _GRID,
    "ytick.left": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "faint": {"linewidth": 0.7, "alpha": 0.6, "zorder": 1},
    "step": {"linewidth": 1.6, "drawstyle": "steps-post"},
    "points": {"linestyle": "", "marker": "o", "markersize": 4, "zorder": 3},
}


def svg(
    charts: Sequence[AnyChart],
    columns: int,
    css_colors: bool,
    size: tuple[float, float],
) -> str:
    """Return what ``charts.draw`` does."""
    rows = math.ceil(len(charts) / columns)
    out = io.StringIO()
    notes: list[str] = []
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in places[len(charts) :]:
            axes.set_axis_off()
        for axes, chart in zip(places, map(_legible, charts), strict=False):
            match chart:
                case Bars():
                    _fill_bars(axes, chart)
                case Columns():
                    _fill_columns(axes, chart)
                case Strands():
                    _fill_strands(axes, chart, notes)
                case Parallel():
                    _fill_parallel(axes, chart, notes)
                case Chart():
                    _fill(axes, chart)
        figure.savefig(out, format="svg", transparent=css_colors, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = _noted(text[text.index("<svg") :], notes)
    if not css_colors:
        return text
    return text.replace(_INK, "var(--fg)").replace(_GRID, "var(--grid)").replace(_PAPER, "var(--bg)")


def _fill(axes: Axes, chart: Chart) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    for color, line in zip(_PALETTE, chart.lines, strict=False):
        points = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        axes.plot([x for x, _ in points], [y for _, y in points], color=color, label=line.label, **_STYLES[line.style])
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=chart.whole_numbers))
    _abbreviate(axes)
    if len(chart.lines) > 1:
        axes.legend(ncols=len(chart.lines), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, handlelength=1)


def _abbreviate(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        if max(map(abs, axis.get_view_interval())) >= 1e4:
            axis.set_major_formatter(EngFormatter(sep=""))


def _fill_bars(axes: Axes, chart: Bars) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label)
    places = range(len(chart.bars))
    axes.barh(places, [amount for _, amount in chart.bars], color=_PALETTE[0], height=0.7)
    axes.set_yticks(places, [label for label, _ in chart.bars])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _fill_columns(axes: Axes, chart: Columns) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    shown = [(color, *group) for color, group in zip(_PALETTE, chart.groups, strict=False) if group[1]]
    for color, label, columns in shown:
        axes.bar([at for at, _ in columns], [amount for _, amount in columns], color=color, label=label, width=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    _abbreviate(axes)
    if len(shown) > 1:
        axes.legend(ncols=len(shown), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, handlelength=1)


def _fill_strands(axes: Axes, chart: Strands, notes: list[str]) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    _plot(axes, chart.strands, notes)
    low, high = chart.y_limits
    if chart.is_log:
        room = (high / low) ** 0.04 if high > low else 1.1
        axes.set_yscale("log")
        axes.set_ylim(low / room, high * room)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    else:
        room = 0.04 * (high - low) or 0.5
        axes.set_ylim(low - room, high + room)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    if chart.is_log and high >= 20 * low:  # below that there may be no power of ten to show
        axes.yaxis.set_major_locator(LogLocator(10, (1.0,) if high >= 1000 * low else (1.0, 2.0, 5.0), numticks=8))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    _abbreviate(axes)


def _fill_parallel(axes: Axes, chart: Parallel, notes: list[str]) -> None:
    axes.set_title(chart.title)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    labels = [label for label, _ in chart.axes]
    letters = int(axes.bbox.width / axes.figure.dpi / len(labels) / 0.065)  # of bold text that fit between two axes
    crowded = any(len(one) + len(other) > 2 * letters for one, other in itertools.pairwise(labels))
    slant: dict[str, Any] = {"rotation": 18, "ha": "left"} if crowded else {}
    axes.set_xticks(range(len(labels)), labels, fontweight="bold", **slant)
    axes.tick_params(axis="x", length=0, labeltop=True, labelbottom=False)
    axes.set(xlim=(-0.35, len(chart.axes) - 0.65), ylim=(-0.04, 1.04))
    _plot(axes, chart.strands, notes)
    behind = {"facecolor": _PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.6}  # keeps text readable over lines
    beside: Any = {
        "textcoords": "offset points",
        "ha": "right",
        "va": "center",
        "fontsize": 7,
        "bbox": behind,
        "zorder": 4,
    }
    for at, (_, ticks) in enumerate(chart.axes):
        axes.plot([at, at], [0, 1], color=_INK, linewidth=0.8, zorder=1)
        for place, text in ticks:
            text = text if len(text) <= letters else f"{text[: letters - 1]}…"
            axes.annotate(text, (at, place), (-4, 0), **beside)
            axes.plot([at], [place], color=_INK, marker=0, markersize=3, zorder=1)


def _plot(axes: Axes, strands: Sequence[Strand], notes: list[str]) -> None:
    for strand in sorted(strands, key=lambda one: (not one.faint, one.shade or 0.0)):
        color = _UNKNOWN if strand.shade is None else to_hex(_SHADES(strand.shade))
        axes.plot(
            [x for x, _ in strand.points],
            [y for _, y in strand.points],
            color=_INK if strand.best else color,
            linewidth=2.6 if strand.best else 1.2,
            linestyle="-" if strand.shade is not None else "--",
            alpha=0.55 if strand.faint else 1.0,
            marker="o" if len(strand.points) == 1 else "",
            markersize=3,
            zorder=3 if strand.best else 2,
            gid=f"note-{len(notes)}",
        )
        notes.append(strand.note)


def _legible(part: Any) -> Any:
    """Return a part of a chart with texts that an SVG can hold; its points have none."""
    if isinstance(part, str):
        return legible(part)
    if isinstance(part, Sequence):
        return [_legible(one) for one in part]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        texts = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != "points"}
        return dataclasses.replace(part, **{name: _legible(value) for name, value in texts.items()})
    return part


def _noted(svg: str, notes: Sequence[str]) -> str:
    """Return ``svg`` with ``notes`` as tooltips of the curves; an invisible wide stroke below each makes it easy to hit."""

    def noted(found: re.Match[str]) -> str:
        number, path = found.groups()
        broad = f'<path d="{path}" style="fill: none; stroke: transparent; stroke-width: 7"/>'
        return f'<g class="noted"><title>{html.escape(notes[int(number)])}</title>{broad}<path d="{path}"'

    return re.sub(r'<g id="note-(\d+)">\s*<path d="([^"]*)"', noted, svg)
