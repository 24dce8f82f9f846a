"""A range as an axis: positions of values, and tick labels."""

from __future__ import annotations

from typing import Any

from springtide.report.charts import Ticks, log_values, round_values
from springtide.tuning.space import Range

_GAP = 0.08
"""Least distance between two ticks, as a fraction of the axis."""


def label(value: Any) -> str:
    """Return a value as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(label, value)) if isinstance(value, list | tuple) else str(value)


def ticks(one: Range) -> Ticks:
    """Return the ticks of the ends and of round values between them, or of each choice."""
    if one.kind == "choice":
        return [(one.place(value), label(value)) for value in one.values]
    low, high = map(float, one.values)
    found = [(0.0, label(one.values[0])), (1.0, label(one.values[1]))]
    values = log_values(low, high) if one.kind == "log_uniform" else round_values(low, high, 5, one.is_whole)
    for value in values:
        here = one.place(value) if low < value < high else 0.0
        if min(abs(here - taken) for taken, _ in found) > _GAP:
            found.append((here, label(int(value) if one.is_whole else float(value))))
    return sorted(found)
