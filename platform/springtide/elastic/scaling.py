"""Find out how many workers pay off, from the speed of a run at each world size it has had."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

_LEAST_EFFICIENCY = 0.5
"""Least speed of an added worker, as a share of the mean of those before it: it costs as much as they do."""
_ENOUGH_STEPS = 10


def speeds(steps: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return world size -> tokens per second: the median of ``steps``, each (world size, tokens per second), for sizes
    with enough steps."""
    found = defaultdict[int, list[float]](list)
    for size, tokens_per_s in steps:
        found[size].append(tokens_per_s)
    return {size: statistics.median(each) for size, each in found.items() if len(each) >= _ENOUGH_STEPS}


def useful(speeds: Mapping[int, float]) -> int | None:
    """Return the largest world size whose added workers still did enough; None if no size is known to be too large."""
    for fewer, more in itertools.pairwise(sorted(speeds)):
        if speeds[more] - speeds[fewer] < _LEAST_EFFICIENCY * (more - fewer) * speeds[fewer] / fewer:
            return fewer
    return None
