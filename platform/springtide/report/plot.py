"""One chart of curves as SVG text, in the colors of the page around it, for a page whose reader runs no script.

``drawing`` draws more kinds of charts, with matplotlib; that takes half a second to import, and a tenth for each chart.
"""

from __future__ import annotations

import html
import math

import numpy as np

from springtide.errors import legible
from springtide.report.charts import Chart, Series

_WIDTH, _HEIGHT = 480.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 10.0, 40.0, 40.0
_COLORS = ("#2563eb", "#93b4f5", "#dc6803", "#0f9d76")
"""As in ``drawing``."""
_CURVES = {"faint": 'stroke-width="0.7" opacity="0.6"'}
_CURVE = 'stroke-width="1.6" stroke-linejoin="round"'
_TICKS_X, _TICKS_Y = 6, 5
_LETTER = 6.2
"""Width of a letter of a legend, about; the font is the reader's."""
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ABBREVIATED = 1e4


def plot(chart: Chart) -> str:
    """Return the chart as one ``svg`` element, 480 by 300.

    Examples:
        >>> from springtide.report.charts import Chart, Series
        >>> from springtide.report.plot import plot
        >>> plot(Chart("Loss", "step", "nats", [Series("training", [(1, 2.0), (2, 1.0)])])).count("<path")
        1
    """
    lines = [(color, line, _finite(line)) for color, line in zip(_COLORS, chart.lines, strict=False)]
    points = np.concatenate([np.empty((0, 2)), *(found for _, _, found in lines)])
    x_limits = _limits(points[:, 0], 0.02)
    y_limits = _limits(np.append(points[:, 1], 0.0) if chart.from_zero else points[:, 1], 0.05)
    if chart.from_zero:
        y_limits = (0.0, y_limits[1])
    scale = np.array([_WIDTH - _LEFT - _RIGHT, _TOP + _BOTTOM - _HEIGHT]) / [b - a for a, b in (x_limits, y_limits)]
    origin = np.array([_LEFT, _HEIGHT - _BOTTOM]) - scale * [x_limits[0], y_limits[0]]
    parts = [_text(_LEFT, 15, chart.title, 'font-size="13" font-weight="bold"')]
    for value, label in _ticks(*y_limits, _TICKS_Y, chart.whole_numbers):
        y = origin[1] + scale[1] * value
        parts.append(f'<line x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
        parts.append(_text(_LEFT - 6, y + 3.5, label, 'text-anchor="end"'))
    for value, label in _ticks(*x_limits, _TICKS_X, False):
        x = origin[0] + scale[0] * value
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, label, 'text-anchor="middle"'))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, chart.x_label, 'text-anchor="middle"'))
    parts.append(_text(12, middle, chart.y_label, f'text-anchor="middle" transform="rotate(-90 12 {middle:g})"'))
    for color, line, found in sorted(lines, key=lambda one: one[1].style != "faint"):  # below all others
        parts.append(_curve(line, origin + scale * found, color))
    if len(lines) > 1:
        parts += _legend([(color, line.label) for color, line, _ in lines])
    head = f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" xmlns="http://www.w3.org/2000/svg" role="img" fill="var(--fg)"'
    title = html.escape(legible(chart.title))
    return f'{head} font-size="11"><title>{title}</title>{"".join(parts)}</svg>'


def _finite(line: Series) -> np.ndarray:
    """Return the points that can be drawn, of shape (P, 2)."""
    points = np.array(line.points, np.float64).reshape(-1, 2)
    return points[np.isfinite(points).all(axis=1)]


def _limits(values: np.ndarray, room: float) -> tuple[float, float]:
    """Return the ends of an axis that shows all values, with ``room`` of its length on either side."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    length = high - low
    if not length > 1e-9 * max(abs(low), abs(high)):
        length = max(1.0, abs(high)) / room
        return low - room * length / 2, high + room * length / 2
    return low - room * length, high + room * length


def _ticks(low: float, high: float, most: int, is_whole: bool) -> list[tuple[float, str]]:
    """Return (value, text) of round values between the ends, at most ``most`` and one."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(times for times in (1, 2, 5, 10, 20) if (high - low) / (times * step) <= most)
    step = max(1.0, step) if is_whole else step
    values = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(value, _label(value, step, max(abs(low), abs(high)))) for value in values]


def _label(value: float, step: float, largest: float) -> str:
    """Return a tick's text, ``step`` from the next one."""
    unit, letter = next(((size, name) for size, name in _UNITS if largest >= max(size, _ABBREVIATED)), (1.0, ""))
    if step < 1e-4 or largest >= 1e18:
        return f"{value:.3g}" if value else "0"
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:.{digits}f}{letter}" if value else "0"


def _curve(line: Series, at: np.ndarray, color: str) -> str:
    """Return a curve at the places ``at`` (P, 2)."""
    if line.style == "points":
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in at.tolist())
    if line.style == "step" and len(at):  # held until the next point
        corners = np.stack([at[1:, 0], at[:-1, 1]], axis=1)
        at = np.insert(at, np.arange(1, len(at)), corners, axis=0)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at.tolist())
    return f'<path d="M{path}" fill="none" stroke="{color}" {_CURVES.get(line.style, _CURVE)}/>' if path else ""


def _legend(lines: list[tuple[str, str]]) -> list[str]:
    """Return the labels of curves at the right above them, the last one at the edge."""
    found, right = list[str](), _WIDTH - _RIGHT
    for color, label in reversed(lines):
        found.append(_text(right, 32, label, 'text-anchor="end"'))
        right -= _LETTER * len(label) + 5
        found.append(f'<rect x="{right - 10:.1f}" y="23" width="10" height="10" rx="2" fill="{color}"/>')
        right -= 22
    return found


def _text(x: float, y: float, text: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{html.escape(legible(text))}</text>' if text else ""
