"""Cutting a worker's rows of a step into micro-batches, in lockstep with every other worker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def micro_batches(
    lane_rows: Sequence[int], rows_per_lane: int, most_lanes: int, micro_batch: int, by_lane: bool
) -> list[slice]:
    """Return the micro-batches of a worker whose lanes hold ``lane_rows`` rows in this step, as slices of its rows.

    Each one runs collectives, so every worker makes the number that the worker with the most lanes, ``most_lanes``, needs;
    some are empty. ``by_lane``: none holds rows of two lanes, so the same rows are computed together at any world size.
    """
    cells, most_cells = (list(lane_rows), most_lanes) if by_lane else ([sum(lane_rows)], 1)
    parts = -(-_most_rows(rows_per_lane, most_lanes, by_lane) // micro_batch)
    found, begin = [], 0
    for rows in cells:
        bounds = [begin + part * rows // parts for part in range(parts + 1)]
        found += [slice(first, last) for first, last in itertools.pairwise(bounds)]
        begin += rows
    return found + [slice(begin, begin)] * ((most_cells - len(cells)) * parts)


def largest_micro_batch(rows_per_lane: int, most_lanes: int, micro_batch: int, by_lane: bool) -> int:
    """Return the rows of the largest micro-batch of any worker in a step: the one shape that all can be padded to. Arguments
    as for ``micro_batches``."""
    rows = _most_rows(rows_per_lane, most_lanes, by_lane)
    return -(-rows // -(-rows // micro_batch))


def _most_rows(rows_per_lane: int, most_lanes: int, by_lane: bool) -> int:
    """Return the most rows that are cut into micro-batches together."""
    return rows_per_lane if by_lane else most_lanes * rows_per_lane
