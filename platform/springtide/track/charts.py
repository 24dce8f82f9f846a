"""Small line charts as SVG text: no library, no script, readable anywhere."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 34, 40
_MOST_POINTS = 800
_PALETTE = ("#2563eb", "#93b4f5", "#dc6803", "#0f9d76")


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


def draw(charts: Sequence[Chart], columns: int = 2, css_colors: bool = True) -> str:
    """The charts side by side as one SVG; colours follow the page (``--fg``, ``--grid``) or are fixed, on white."""
    rows = math.ceil(len(charts) / columns)
    width, height = WIDTH * min(columns, len(charts)), HEIGHT * rows
    ink, grid = ("var(--fg)", "var(--grid)") if css_colors else ("#1f2937", "#e5e7eb")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{ink}">'
    ]
    if not css_colors:
        parts.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
    for index, chart in enumerate(charts):
        x, y = index % columns * WIDTH, index // columns * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_chart(chart, grid)}</g>')
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float, whole_numbers: bool = False) -> list[float]:
    """Four to seven round numbers that cover [low, high]."""
    if high <= low:
        high = low + 1
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * factor) <= 6)
    if whole_numbers:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """An exponential average with the bias of its beginning removed."""
    average, total, found = 0.0, 0.0, []
    for x, y in points:
        average, total = weight * average + (1 - weight) * y, weight * total + (1 - weight)
        found.append((x, average / total))
    return found


def thin(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most about ``most`` points, the last kept."""
    stride = max(1, math.ceil(len(points) / most))
    return [*points[::stride], *([points[-1]] if points and (len(points) - 1) % stride else [])]


def number(value: float) -> str:
    """A figure short enough for an axis."""
    if value == 0:
        return "0"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if suffix == "k" else size
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"


def _chart(chart: Chart, grid: str) -> str:
    points = [point for line in chart.lines for point in line.points if all(map(math.isfinite, point))]
    title = f'<text x="{_LEFT}" y="20" font-size="13" font-weight="600">{html.escape(chart.title)}</text>'
    if not points:
        return title + f'<text x="{_LEFT}" y="{HEIGHT / 2}">nothing yet</text>'
    ys = [y for _, y in points] + ([0.0] if chart.from_zero else [])
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(min(ys), max(ys), chart.whole_numbers)
    plot = _Plot(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    parts = [title, _axes(chart, plot, x_ticks, y_ticks, grid)]
    for place, line in enumerate(chart.lines):
        parts.append(_curve(line, plot, _PALETTE[place % len(_PALETTE)]))
    parts.append(_legend(chart.lines))
    return "".join(parts)


@dataclasses.dataclass(frozen=True)
class _Plot:
    """Data coordinates to those of the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def _axes(chart: Chart, plot: _Plot, x_ticks: list[float], y_ticks: list[float], grid: str) -> str:
    parts = []
    for tick in y_ticks:
        y = plot.y(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{grid}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        parts.append(
            f'<text x="{plot.x(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>'
        )
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(chart.x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">{html.escape(chart.y_label)}</text>'
    )
    return "".join(parts)


def _curve(line: Line, plot: _Plot, color: str) -> str:
    points = [(plot.x(x), plot.y(y)) for x, y in thin(line.points) if math.isfinite(x) and math.isfinite(y)]
    if line.style == "points":
        marks = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in points)
        return f"<g><title>{html.escape(line.label)}</title>{''.join(marks)}</g>"
    if not points:
        return ""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if line.style == "step" else f"L{x:.1f} {y:.1f}"
    width, opacity = (1, 0.45) if line.style == "faint" else (2, 1)
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" opacity="{opacity}" '
        f'stroke-linejoin="round"><title>{html.escape(line.label)}</title></path>'
    )


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    parts, x = [], float(WIDTH - _RIGHT)
    for place, line in reversed(list(enumerate(lines))):
        x -= 6.2 * len(line.label)
        parts.append(f'<text x="{x:.0f}" y="20">{html.escape(line.label)}</text>')
        x -= 14
        parts.append(f'<circle cx="{x + 7:.0f}" cy="16" r="4" fill="{_PALETTE[place % len(_PALETTE)]}"/>')
        x -= 8
    return "".join(parts)
