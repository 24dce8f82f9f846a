"""What more workers are good for: how fast a run has been at each world size it had."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

_LEAST_EFFICIENCY = 0.5
"""What an added worker must do at least, of what those before it do each: it is paid as they are."""
_ENOUGH_STEPS = 10


def speeds(steps: Iterable[tuple[int, float]]) -> dict[int, float]:
    """World size -> tokens a second, the median of ``steps``, each (world size, tokens a second), for sizes at which there were
    enough of them to tell."""
    found = defaultdict[int, list[float]](list)
    for size, tokens_per_s in steps:
        found[size].append(tokens_per_s)
    return {size: statistics.median(each) for size, each in found.items() if len(each) >= _ENOUGH_STEPS}


def useful(speeds: Mapping[int, float]) -> int | None:
    """The most workers of which the last added still did enough; None where no size is known to be too large."""
    for fewer, more in itertools.pairwise(sorted(speeds)):
        if speeds[more] - speeds[fewer] < _LEAST_EFFICIENCY * (more - fewer) * speeds[fewer] / fewer:
            return fewer
    return None
