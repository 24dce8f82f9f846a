"""Run stages of ``dataset`` as Ray Data tasks, one per item, wherever the cluster has room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext
from ray.exceptions import RayError

_log = logging.getLogger(__name__)
T = TypeVar("T")


def ray_map(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """Run ``function`` on every item, and yield after each. Its result is dropped, because stages write their output."""
    if not items:
        return
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller shows progress, and a failure is raised
    jobs = ray.put(list(items))

    def work(batch: pa.Table) -> pa.Table:
        for number in batch["number"].to_pylist():
            function(ray.get(jobs)[number])
        return batch

    numbers = ray.data.from_items([{"number": number} for number in range(len(items))], override_num_blocks=len(items))
    made = numbers.map_batches(work, batch_size=None, batch_format="pyarrow")
    try:
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from [None] * batch.num_rows
    except RayError as error:
        # finished items stay finished; a failed one succeeds here, or raises its own error
        _log.warning("a Ray task failed and the remaining items run in this process: %s", error)
        for item in items:
            function(item)
            yield None
