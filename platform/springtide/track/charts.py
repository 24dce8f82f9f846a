"""Small line charts as SVG text: no script, readable anywhere, in the colours of the page around them."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

_WIDTH, _HEIGHT = 4.8, 3.0  # inches, of one chart
_INK, _GRID = "#1f2937", "#e5e7eb"
_PALETTE = ("#2563eb", "#93b4f5", "#dc6803", "#0f9d76")
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "springtide",  # the same run gives the same bytes
    "font.family": "DejaVu Sans",  # the one matplotlib brings, so that it is measured alike everywhere
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


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve. ``style``: ``line``, ``faint``, ``step`` (held until the next point) or ``points``."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str = "line"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A titled set of curves over common axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False
    whole_numbers: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """Amounts side by side, the first on top."""

    title: str
    x_label: str
    bars: Sequence[tuple[str, float]]
    """(label, amount) each."""


def draw(charts: Sequence[Chart | Bars], columns: int = 2, css_colors: bool = True) -> str:
    """The charts side by side as one SVG; colours follow the page (``--fg``, ``--grid``) or are fixed, on white."""
    rows = math.ceil(len(charts) / columns)
    out = io.StringIO()
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in places[len(charts) :]:
            axes.set_axis_off()
        for axes, chart in zip(places, charts, strict=False):
            if isinstance(chart, Bars):
                _fill_bars(axes, chart)
            else:
                _fill(axes, chart)
        figure.savefig(out, format="svg", transparent=css_colors, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(_INK, "var(--fg)").replace(_GRID, "var(--grid)") if css_colors else svg


def smooth(points: Sequence[tuple[float, float]], parts: int = 50) -> list[tuple[float, float]]:
    """The mean around each point, over 1/``parts`` of the curve; centred, so that it does not lag; NaN counts for nothing."""
    values = np.array([y for _, y in points])
    known = np.isfinite(values)
    reach = len(values) // parts // 2
    window = np.ones(2 * reach + 1)
    totals = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)] if len(values) else values
    counts = np.convolve(known.astype(float), window)[reach : reach + len(values)] if len(values) else values
    return [(x, total / count) for (x, _), total, count in zip(points, totals, counts, strict=True) if count]


def _fill(axes: Axes, chart: Chart) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    for color, line in zip(_PALETTE, chart.lines, strict=False):
        points = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        axes.plot([x for x, _ in points], [y for _, y in points], color=color, label=line.label, **_STYLES[line.style])
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=chart.whole_numbers))
    for axis in (axes.xaxis, axes.yaxis):
        if max(map(abs, axis.get_view_interval())) >= 1e4:
            axis.set_major_formatter(EngFormatter(sep=""))
    if len(chart.lines) > 1:
        axes.legend(ncols=len(chart.lines), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, handlelength=1)


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
