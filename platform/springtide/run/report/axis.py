"""Axes: their ends, round values on them, and tick labels."""

from __future__ import annotations

import math

import numpy as np

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ABBREVIATED = 1e4

Ticks = list[tuple[float, str]]
"""(position on the axis from 0 to 1, text) of each tick."""


def round_values(low: float, high: float, most: int, is_whole: bool = False) -> list[float]:
    """Return round values from ``low`` to ``high``, at most ``most`` steps apart.

    >>> round_values(2, 12, 5), round_values(0, 1, 4)
    ([2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [0.0, 0.5, 1.0])
    """
    step = _step(low, high, most, is_whole)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_values(low: float, high: float) -> list[float]:
    """Return powers of ten from ``low`` to ``high``, with 2 and 5 between them if there are few.

    >>> log_values(1, 10), log_values(1, 1000)
    ([1.0, 2.0, 5.0, 10.0], [1.0, 10.0, 100.0, 1000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    times = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    return [value for power in powers for each in times if low <= (value := each * 10.0**power) <= high]


def even_ticks(low: float, high: float, most: int, is_whole: bool = False) -> Ticks:
    """Return the ticks of ``round_values`` on an axis from ``low`` to ``high``; 12,000 is written 12k."""
    step = _step(low, high, most, is_whole)
    largest = max(abs(low), abs(high))
    values = round_values(low, high, most, is_whole)
    return [((value - low) / (high - low), _label(value, step, largest)) for value in values]


def limits(values: np.ndarray, room: float) -> tuple[float, float]:
    """Return the ends of an axis that shows all values, with ``room`` of its length on either side."""
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
    """Return a tick's text, ``step`` from the next one."""
    unit, letter = next(((size, name) for size, name in _UNITS if largest >= max(size, _ABBREVIATED)), (1.0, ""))
    if step < 1e-4 or largest >= 1e18:
        return f"{value:.3g}" if value else "0"
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:.{digits}f}{letter}" if value else "0"
