"""Compute how long to wait: for a worker group to start, before a failed node or an unreachable store is used again, and
between two polls of a cluster."""

from __future__ import annotations

import collections

_STARTS = 4.0
"""A start of worker processes counts as failed if it takes this many times as long as the run's longest recent start."""
_LAST = 9
"""The time limit of a start follows from this many recent starts. One slow start is forgotten after this many further
starts."""
_BAN_S, _LONGEST_BAN_S = 30.0, 3600.0
_STORE_PAUSE_S, _LONGEST_STORE_PAUSE_S = 1.0, 60.0
MOST_STORE_FAILURES = 30
"""Number of worker groups in a row that may fail at the same step because the store (disk or object storage of the run) cannot
be reached. With the pauses between the groups, this many failures take 25 minutes."""
_LOOKS = 125.0
"""Pause after a poll of the cluster, as a multiple of the poll's CPU time, so that waiting costs less than 1% of a core."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.1, 5.0


class StartTimes:
    """Times of the recent starts of a run's workers, and the time limit for the next start that follows from them.

    >>> starts = StartTimes(least_s=20.0, most_s=180.0)
    >>> starts.limit_s()
    180.0
    >>> starts.add(9.0)
    >>> starts.limit_s(), starts.limit_s(workers=3)
    (36.0, 108.0)
    >>> for _ in range(9):  # as many count
    ...     starts.add(6.0)
    >>> starts.limit_s()
    24.0
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        """The limit for a start is ``most_s`` until a start is recorded, and from ``least_s`` to ``most_s`` afterwards [s]."""
        self._least_s, self._most_s = least_s, most_s
        self._last: collections.deque[tuple[float, int]] = collections.deque(maxlen=_LAST)
        """(time that the start took, number of workers) of each recent start [s]."""

    def add(self, took_s: float, workers: int = 1) -> None:
        """Record that a successful start of ``workers`` workers together took ``took_s`` [s]."""
        self._last.append((took_s, workers))

    def limit_s(self, workers: int = 1) -> float:
        """Return how long a start of ``workers`` workers together may take before it fails [s]."""
        if not self._last:
            return self._most_s
        longest_s, with_workers = max(self._last)
        grown = max(1.0, workers / with_workers)
        return min(self._most_s, max(self._least_s, _STARTS * grown * longest_s))


def ban_s(failures: int) -> float:
    """Return how long to exclude a node after ``failures`` failures [s]. Callers do not count the newest failure if its cause
    may be the loss of the node itself.

    >>> [ban_s(failures) for failures in (0, 1, 2, 3, 100)]
    [30.0, 60.0, 120.0, 240.0, 3600.0]
    """
    return min(_LONGEST_BAN_S, _BAN_S * 2.0 ** min(failures, 10))


def store_pause_s(failures: int) -> float:
    """Return how long to wait before the next worker group, after ``failures`` groups in a row could not reach the store [s].

    >>> [store_pause_s(failures) for failures in (1, 2, 3, 100)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(_LONGEST_STORE_PAUSE_S, _STORE_PAUSE_S * 2.0 ** min(failures - 1, 10))


def look_pause_s(cpu_s: float) -> float:
    """Return how long to wait after a poll of the cluster that took ``cpu_s`` of CPU time, so that waiting for capacity costs
    less than 1% of a core [s].

    >>> [look_pause_s(cpu_s) for cpu_s in (0.0, 0.002, 0.02, 1.0)]
    [0.1, 0.25, 2.5, 5.0]
    """
    return min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, _LOOKS * cpu_s))
