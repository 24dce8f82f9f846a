"""Learn two limits of a run's worker groups: the smallest that fits in device memory, and the largest that is worth its cost.

With fewer workers, each holds a larger shard of the weights and moments. A micro-batch that does not fit in a group of 4
workers does not fit in a group of 2, but may fit in a group of 8.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping


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
        row. Return True, and raise ``least_workers`` above this size, if a larger group has trained and this size has not.
        ``is_over``: also wait if this size has trained, because it must not be tried again."""
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
    """Return the largest world size that is worth its cost; None if all measured world sizes are. A size is worth its cost if
    each worker that it adds to the next smaller size adds at least half of the smaller size's speed per worker."""
    for fewer, more in itertools.pairwise(sorted(speeds)):
        if speeds[more] - speeds[fewer] < _LEAST_EFFICIENCY * (more - fewer) * speeds[fewer] / fewer:
            return fewer
    return None
