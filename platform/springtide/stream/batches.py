"""The batches of a sealed (complete, never changed) dataset, for your own training loop at any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from springtide.config.data import DataConfig, FeedConfig, ShardsConfig, StreamConfig
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, explain
from springtide.shards import load_manifest
from springtide.storage import Folder
from springtide.stream.data import open_data
from springtide.stream.reader import Batch, RankReader, Read, load

_READ_BYTES = 2**20
_MOST_STEPS = 64
"""Largest number of steps whose rows are fetched in one read."""


def batches(
    dataset: str,
    *,
    global_batch: int,
    rank: int = 0,
    size: int = 1,
    step: int = 0,
    seed: int = 0,
    lanes: int = 0,
) -> Iterator[Batch]:
    """Return an iterator over the rows that one rank trains on in each step, without end, with one read prefetched.

    All ranks together get exactly ``global_batch`` rows per step, the same rows for every ``size``. To resize, call this again
    with the next ``step`` and another ``rank`` and ``size``. The step is the whole state of the data.

    Args:
        dataset: folder or URL of a sealed dataset, as ``prepare`` or ``springtide data prepare`` makes it.
        global_batch: rows per step, over all ranks.
        rank: this rank, from 0 to ``size - 1``.
        size: number of ranks. If it does not divide ``lanes``, ranks get different numbers of rows: weight the loss of each
            rank by its number of valid tokens.
        step: number of steps done before the first batch.
        seed: seed of the order of rows.
        lanes: number of equal parts (lanes) into which a step's rows are divided: at least the largest ``size`` of the
            training, and a divisor of ``global_batch``. 0: ``global_batch`` lanes.

    Returns:
        Batches: ``step``; ``sample_ids``, uint64 (n,); ``ids`` and ``labels``, int64 (n, sequence_length + 1). Inputs
        are ``ids[:, :-1]``, targets ``labels[:, 1:]``, -100 where nothing is predicted.

    Raises:
        ConfigError: ``rank``, ``size``, ``lanes`` and ``global_batch`` do not fit together, or ``step`` is negative.
        CorpusError: the dataset is missing, damaged, or has no rows to train on.

    Examples:
        >>> dataset = st.open_run("runs/mine").config.shards.dataset
        >>> whole = next(st.stream.batches(dataset, global_batch=4))
        >>> whole.ids.shape, whole.labels.shape
        ((4, 65), (4, 65))
        >>> parts = [next(st.stream.batches(dataset, global_batch=4, rank=rank, size=2)) for rank in (0, 1)]
        >>> sorted(whole.sample_ids) == sorted([*parts[0].sample_ids, *parts[1].sample_ids])
        True
    """
    lanes = lanes or global_batch
    if not 0 <= rank < size <= lanes:
        limit = f"of size = {size} ranks; a rank needs one of {lanes} lanes"
        raise ConfigError(explain("rank", rank, limit, "0 <= rank < size <= lanes, and lanes divides global_batch"))
    if step < 0:
        raise ConfigError(explain("step", step, "is before the first step, 0", "give the number of steps done"))
    length = load_manifest(Folder(dataset)).sequence_length
    stream = StreamConfig(global_batch=global_batch, lanes=lanes, seed=seed)
    data = open_data(DataConfig(stream, ShardsConfig(dataset=dataset, sequence_length=length), FeedConfig()))
    reader = RankReader(data, rank, size)
    return load(reader, _reads(reader, step))


def _reads(reader: RankReader, first: int) -> Iterator[Read]:
    """Yield consecutive reads (``Read``: a few consecutive steps) from step ``first`` on. The iterator never ends."""
    steps = reader.plan(StepsDone(first), StepsDone(first + _MOST_STEPS), _READ_BYTES)[0].last - first
    for begin in itertools.count(first, steps):
        yield Read(StepsDone(begin), StepsDone(begin + steps))
