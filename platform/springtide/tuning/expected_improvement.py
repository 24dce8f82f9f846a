"""Whether another trial is worth its price."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_TRIALS = 4


def expected_improvement(values: Sequence[float], trials: int) -> float:
    """By how much one more trial will beat the best, as far as can be told: infinitely while too few are known. ``values``:
    promises of those that came furthest; ``trials``: how many were begun.

    Of n points drawn alike each is as likely to be the best, and it beats the second by what can be seen: had one of them been
    drawn last, it would have been a gain of that, with a chance of 1 in n.
    """
    if trials < _LEAST_TRIALS or len(values) < 2:
        return math.inf
    best, second = sorted(values, reverse=True)[:2]
    return (best - second) / trials
