"""Run stages of the package ``dataset`` as Ray Data tasks, one per item, wherever the cluster has room. Labelling runs in Ray
Data actors, which keep their model loaded."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError, RayTaskError

from springtide.errors import redacted
from springtide.storage.errors import may_pass

_log = logging.getLogger(__name__)
T = TypeVar("T")
_ITEM, _NUMBER = "item", "number"
"""Column names: the pickled item, and the item's number among all items."""
_ROUNDS = 3
_PROBLEM_CHARACTERS = 500


class ItemOutcome(NamedTuple):
    """The outcome of the task that processed an item."""

    number: int
    problem: str = ""
    """Why the item failed; empty if it was done."""
    may_pass: bool = False
    """Whether another try may succeed."""


_OUTCOMES = pa.schema({"number": pa.int64(), "problem": pa.string(), "may_pass": pa.bool_()})


def ray_map(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """Run ``function`` on every item, and yield after each. The function's result is dropped, because stages write their output
    to files."""

    def work(batch: pa.Table) -> pa.Table:
        return _run(function, batch)

    return _mapped(function, items, work)


def ray_map_with_model(function: Callable[[T], object], items: Sequence[T]) -> Iterator[None]:
    """Like ``ray_map``, for a function that loads a model when it is first called in a process. Each process serves many items,
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
    """The function of an actor, which keeps its model from call to call."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def __call__(self, batch: pa.Table) -> pa.Table:
        return _run(self._function, batch)


def _run(function: Callable[[Any], object], batch: pa.Table) -> pa.Table:
    """Run ``function`` on each item of a batch; return one ``ItemOutcome`` per item, without the item's data."""
    rows = zip(batch[_NUMBER].to_pylist(), batch[_ITEM].to_pylist(), strict=True)
    return pa.Table.from_pylist([_outcome(function, *row)._asdict() for row in rows], _OUTCOMES)


def _outcome(function: Callable[[Any], object], number: int, item: bytes) -> ItemOutcome:
    try:
        function(pickle.loads(item))
    except Exception as error:
        # return the error, do not raise it: an error in one task would end all other tasks
        return ItemOutcome(number, redacted(f"{type(error).__name__}: {error}"[:_PROBLEM_CHARACTERS]), may_pass(error))
    return ItemOutcome(number)


def with_retries(
    function: Callable[[T], object],
    items: Sequence[T],
    submit: Callable[[Mapping[int, T]], Generator[ItemOutcome, None, None]],
) -> Iterator[None]:
    """Run each item on a cluster, and yield after each. If an item's failure may pass (such as a store that is down), the item
    is submitted again, in up to three rounds. Items that still fail then, or whose failure is permanent, run in this process,
    where they raise their own error.

    Args:
        function: processes one item, unless its output exists; called in this process.
        submit: takes number -> item; runs the items on the cluster; yields their outcomes in any order. Raises RayError if the
            cluster lost some of them.
    """
    left = dict(enumerate(items))
    for _ in range(_ROUNDS if items else 0):
        problem, passes = "", True
        try:
            with contextlib.closing(submit(dict(left))) as outcomes:  # an error in this block also ends the tasks
                for outcome in outcomes:
                    if outcome.problem and outcome.may_pass:
                        problem = outcome.problem
                        continue
                    if outcome.problem:
                        _log.warning("a Ray task failed, and its item runs in this process: %s", outcome.problem)
                        function(left[outcome.number])
                    del left[outcome.number]
                    yield None
        except RayError as error:
            problem, passes = str(error), not isinstance(error, RayTaskError) or may_pass(error.cause)
        if not left:
            return
        _log.warning("%d of %d items failed in Ray tasks, or were lost: %s", len(left), len(items), problem)
        if not passes:
            break
    for item in left.values():
        function(item)
        yield None


def _mapped(function: Callable[[T], object], items: Sequence[T], work: Any, **how: Any) -> Iterator[None]:
    """Run every item in Ray Data tasks, with retries, and yield after each. ``work``: runs a table of items, one row per
    item."""

    def submit(left: Mapping[int, T]) -> Generator[ItemOutcome, None, None]:
        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller shows progress and failures
        # send each item in its own row: sending the list of all items to every task would take quadratic time
        rows = [{_NUMBER: number, _ITEM: pickle.dumps(item)} for number, item in left.items()]
        made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            work, batch_size=None, batch_format="pyarrow", **how
        )
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from (ItemOutcome(**row) for row in batch.to_pylist())

    return with_retries(function, items, submit)
