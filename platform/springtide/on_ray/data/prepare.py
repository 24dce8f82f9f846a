"""Run stages of ``dataset`` as Ray Data tasks, one per item, wherever the cluster has room; and labelling as Ray Data actors,
which keep their model."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_ITEM = "item"
"""Name of the column that holds an item, pickled."""


def ray_map(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """Run ``function`` on every item, and yield after each. Its result is dropped, because stages write their output."""

    def work(batch: pa.Table) -> pa.Table:
        return _run(function, batch)

    return _mapped(function, items, work)


def ray_map_with_model(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """As ``ray_map``, for a function that loads a model when it is first called in a process: each process serves many items,
    and has a GPU if the cluster has any."""
    total = ray.cluster_resources()
    gpus, cpus = int(total.get("GPU", 0)), max(1, int(total.get("CPU", 1)))
    workers = min(len(items), gpus or cpus)
    pool = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
    given = {
        "fn_constructor_args": (function,),
        "compute": ActorPoolStrategy(min_size=1, max_size=workers),
    }
    return _mapped(function, items, _WithModel, **given, **pool)


class _WithModel:
    """An actor's function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def __call__(self, batch: pa.Table) -> pa.Table:
        return _run(self._function, batch)


def _run(function: Callable[[Any], object], batch: pa.Table) -> pa.Table:
    """Run ``function`` on each item of a batch; return a row per item, to count: the items themselves need not come back."""
    for item in batch[_ITEM].to_pylist():
        function(pickle.loads(item))
    return pa.table({"done": pa.repeat(True, batch.num_rows)})


def _mapped(function: Callable[[T], object], items: Sequence[T], work: Any, **how: Any) -> Iterator[None]:
    if not items:
        return
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller shows progress, and a failure is raised
    # an item travels in its own row: a list of all of them in each task would cost the square of their number
    rows = ray.data.from_items([{_ITEM: pickle.dumps(item)} for item in items], override_num_blocks=len(items))
    made = rows.map_batches(work, batch_size=None, batch_format="pyarrow", **how)
    try:
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from [None] * batch.num_rows
    except RayError as error:
        # finished items stay finished; a failed one succeeds here, or raises its own error
        _log.warning("a Ray task failed and the remaining items run in this process: %s", error)
        for item in items:
            function(item)
            yield None
