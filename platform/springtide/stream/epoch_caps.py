"""Weights under which no corpus is read more often than its cap, computed before a run starts.

What a corpus would draw beyond its cap goes to the others by their weights, at all times of the run alike (water filling, as in
UniMax, Chung et al., 2023): no corpus ends early. The weights follow from the length of the run, so the order stays a function
of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from springtide.config.batch_schedule import Ramp
from springtide.config.steps import OrderStep
from springtide.stream.mixture import MixtureSchedule, WeightTable

_MOST_ROUNDS = 100


class CapsTooSmall(ValueError):
    """All corpora that have a weight are capped, and together they have too few rows."""

    def __init__(self, step: int, wanted: int, allowed: int) -> None:
        super().__init__(step, wanted, allowed)
        self.step, self.wanted, self.allowed = step, wanted, allowed


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table of weights, and how much of the run it decides."""

    start: int
    weights: tuple[float, ...]
    rows: int
    """That are drawn while it applies."""

    @property
    def drawn(self) -> list[float]:
        """Rows of each corpus."""
        total = math.fsum(self.weights)
        return [self.rows * weight / total for weight in self.weights]


def capped(schedule: WeightTable, ramp: Ramp, num_steps: int, limits: Mapping[int, int]) -> WeightTable:
    """Return the weights under which a run of ``num_steps`` steps draws no more than ``limits`` (corpus -> rows), exactly.

    Where several tables apply in turn, each may draw the part of a limit that it would draw of that corpus without limits. A
    table that keeps to them stays as it is. Steps that are jumped over are made up for after the last, and may add to a limit
    what those draw.

    Raises:
        CapsTooSmall: nobody is left to draw from.

    Examples:
        >>> ramp = Ramp(((0, 8),))
        >>> capped(((0, (1.0, 1.0, 2.0)),), ramp, 100, {0: 50})
        ((0, (50.0, 250.0, 500.0)),)
    """
    starts = [start for start, _ in schedule]
    bounds = [min(start, num_steps) for start in (*starts, num_steps)]
    rows = [ramp.before(end) - ramp.before(begin) for begin, end in itertools.pairwise(bounds)]
    tables = [_Table(start, weights, many) for (start, weights), many in zip(schedule, rows, strict=True)]
    targets = dict(limits)
    for _ in range(_MOST_ROUNDS):
        found = _with_targets(tables, targets)
        drawn = _drawn(found, ramp, num_steps)
        over = {corpus: drawn[corpus] - limit for corpus, limit in limits.items() if drawn[corpus] > limit}
        if not over:
            return found
        for corpus, rows_over in over.items():  # by a few: draws are whole rows
            targets[corpus] = max(0, targets[corpus] - rows_over)
    raise AssertionError(f"no weights keep to {limits}")


def _with_targets(tables: Sequence[_Table], targets: Mapping[int, int]) -> WeightTable:
    without = [math.fsum(one) for one in zip(*(table.drawn for table in tables), strict=True)]
    found = []
    for table in tables:
        limits = {
            corpus: target * table.drawn[corpus] / without[corpus]
            for corpus, target in targets.items()
            if table.rows and table.weights[corpus]
        }
        found.append((table.start, _filled(table, limits)))
    return tuple(found)


def _filled(table: _Table, limits: Mapping[int, float]) -> tuple[float, ...]:
    """Return the rows of each corpus as weights: those whose share is above their limit get the limit, the others the rest."""
    drawn = table.drawn
    if all(drawn[corpus] <= limit for corpus, limit in limits.items()):
        return table.weights
    # in the order in which they fill up; each leaves the others more
    order = sorted(limits, key=lambda corpus: (limits[corpus] / table.weights[corpus], corpus))
    unlimited = math.fsum(weight for corpus, weight in enumerate(table.weights) if corpus not in limits)
    open_weights = [*itertools.accumulate((table.weights[one] for one in reversed(order)), initial=unlimited)][::-1]
    full, rest = 0, float(table.rows)
    while full < len(order) and limits[order[full]] * open_weights[full] < rest * table.weights[order[full]]:
        rest -= limits[order[full]]
        full += 1
    if open_weights[full] <= 0:
        raise CapsTooSmall(table.start, table.rows, int(math.fsum(limits.values())))
    rows = [rest * weight / open_weights[full] for weight in table.weights]
    for corpus in order[:full]:
        rows[corpus] = limits[corpus]
    return tuple(rows)


def _drawn(schedule: WeightTable, ramp: Ramp, num_steps: int) -> list[int]:
    counts = np.zeros(len(schedule[0][1]), dtype=np.int64)
    for piece, begin, end in ramp.runs(0, num_steps):
        mixture = MixtureSchedule(ramp.pieces[piece][1], schedule)
        counts += mixture.counts(OrderStep(begin), OrderStep(end))
    return [int(count) for count in counts]
