"""Compute how evenly lanes (fixed shares of every batch, never divided) are dealt to workers. The worker with the most lanes
determines the step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_NEAR = 0.125
"""``more_even`` tries numbers of lanes (fixed shares of a batch) that differ from the given number by at most this share."""
_TRIED = 512
"""``more_even`` tries about this many different numbers of lanes (fixed shares of a batch)."""
_SIZES = 256
"""``lane_evenness`` evaluates about this many of the given numbers of workers, so that it stays fast."""


def most_lanes(lanes: int, workers: int) -> int:
    """Return the most lanes (fixed shares of a batch) that any worker owns, which decides how long a step takes.

    >>> [most_lanes(12, workers) for workers in (6, 7, 8, 11, 12)]
    [2, 2, 2, 2, 1]
    """
    return -(-lanes // workers)


def speed(lanes: int, workers: int) -> float:
    """Return the speed of a group, in units of one worker that never waits for others. ``lanes``: number of lanes, the
    fixed shares into which a batch is divided; 0 if it can be divided into parts of any size.

    >>> speed(12, 8), speed(12, 12), speed(0, 8)
    (6.0, 12.0, 8.0)
    """
    return lanes / most_lanes(lanes, workers) if lanes and workers else float(workers)


def evenness(lanes: int, workers: int) -> float:
    """Return the mean share of a step's time in which a worker computes. In the rest of the step it waits for the worker with
    the most lanes (fixed shares of a batch).

    >>> evenness(12, 8), evenness(12, 6)
    (0.75, 1.0)
    """
    return speed(lanes, workers) / workers


class LaneEvenness(NamedTuple):
    """How evenly lanes (fixed shares of a batch) can be dealt to workers, for several numbers of workers."""

    lanes: int
    mean: float
    """Mean, over the numbers of workers, of the share of a step in which a worker computes."""
    worst: float
    worst_workers: int
    """The number of workers for which lanes are dealt least evenly."""


def lane_evenness(lanes: int, sizes: Sequence[int]) -> LaneEvenness:
    """Return how evenly ``lanes`` (fixed shares of a batch) are dealt to each number of workers in ``sizes``. Every size is at
    most ``lanes``.

    >>> found = lane_evenness(16, range(6, 9))
    >>> round(found.mean, 3), round(found.worst, 3), found.worst_workers
    (0.884, 0.762, 7)
    """
    found = {size: evenness(lanes, size) for size in sizes[:: max(1, len(sizes) // _SIZES)]}
    worst_workers = min(found, key=lambda size: found[size])
    return LaneEvenness(lanes, sum(found.values()) / len(found), found[worst_workers], worst_workers)


def more_even(lanes: int, sizes: Sequence[int]) -> LaneEvenness:
    """Find the number of lanes (fixed shares of a batch) near ``lanes`` that is dealt most evenly to the numbers of workers in
    ``sizes``; return its evenness. Among numbers that are equally even to a thousandth, the nearest to ``lanes`` is taken.

    >>> more_even(100, range(8, 13)).lanes
    108
    """
    near = math.floor(lanes * _NEAR)
    tried = {lanes, *range(max(lanes - near, *sizes), lanes + near + 1, max(1, 2 * near // _TRIED))}
    found = [lane_evenness(one, sizes) for one in sorted(tried)]
    return max(found, key=lambda one: (round(one.mean, 3), -abs(one.lanes - lanes)))
