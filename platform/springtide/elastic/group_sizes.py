"""Judge the size of a worker group: how evenly lanes (fixed shares of every batch, never divided) are dealt to the workers,
whether shards and micro-batches fit in device memory, and whether the size is worth its cost.

The worker with the most lanes determines the step time. With fewer workers, each worker holds a larger shard of the weights and
moments. If a micro-batch does not fit in the memory of one group, it does not fit in a smaller group either, but it may fit in
a larger group.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    """Return how evenly ``lanes`` (fixed shares of a batch) are dealt to each number of workers in ``sizes``. No size may
    exceed ``lanes``.

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


class MemoryLimits:
    """Limits of micro-batch and group size, learned from groups of one run that ran out of device memory."""

    def __init__(self, rows_at_once: int, worker_multiple: int = 1) -> None:
        """``rows_at_once``: rows of a micro-batch, as configured; ``worker_multiple``: the size of a group is a
        multiple of it."""
        self._rows_at_once, self._worker_multiple = rows_at_once, worker_multiple
        self._trained: set[int] = set()
        self._limits: dict[int, int] = {}
        """Size of a group that ran out of memory -> largest micro-batch that may still fit in it [rows]."""
        self.least_workers = 1
        """Smallest group whose training step may fit in device memory [workers]."""

    @property
    def has_trained(self) -> bool:
        """Whether a group of this run has completed training steps."""
        return bool(self._trained)

    def trained(self, workers: int) -> None:
        """Record that a group of ``workers`` has completed training steps, so that this size fits in memory."""
        self._trained.add(workers)

    def rows_at_once(self, workers: int) -> int:
        """Return the rows of a micro-batch for a group of ``workers`` [rows]."""
        return min([self._rows_at_once, *(rows for failed, rows in self._limits.items() if workers <= failed)])

    def halve(self, workers: int, rows: int) -> int:
        """Record that a group of ``workers`` ran out of memory with micro-batches of ``rows``, at least 2. Return half of
        ``rows``, the new limit for groups of this size or smaller [rows]."""
        self._limits[workers] = rows // 2
        return rows // 2

    def wait_for_more(self, workers: int, is_over: bool) -> bool:
        """Decide whether to wait for a larger group, after a group of ``workers`` ran out of memory with micro-batches of one
        row. Return True, and raise ``least_workers`` above this size, if a larger group has trained and no group of this size
        has. ``is_over``: the run ends if it does not wait; then wait even if a group of this size has trained."""
        beyond = any(size > workers for size in self._trained)
        if not beyond or (workers in self._trained and not is_over):
            return False
        self.least_workers = max(self.least_workers, (workers // self._worker_multiple + 1) * self._worker_multiple)
        return True


# Find the largest worker group that is worth its cost, from a run's measured speed at each world size.

_LEAST_EFFICIENCY = 0.5
"""A larger group is worth its cost if each added worker adds at least this share of the smaller group's speed per worker."""
_ENOUGH_STEPS = 10


def speeds(steps: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return world size -> median tokens per second, for world sizes with at least ``_ENOUGH_STEPS`` steps. ``steps``: (world
    size, tokens per second) of each step."""
    found = defaultdict[int, list[float]](list)
    for size, tokens_per_s in steps:
        found[size].append(tokens_per_s)
    return {size: statistics.median(each) for size, each in found.items() if len(each) >= _ENOUGH_STEPS}


def useful(speeds: Mapping[int, float]) -> int | None:
    """Return the largest world size that is worth its cost; None if all measured world sizes are. Each measured size is
    compared with the next smaller one. It is worth its cost if each added worker adds at least half of the smaller size's speed
    per worker."""
    for fewer, more in itertools.pairwise(sorted(speeds)):
        if speeds[more] - speeds[fewer] < _LEAST_EFFICIENCY * (more - fewer) * speeds[fewer] / fewer:
            return fewer
    return None
