"""Which sizes of a group fit the memory of its devices, learnt from groups that trained and from those that ran out of it.

The fewer workers share a state, the more each holds: what was too much for a group is too much for every smaller one, and says
nothing of a larger one.
"""

from __future__ import annotations


class MemoryLimits:
    """Of one run."""

    def __init__(self, rows_at_once: int, worker_multiple: int = 1) -> None:
        """``rows_at_once``: of a micro-batch, as configured; ``worker_multiple``: workers come in multiples of it."""
        self._rows_at_once, self._worker_multiple = rows_at_once, worker_multiple
        self._trained: set[int] = set()
        self._limits: dict[int, int] = {}
        """Workers of a group that ran out of memory -> rows at once that may fit it yet."""
        self.least_workers = 1
        """Fewest workers that are worth a try."""

    def trained(self, workers: int) -> None:
        """A group of so many has done steps."""
        self._trained.add(workers)

    def rows_at_once(self, workers: int) -> int:
        """Returns the rows of a micro-batch for a group of so many workers [rows]."""
        return min([self._rows_at_once, *(rows for failed, rows in self._limits.items() if workers <= failed)])

    def halve(self, workers: int, rows: int) -> int:
        """A group of so many ran out of memory with micro-batches of ``rows``, at least 2. Returns the rows it is to have from
        now on, as every smaller one."""
        self._limits[workers] = rows // 2
        return rows // 2

    def wait_for_more(self, workers: int, is_over: bool) -> bool:
        """A group of so many ran out of memory with one row at once. Returns True if a larger one has trained, and this size
        has not, or is given up (``is_over``): then ``least_workers`` is beyond it from now on."""
        beyond = any(size > workers for size in self._trained)
        if not beyond or (workers in self._trained and not is_over):
            return False
        self.least_workers = max(self.least_workers, (workers // self._worker_multiple + 1) * self._worker_multiple)
        return True
