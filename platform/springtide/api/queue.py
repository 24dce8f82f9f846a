"""``st.queue``: the runs that share a cluster, and the quotas of their queues."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import NamedTuple

from springtide.errors import ConfigError, explain, printable
from springtide.ray.cluster.session import named_cluster
from springtide.ray.cluster.worker_queue import QueueRow, queue_rows, read_quotas, write_quotas

_HEADS = ("run", "queue", "priority", "workers", "of", "waits for")
_NOBODY = "no run is in the queue"


class QueueTable(NamedTuple):
    """The runs that share a cluster, in the order in which they get workers."""

    rows: list[QueueRow]
    quotas: dict[str, int]
    """Name of a queue -> the largest number of workers that all its runs together may have."""

    def describe(self) -> str:
        """Return the queue and its quotas as a text table."""
        cells = [_HEADS, *map(_cells, self.rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(_HEADS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([*(lines if self.rows else [_NOBODY]), *self._limits()])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(one)) for one in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>" if body else f"<p>{_NOBODY}</p>"
        return printable(table + "".join(f"<p>{html.escape(line)}</p>" for line in self._limits()))

    def _limits(self) -> list[str]:
        return [f"queue {name}: at most {most} workers" for name, most in sorted(self.quotas.items())]


def _cells(one: QueueRow) -> tuple[str, ...]:
    """Return the table cells of one run as text."""
    of = f"{one.min_workers} to {one.max_workers}"
    return one.run, one.queue, str(one.priority), str(one.holds), of, one.others


def queue(quotas: Mapping[str, int | None] | None = None) -> QueueTable:
    """Return the runs that share a cluster, and the quotas of their queues. If ``quotas`` is given, set these quotas first.

    The cluster is the one that this process is connected to, or else the cluster of ``RAY_ADDRESS``.

    Args:
        quotas: name of a queue -> the largest number of workers that all its runs together may have; None: no limit. Queues
            that are not named here keep their quotas.

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
