"""Whether another trial is worth its price."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_TRIALS = 4


def expected_improvement(values: Sequence[float], trials: int) -> float:
    """Return the expected gain of one more trial over the best, in the objective's unit; infinity while too few are known.

    ``values``: promises (higher is better) of different points that came furthest, of which those count that are
    finite; ``trials``: number of different points tried.
    Among n points from the same distribution, each is the best with probability 1/n. If the best was drawn last, it gained its
    distance to the second; so the expected gain is that distance over n.
    """
    finite = sorted(filter(math.isfinite, values), reverse=True)
    if trials < _LEAST_TRIALS or len(finite) < 2:
        return math.inf
    best, second = finite[:2]
    return (best - second) / trials
