"""``st.queue``: the runs that share a cluster, and the quotas of their queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from springtide.errors import ConfigError, explain
from springtide.on_ray.cluster.session import named_cluster
from springtide.on_ray.cluster.worker_queue import QueueRow, queue_rows, read_quotas, write_quotas


class QueueTable(NamedTuple):
    """The runs that share a cluster, in the order in which they are served."""

    rows: list[QueueRow]
    quotas: dict[str, int]
    """Queue -> the most workers that its runs may have together."""

    def describe(self) -> str:
        """Return it as a table."""
        heads = ("run", "queue", "priority", "workers", "of", "waits for")
        cells = [heads] + [
            (
                one.run,
                one.queue,
                str(one.priority),
                str(one.holds),
                f"{one.min_workers} to {one.max_workers}",
                one.others,
            )
            for one in self.rows
        ]
        widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines = lines if self.rows else ["no run is in the queue"]
        return "\n".join(
            lines + [f"queue {name}: at most {most} workers" for name, most in sorted(self.quotas.items())]
        )


def queue(quotas: Mapping[str, int | None] | None = None) -> QueueTable:
    """Return the runs that share a cluster: the connected one, else that of ``RAY_ADDRESS``.

    Args:
        quotas: queue -> the most workers that its runs may have together, None for no limit; other queues keep theirs.

    Raises:
        ConfigError: no cluster is named, or a quota is not a number of workers.

    Examples:
        >>> print(st.queue({"research": 8}).describe())  # doctest: +SKIP
        no run is in the queue
        queue research: at most 8 workers
    """
    for name, most in (quotas or {}).items():
        if most is not None and most < 0:
            raise ConfigError(
                explain(f"the quota of queue {name!r}", most, "is not a number of workers", "give 0 or more")
            )
    with named_cluster():
        if quotas:
            kept = {**read_quotas(), **quotas}
            write_quotas({name: most for name, most in kept.items() if most is not None})
        return QueueTable(queue_rows(), read_quotas())
