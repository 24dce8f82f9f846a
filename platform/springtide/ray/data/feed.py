"""The feed, which reads a rank's training batches: one Ray Data pipeline per rank executes the rank's plan of reads.

    plan      [steps 40-47] [steps 48-55] ...      one row per read, an in-memory table
    reads     Ray tasks on the rank's node         rows of the shards, each with its stored id
    batches   one per step, in order               the training loop checks that their ids are those of the step

The worker builds the pipeline from the step that it restored, so training and data always resume at the same step. The feed
scales with the number of ranks, because little is central: no split coordinator, no sharing of resources by Ray Data. Only the
actor that shows all pipelines on Ray's dashboard is central. Reads run on the rank's node, whose ranks share a cache of row
groups (Parquet's unit of reading).
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import warnings
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionOptions, ExecutionResources, TaskPoolStrategy
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from springtide.config.data import FeedConfig
from springtide.config.steps import StepsDone, one_more
from springtide.ray._ray_private import node_affinity, run_on_own_limits
from springtide.stream import Batch, RankReader, Read, ahead, load

_log = logging.getLogger(__name__)

_READS_PER_PIPELINE = 256
"""Reads per pipeline. A plan has millions of reads, and Ray's scheduler keeps an object for each read of a pipeline. So a plan
is split over many pipelines, which run one after another."""


def feed(reader: RankReader, plan: list[Read], config: FeedConfig, name: str = "") -> Iterator[Batch]:
    """Yield the batches of ``plan``. This process makes the first read itself, while Ray starts a pipeline for the other reads,
    so that a new worker group trains at once. ``name``: name of the pipelines on Ray's dashboard."""
    mine = load(reader, plan[:1])
    # yield one batch before a pipeline starts: the start takes much of a core, and would delay the first step
    if plan and len(plan[0].steps) > 1:
        yield from itertools.islice(mine, 1)
    rest = ahead(_by_tasks(reader, plan[1:], config, name))
    try:
        yield from mine
        yield from rest
    finally:
        rest.close()


def _by_tasks(reader: RankReader, plan: list[Read], config: FeedConfig, name: str) -> Iterator[Batch]:
    """Yield the batches of ``plan``, read ahead by Ray tasks.

    A read that fails in its task is repeated once in this process. There it succeeds, or raises its own error, which Ray's
    wrapper would hide.
    """
    left = collections.deque(plan)
    while left:
        leg = list(itertools.islice(left, _READS_PER_PIPELINE))
        due = leg[0].first
        try:
            for batch in _batches(_pipeline(reader, leg, config, name), config, reader.nothing(due)):
                # yield empty batches too: a rank has no rows of a step in which all its samples are skipped
                yield from map(reader.nothing, Read(due, batch.step).steps)
                yield batch
                due = one_more(batch.step)
            yield from map(reader.nothing, Read(due, leg[-1].last).steps)
            due = leg[-1].last
        except RayError as error:
            _log.warning("a read failed in its Ray task and is repeated in this process: %s", error)
            failed = next(read for read in leg if read.last > due)
            yield from reader.batches(Read(max(due, failed.first), failed.last))
            due = failed.last
        while left and left[0].last <= due:
            left.popleft()


def _pipeline(reader: RankReader, leg: list[Read], config: FeedConfig, name: str) -> ray.data.Dataset:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    near = node_affinity(ray.get_runtime_context().get_node_id())
    reads = ray.data.from_items([read._asdict() for read in leg], override_num_blocks=len(leg))
    # ray_remote_args_fn is deprecated, but is still the only way to pass a scheduling strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)
        batches = reads.map_batches(
            _Fetch(reader),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0,  # workers may hold every CPU: a task that needs one would never run
            compute=TaskPoolStrategy(size=config.reads_in_flight),
            ray_remote_args_fn=lambda: {"scheduling_strategy": near},
        )
    limit(batches.context, config)
    batches.set_name(name or None)
    return batches


def limit(context: DataContext, config: FeedConfig) -> None:
    """Limit the resources of the pipelines of ``context``. So that their tasks do not fill the node's object store, they may
    use at most four times the size of the reads in flight."""
    store_bytes = 4 * config.reads_in_flight * max(int(config.read_bytes), 2**20)
    context.execution_options = ExecutionOptions(
        preserve_order=True, resource_limits=ExecutionResources(object_store_memory=store_bytes)
    )
    run_on_own_limits(context)


class _Fetch:
    """The function of a read task: takes a table of reads, returns a table of rows (step, sample id, tokens, other columns)."""

    def __init__(self, reader: RankReader) -> None:
        self._reader = reader

    def __call__(self, reads: pa.Table) -> pa.Table:
        found = [self._reader.fetch(Read(**read)) for read in reads.to_pylist()]
        steps, ids, tokens = (np.concatenate([one[place] for one in found]) for place in range(3))
        lists = {name: np.concatenate([one.columns[name] for one in found]) for name in found[0].columns}
        arrays = {name: _lists(values) for name, values in {"tokens": tokens, **lists}.items()}
        return pa.table({"step": steps, "sample_id": ids, **arrays})


def _lists(values: np.ndarray) -> pa.FixedSizeListArray:
    """Return an array of two or more dimensions as an Arrow column: one flat list per row of the array."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), math.prod(values.shape[1:]))


def _rows(table: pa.Table, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the column ``name``, made by ``_lists``, as an array again. ``shape``: shape of one row."""
    lists = table[name].combine_chunks()
    return lists.flatten().to_numpy().reshape(len(lists), *shape)


def _batches(dataset: ray.data.Dataset, config: FeedConfig, empty: Batch) -> Iterator[Batch]:
    """Yield one batch per step: join the rows of a step, also if Ray Data has cut a block within the step. ``empty``: a batch
    without rows, for the shapes of the columns."""
    step = StepsDone(-1)
    parts: list[Batch] = []
    shapes = {name: column.shape[1:] for name, column in empty.columns.items()}
    tables = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=config.reads_in_flight)
    for table in tables:
        steps = table["step"].to_numpy()
        ids = table["sample_id"].to_numpy()
        tokens = _rows(table, "tokens", empty.tokens.shape[1:])
        columns = {name: _rows(table, name, shape) for name, shape in shapes.items()}
        for rows in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            here = StepsDone(int(steps[rows[0]]))
            if here != step and parts:
                yield _join(parts)
                parts = []
            step = here
            parts.append(Batch(step, ids[rows], tokens[rows], {name: one[rows] for name, one in columns.items()}))
    if parts:
        yield _join(parts)


def _join(parts: list[Batch]) -> Batch:
    first = parts[0]
    if len(parts) == 1:
        return first
    ids, tokens = (np.concatenate([one[place] for one in parts]) for place in (1, 2))
    return Batch(first.step, ids, tokens, {n: np.concatenate([one.columns[n] for one in parts]) for n in first.columns})
