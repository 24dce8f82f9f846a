"""How a worker's rows of a step are cut into micro-batches, in lockstep with every other worker."""

from __future__ import annotations

import itertools


def micro_steps(global_batch: int, lanes: int, world_size: int, micro_batch: int) -> int:
    """Micro-steps every worker makes in a step: enough for the worker with most rows, which owns
    ceil(lanes / world_size) lanes. Collectives run in each, so all workers must make as many."""
    most_rows = -(-lanes // world_size) * (global_batch // lanes)
    return -(-most_rows // micro_batch)


def micro_slices(rows: int, steps: int) -> list[slice]:
    """``rows`` cut into ``steps`` slices whose lengths differ by at most one; with fewer rows than steps, some are empty."""
    bounds = [index * rows // steps for index in range(steps + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
