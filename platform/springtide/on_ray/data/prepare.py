"""Run stages of ``dataset`` as Ray Data tasks, one per item, wherever the cluster has room; and labelling as Ray Data actors,
which keep their model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

_log = logging.getLogger(__name__)
T = TypeVar("T")


def ray_map(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """Run ``function`` on every item, and yield after each. Its result is dropped, because stages write their output."""
    jobs = ray.put(list(items))

    def work(batch: pa.Table) -> pa.Table:
        for number in batch["number"].to_pylist():
            function(ray.get(jobs)[number])
        return batch

    return _mapped(function, items, work)


def ray_map_with_model(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """As ``ray_map``, for a function that loads a model when it is first called in a process: each process serves many items,
    and has a GPU if the cluster has any."""
    total = ray.cluster_resources()
    gpus, cpus = int(total.get("GPU", 0)), max(1, int(total.get("CPU", 1)))
    workers = min(len(items), gpus or cpus)
    pool = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
    given = {
        "fn_constructor_args": (function, ray.put(list(items))),
        "compute": ActorPoolStrategy(min_size=1, max_size=workers),
    }
    return _mapped(function, items, _WithModel, **given, **pool)


class _WithModel:
    """An actor's function."""

    def __init__(self, function: Callable[[Any], object], jobs: Any) -> None:
        self._function, self._jobs = function, ray.get(jobs) if isinstance(jobs, ray.ObjectRef) else jobs

    def __call__(self, batch: pa.Table) -> pa.Table:
        for number in batch["number"].to_pylist():
            self._function(self._jobs[number])
        return batch


def _mapped(function: Callable[[T], object], items: Sequence[T], work: Any, **how: Any) -> Iterator[None]:
    if not items:
        return
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller shows progress, and a failure is raised
    numbers = ray.data.from_items([{"number": number} for number in range(len(items))], override_num_blocks=len(items))
    made = numbers.map_batches(work, batch_size=None, batch_format="pyarrow", **how)
    try:
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from [None] * batch.num_rows
    except RayError as error:
        # finished items stay finished; a failed one succeeds here, or raises its own error
        _log.warning("a Ray task failed and the remaining items run in this process: %s", error)
        for item in items:
            function(item)
            yield None
