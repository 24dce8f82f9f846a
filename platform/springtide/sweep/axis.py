"""A range as an axis: where a value lies on it, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from springtide.sweep.space import Range

_GAP = 0.08
"""Between two ticks, at least; of the axis."""


def place(one: Range, value: Any) -> float:
    """From 0 at the low end to 1 at the high one, in logs of a range that is drawn from in logs; a choice is the middle of its
    part. ValueError for a choice that is none."""
    if one.kind == "choice":
        return (list(map(_plain, one.values)).index(_plain(value)) + 0.5) / len(one.values)
    low, high, here = (math.log(each) if one.kind == "log_uniform" else each for each in (*one.values, value))
    return (here - low) / (high - low)


def label(value: Any) -> str:
    """A value as it is shown."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(label, value)) if isinstance(value, list | tuple) else str(value)


def ticks(one: Range) -> list[tuple[float, str]]:
    """(place, text) of the ends and of round values between them, or of each choice."""
    if one.kind == "choice":
        return [(place(one, value), label(value)) for value in one.values]
    low, high = map(float, one.values)
    found = [(0.0, label(one.values[0])), (1.0, label(one.values[1]))]
    decades = math.log10(high / low) if one.kind == "log_uniform" else 0.0
    subs = (1.0,) if decades > 2 else (1.0, 2.0, 5.0)
    locator = LogLocator(subs=subs) if one.kind == "log_uniform" else MaxNLocator(5, integer=_is_whole(one))
    for value in locator.tick_values(low, high):
        here = place(one, value) if low < value < high else 0.0
        if min(abs(here - taken) for taken, _ in found) > _GAP:
            found.append((here, label(int(value) if _is_whole(one) else float(value))))
    return sorted(found)


def fences(values: Sequence[float], reach: float = 3.0) -> tuple[float, float]:
    """What is not far out: as far as ``reach`` times the quartiles' distance beyond them (Tukey, 1977: inner fences at 1.5,
    outer ones at 3), and no further than the values go. Of values whose quartiles are one, the least and the most."""
    first, third = np.percentile(values, [25, 75])
    beyond = reach * float(third - first) or math.inf
    return max(float(first) - beyond, min(values)), min(float(third) + beyond, max(values))


def _plain(value: Any) -> Any:
    """A tuple comes back from a file as a list."""
    return list(value) if isinstance(value, tuple) else value


def _is_whole(one: Range) -> bool:
    return all(isinstance(end, int) for end in one.values)
