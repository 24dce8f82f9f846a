"""Draw small charts as SVG text, without scripts. If wanted, their colors follow the style of the surrounding HTML page.

Each chart is drawn into a rectangle of pixels. Widths of texts are estimated, because the browser chooses the font.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from springtide.errors import printable

_SIZE = (480.0, 300.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 10.0, 40.0, 40.0
"""Space around the area between a chart's axes, which titles and labels need [pixels]."""
_LETTER = 6.2
"""Approximate width of a letter at a font size of 11 pixels [pixels]."""
_INK, _GRID, _PAPER = "var(--fg)", "var(--grid)", "var(--bg)"
_FIXED = {_INK: "#1f2937", _GRID: "#e5e7eb", _PAPER: "#ffffff"}
_COLORS = ("#2563eb", "#93b4f5", "#dc6803", "#0f9d76")
_UNKNOWN = "#9ca3af"
_SHADES = ((0xDC, 0x68, 0x03), (0xB9, 0xA5, 0x8F), (0x25, 0x63, 0xEB))
"""Colors (red, green, blue) of the worst curve, of a middle one and of the best, which suit light and dark backgrounds."""
_THIN, _CURVE = 'stroke-width="0.7" opacity="0.6"', 'stroke-width="1.6" stroke-linejoin="round"'


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve. ``style``: ``line``, ``faint`` (thin line), ``step`` (each value stays until the next point) or ``points``."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str = "line"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of several curves that share both axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Series]
    from_zero: bool = False
    whole_numbers: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars, the first bar on top."""

    title: str
    x_label: str
    bars: Sequence[tuple[str, float]]
    """(label, amount) of each bar."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """A chart of vertical bars at numbered positions, with one color per group of bars."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[tuple[str, Sequence[tuple[int, float]]]]
    """(label, [(position, amount), ...]) of each group; groups beyond the number of colors are not drawn."""


@dataclasses.dataclass(frozen=True)
class Strand:
    """A strand: one of many curves in a chart, colored by its rank between the worst and the best curve."""

    points: Sequence[tuple[float, float]]
    note: str
    """Text that is shown when the mouse is over the curve."""
    shade: float | None = None
    """Rank that decides the color, from 0 (worst curve) to 1 (best); None if unknown."""
    faint: bool = False
    best: bool = False
    """True for the best curve, which is drawn on top of all others, in the text color."""


@dataclasses.dataclass(frozen=True)
class Strands:
    """A chart of many curves (strands) that share both axes, each colored by its rank from the worst to the best."""

    title: str
    x_label: str
    y_label: str
    strands: Sequence[Strand]
    y_limits: tuple[float, float]
    is_log: bool = False
    """True for a logarithmic vertical axis. All values must then be positive."""


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Parallel coordinates (Inselberg, 1985): one vertical axis per quantity, one curve per item across all axes."""

    title: str
    axes: Sequence[tuple[str, Ticks]]
    """(label, ticks) of each axis, from left to right."""
    strands: Sequence[Strand]
    """The curves. Each of their points is (index of an axis, position on that axis from 0, the bottom, to 1)."""


AnyChart = Chart | Bars | Columns | Strands | Parallel


def draw(
    charts: Sequence[AnyChart],
    columns: int = 2,
    css_colors: bool = True,
    size: tuple[float, float] = _SIZE,
) -> str:
    """Return the charts in a grid as one SVG.

    Args:
        charts: the charts to draw, row by row.
        columns: number of charts per row.
        css_colors: True: colors are CSS variables of the page (``--fg``, ``--grid``, ``--bg``). False: fixed, on white.
        size: width and height of each chart [pixels].

    Examples:
        >>> from springtide.run.report.charts import Chart, Series, draw
        >>> draw([Chart("Loss", "step", "nats", [Series("training", [(1, 2.0), (2, 1.0)])])]).count("<path")
        1
    """
    width, height = size[0] * min(columns, len(charts)), size[1] * math.ceil(len(charts) / columns)
    cells = []
    for at, chart in enumerate(charts):
        corner = f"translate({at % columns * size[0]:g} {at // columns * size[1]:g})"
        cells.append(f'<g transform="{corner}">{"".join(_DRAWN[type(chart)](chart, *size))}</g>')
    drawn = "".join(cells)
    if not css_colors:
        drawn = f'<rect width="100%" height="100%" fill="{_PAPER}"/>{drawn}'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    text = f'{head} role="img" fill="{_INK}" font-size="11" font-family="system-ui, sans-serif">{drawn}</svg>'
    if not css_colors:
        for name, color in _FIXED.items():
            text = text.replace(name, color)
    return text


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The rectangle between a chart's axes: its edges in pixels of the SVG."""

    left: float
    top: float
    right: float
    bottom: float

    def place(self, at: np.ndarray) -> np.ndarray:
        """Convert points from positions on both axes (0 to 1) to pixels. ``at`` and the result: arrays of shape (P, 2)."""
        return np.array([self.left, self.bottom]) + at * [self.right - self.left, self.top - self.bottom]

    def axes(self, x_label: str, x_ticks: Ticks, y_label: str, y_ticks: Ticks, upright: bool = False) -> Iterable[str]:
        """Draw tick labels, axis labels and grid lines. Grid lines are horizontal, at the y ticks; if ``upright``, they are
        vertical, at the x ticks."""
        for at, text in y_ticks:
            [[_, y]] = self.place(np.array([[0.0, at]]))
            if not upright:
                yield _line(self.left, y, self.right, y)
            yield _text(self.left - 6, y + 3.5, text, 'text-anchor="end"')
        for at, text in x_ticks:
            [[x, _]] = self.place(np.array([[at, 0.0]]))
            if upright:
                yield _line(x, self.top, x, self.bottom)
            yield _text(x, self.bottom + 15, text, 'text-anchor="middle"')
        yield _text((self.left + self.right) / 2, self.bottom + 34, x_label, 'text-anchor="middle"')
        middle = (self.top + self.bottom) / 2
        yield _text(12, middle, y_label, f'text-anchor="middle" transform="rotate(-90 12 {middle:g})"')


