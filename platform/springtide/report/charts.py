"""Small charts as SVG text: no script, in the colors of the page around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 4.8, 3.0
"""Size of one chart [inches]."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve. ``style``: ``line``, ``faint``, ``step`` (held until the next point) or ``points``."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str = "line"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of curves over common axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Series]
    from_zero: bool = False
    whole_numbers: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """Horizontal bars, the first on top."""

    title: str
    x_label: str
    bars: Sequence[tuple[str, float]]
    """(label, amount) of each bar."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Vertical bars at numbered positions; one color per group."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[tuple[str, Sequence[tuple[int, float]]]]
    """(label, [(position, amount), ...]) of each group; groups beyond the number of colors are not drawn."""


@dataclasses.dataclass(frozen=True)
class Strand:
    """One of many curves, colored by rank."""

    points: Sequence[tuple[float, float]]
    note: str
    """Tooltip."""
    shade: float | None = None
    """From 0, the worst, to 1, the best; None if unknown."""
    faint: bool = False
    best: bool = False
    """Drawn on top of all others, in the text color."""


@dataclasses.dataclass(frozen=True)
class Strands:
    """Many curves over common axes."""

    title: str
    x_label: str
    y_label: str
    strands: Sequence[Strand]
    y_limits: tuple[float, float]
    is_log: bool = False
    """Whether the vertical axis is logarithmic: all its values are positive."""


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Parallel coordinates (Inselberg, 1985): one vertical axis per quantity, one curve per item."""

    title: str
    axes: Sequence[tuple[str, Sequence[tuple[float, str]]]]
    """(label, [(position from 0 to 1, text) of each tick]) of each axis."""
    strands: Sequence[Strand]
    """Points are (number of the axis, position on it)."""


AnyChart = Chart | Bars | Columns | Strands | Parallel


def draw(
    charts: Sequence[AnyChart],
    columns: int = 2,
    css_colors: bool = True,
    size: tuple[float, float] = (WIDTH, HEIGHT),
) -> str:
    """Return the charts in a grid as one SVG, each of ``size`` [inches]. Colors follow the page (``--fg``, ``--grid``,
    ``--bg``), or are fixed, on white. ``plot.plot`` draws one chart of curves much faster."""
    from springtide.report.drawing import svg  # matplotlib takes half a second, and most who import this draw nothing

    return svg(charts, columns, css_colors, size)


def smooth(points: Sequence[tuple[float, float]], parts: int = 50) -> list[tuple[float, float]]:
    """Return the moving average over 1/``parts`` of the curve; centered, so that it does not lag. NaN is ignored."""
    values = np.array([y for _, y in points])
    known = np.isfinite(values)
    reach = len(values) // parts // 2
    window = np.ones(2 * reach + 1)
    totals = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)] if len(values) else values
    counts = np.convolve(known.astype(float), window)[reach : reach + len(values)] if len(values) else values
    return [(x, total / count) for (x, _), total, count in zip(points, totals, counts, strict=True) if count]