def _draw_curves(chart: Chart, width: float, height: float) -> Iterable[str]:
    frame = _Frame(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
    lines = [(color, line, _finite(line.points)) for color, line in zip(_COLORS, chart.lines, strict=False)]
    points = np.concatenate([np.empty((0, 2)), *(found for _, _, found in lines)])
    (left, right), (low, high) = limits(points[:, 0], 0.02), limits(points[:, 1], 0.05)
    if chart.from_zero:
        low, high = 0.0, limits(np.append(points[:, 1], 0.0), 0.05)[1]
    yield _heading(chart.title, frame)
    yield from frame.axes(
        *(chart.x_label, even_ticks(left, right, 6), chart.y_label, even_ticks(low, high, 5, chart.whole_numbers))
    )
    for color, line, found in sorted(lines, key=lambda one: one[1].style != "faint"):  # draw faint curves first
        at = frame.place((found - [left, low]) / [right - left, high - low])
        if line.style == "points":
            yield "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in at.tolist())
            continue
        if line.style == "step" and len(at):  # add a corner, so that each value stays until the next point
            corners = np.stack([at[1:, 0], at[:-1, 1]], axis=1)
            at = np.insert(at, np.arange(1, len(at)), corners, axis=0)
        if len(at):
            yield _path(at, f'stroke="{color}" {_THIN if line.style == "faint" else _CURVE}')
    yield from _legend([(color, line.label) for color, line, _ in lines], frame)


def _draw_bars(chart: Bars, width: float, height: float) -> Iterable[str]:
    letters = min(max([len(label) for label, _ in chart.bars], default=0), int(width / 2 / _LETTER))
    frame = _Frame(max(_LEFT, letters * _LETTER + 12), 24, width - 1.5 * _RIGHT, height - _BOTTOM)
    most = 1.02 * max([amount for _, amount in chart.bars], default=0) or 1.0
    each = 1 / max(1, len(chart.bars))
    labels = [(1 - (at + 0.5) * each, _cut(label, letters)) for at, (label, _) in enumerate(chart.bars)]
    yield _heading(chart.title, frame)
    yield from frame.axes(chart.x_label, even_ticks(0.0, most, 5), "", labels, upright=True)
    for (middle, _), (_, amount) in zip(labels, chart.bars, strict=True):
        yield _bar(frame, (0.0, amount / most), (middle - 0.35 * each, middle + 0.35 * each), _COLORS[0])


def _draw_columns(chart: Columns, width: float, height: float) -> Iterable[str]:
    frame = _Frame(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
    shown = [(color, *group) for color, group in zip(_COLORS, chart.groups, strict=False) if group[1]]
    every = [column for _, _, columns in shown for column in columns]
    (left, right), most = _ends([at for at, _ in every]), 1.05 * max([amount for _, amount in every], default=0) or 1.0
    yield _heading(chart.title, frame)
    yield from frame.axes(chart.x_label, even_ticks(left, right, 10, True), chart.y_label, even_ticks(0.0, most, 5))
    for color, _, columns in shown:
        for at, amount in columns:
            sides = ((at - 0.35 - left) / (right - left), (at + 0.35 - left) / (right - left))
            yield _bar(frame, sides, (0.0, amount / most), color)
    yield from _legend([(color, label) for color, label, _ in shown], frame)


def _draw_strands(chart: Strands, width: float, height: float) -> Iterable[str]:
    frame = _Frame(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
    scale: Callable[[float], float] = math.log10 if chart.is_log else float
    low, high = limits(np.array([scale(limit) for limit in chart.y_limits]), 0.04)
    most = 1.02 * max([x for strand in chart.strands for x, _ in strand.points], default=0) or 1.0
    ticks = even_ticks(low, high, 5)
    if chart.is_log:
        values = log_values(10**low, 10**high)
        values = values[:: -(-len(values) // 8)] if len(values) > 2 else round_values(10**low, 10**high, 5)
        ticks = [((scale(value) - low) / (high - low), f"{value:.4g}") for value in values if value > 0]
    yield _heading(chart.title, frame)
    yield from frame.axes(chart.x_label, even_ticks(0.0, most, 5), chart.y_label, ticks)
    for strand in _in_order(chart.strands):
        yield _strand(frame, strand, [(x / most, (scale(y) - low) / (high - low)) for x, y in strand.points])


def _draw_parallel(chart: Parallel, width: float, height: float) -> Iterable[str]:
    each = width / len(chart.axes)
    frame = _Frame(0.6 * each, 46, width - 0.4 * each, height - 10)
    labels = [label for label, _ in chart.axes]
    crowded = any((len(one) + len(other)) * 7 > 2 * each for one, other in itertools.pairwise(labels))
    last = max(1, len(labels) - 1)
    for strand in _in_order(chart.strands):
        yield _strand(frame, strand, [(x / last, y) for x, y in strand.points])
    for at, (name, ticks) in enumerate(chart.axes):
        x = frame.left + at / last * (frame.right - frame.left)
        how = f'text-anchor="start" transform="rotate(-18 {x:.1f} 36)"' if crowded else 'text-anchor="middle"'
        yield _text(x, 36, name, f'{how} font-weight="bold"')
        yield _line(x, frame.top, x, frame.bottom, _INK)
        for place, text in ticks:
            y = frame.bottom + place * (frame.top - frame.bottom)
            yield _line(x - 3, y, x, y, _INK)
            behind = f'stroke="{_PAPER}" stroke-opacity="0.75" stroke-width="3" paint-order="stroke"'
            yield _text(x - 6, y + 3.5, _cut(text, int(each / 9.5)), f'text-anchor="end" font-size="10" {behind}')


_DRAWN: dict[type, Callable[[Any, float, float], Iterable[str]]] = {
    Chart: _draw_curves,
    Bars: _draw_bars,
    Columns: _draw_columns,
    Strands: _draw_strands,
    Parallel: _draw_parallel,
}


def _finite(points: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the points without infinite or NaN coordinates, as an array of shape (P, 2)."""
    found = np.array(points, np.float64).reshape(-1, 2)
    return found[np.isfinite(found).all(axis=1)]


def _ends(places: Sequence[int]) -> tuple[float, float]:
    return min(places, default=0) - 0.6, max(places, default=0) + 0.6


def _in_order(strands: Sequence[Strand]) -> list[Strand]:
    """Return the curves in drawing order: the best curve last, so that it is on top."""
    return sorted(strands, key=lambda one: (one.best, not one.faint, one.shade or 0.0))


def _strand(frame: _Frame, strand: Strand, at: Sequence[tuple[float, float]]) -> str:
    """Return a curve as SVG, with its tooltip. A wide invisible stroke makes the thin curve easy to hit with the mouse.

    Args:
        frame: the area to draw into.
        strand: color and tooltip of the curve.
        at: points of the curve, as positions on both axes from 0 to 1. Parts above or below the vertical axis are cut off.
    """
    pieces = [frame.place(np.array(piece)) for piece in itertools.starmap(_within, itertools.pairwise(at)) if piece]
    if len(at) == 1 and 0 <= at[0][1] <= 1:
        pieces = [frame.place(np.array([at[0], at[0]]))]
    path = "".join(_steps(piece) for piece in pieces)
    color = _INK if strand.best else _UNKNOWN if strand.shade is None else _shade(strand.shade)
    look = f'stroke-width="{2.6 if strand.best else 4.0 if len(at) == 1 else 1.2}" stroke-linecap="round"'
    look += ' stroke-dasharray="4 3"' * (strand.shade is None) + ' stroke-opacity="0.55"' * strand.faint
    title = f"<title>{html.escape(printable(strand.note))}</title>"
    wide = f'<path d="{path}" fill="none" stroke="transparent" stroke-width="7"/>'
    return f'<g class="noted">{title}{wide}<path d="{path}" fill="none" stroke="{color}" {look}/></g>'


def _within(one: tuple[float, float], other: tuple[float, float]) -> list[tuple[float, float]]:
    """Clip the line from ``one`` to ``other`` to y between 0 and 1. Return both ends of what remains; an empty list if nothing
    remains."""
    (x, y), (right, end) = one, other
    if y == end:
        return [one, other] if 0 <= y <= 1 else []
    first, last = sorted(min(max((limit - y) / (end - y), 0.0), 1.0) for limit in (0.0, 1.0))
    return [(x + (right - x) * share, y + (end - y) * share) for share in (first, last)] if first < last else []


def _shade(share: float) -> str:
    """Return the color of a curve. ``share``: its rank, from 0 (worst curve) to 1 (best)."""
    worst, middle, best = _SHADES
    (begin, end), at = ((worst, middle), 2 * share) if share < 0.5 else ((middle, best), 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(begin, end, strict=True))


def _steps(at: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at.tolist())


def _path(at: np.ndarray, how: str) -> str:
    return f'<path d="{_steps(at)}" fill="none" {how}/>'


def _bar(frame: _Frame, x: tuple[float, float], y: tuple[float, float], color: str) -> str:
    """Return a filled rectangle as SVG. ``x``, ``y``: (begin, end) on each axis, as positions from 0 to 1."""
    (left, bottom), (right, top) = frame.place(np.array([[x[0], y[0]], [x[1], y[1]]])).tolist()
    size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
    return f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{color}"/>'


def _line(x: float, y: float, right: float, bottom: float, color: str = _GRID) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" stroke="{color}"/>'


def _heading(title: str, frame: _Frame) -> str:
    return _text(frame.left, 15, title, 'font-size="13" font-weight="bold"')


def _legend(labels: list[tuple[str, str]], frame: _Frame) -> Iterable[str]:
    """Draw a legend above the curves, right-aligned. A single curve gets no legend."""
    right = frame.right
    for color, label in reversed(labels if len(labels) > 1 else []):
        yield _text(right, 32, label, 'text-anchor="end"')
        right -= _LETTER * len(label) + 5
        yield f'<rect x="{right - 10:.1f}" y="23" width="10" height="10" rx="2" fill="{color}"/>'
        right -= 22


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _text(x: float, y: float, text: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{html.escape(printable(text))}</text>' if text else ""


# Chart axes: their ends, and round values with labels for their ticks.

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ABBREVIATED = 1e4

Ticks = list[tuple[float, str]]
"""(position on the axis from 0 to 1, label) of each tick."""


def round_values(low: float, high: float, most: int, is_whole: bool = False) -> list[float]:
    """Return evenly spaced round values from ``low`` to ``high``, for the ticks of an axis, with at most ``most`` intervals
    between them.

    >>> round_values(2, 12, 5), round_values(0, 1, 4)
    ([2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [0.0, 0.5, 1.0])
    """
    step = _step(low, high, most, is_whole)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_values(low: float, high: float) -> list[float]:
    """Return powers of ten from ``low`` to ``high``; for a range below a factor of 1000, also their multiples by 2 and 5.

    >>> log_values(1, 10), log_values(1, 1000)
    ([1.0, 2.0, 5.0, 10.0], [1.0, 10.0, 100.0, 1000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    times = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    return [value for power in powers for each in times if low <= (value := each * 10.0**power) <= high]


def even_ticks(low: float, high: float, most: int, is_whole: bool = False) -> Ticks:
    """Return ticks at round values of an axis from ``low`` to ``high``. Large labels are abbreviated: 12,000 becomes 12k. Args
    as for ``round_values``."""
    step = _step(low, high, most, is_whole)
    largest = max(abs(low), abs(high))
    values = round_values(low, high, most, is_whole)
    return [((value - low) / (high - low), _label(value, step, largest)) for value in values]


def limits(values: np.ndarray, room: float) -> tuple[float, float]:
    """Return both ends of an axis that shows all ``values``. ``room``: free space at each end, as a fraction of the distance
    between the least and the greatest value."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    length = high - low
    if not length > 1e-9 * max(abs(low), abs(high)):
        length = max(1.0, abs(high)) / room
        return low - room * length / 2, high + room * length / 2
    return low - room * length, high + room * length


def _step(low: float, high: float, most: int, is_whole: bool) -> float:
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(times for times in (1, 2, 5, 10, 20) if (high - low) / (times * step) <= most)
    return max(1.0, step) if is_whole else step


def _label(value: float, step: float, largest: float) -> str:
    """Return the label of a tick. ``step``: distance to the next tick, which decides the number of digits; ``largest``: largest
    absolute value on the axis, which decides the suffix (such as k)."""
    unit, letter = next(((size, name) for size, name in _UNITS if largest >= max(size, _ABBREVIATED)), (1.0, ""))
    if step < 1e-4 or largest >= 1e18:
        return f"{value:.3g}" if value else "0"
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:.{digits}f}{letter}" if value else "0"
