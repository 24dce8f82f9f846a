"""The order made real: reads of a few steps at a time, and batches that are checked against the order.

A *read* is the steps [first, last) of one rank: the unit that a Ray task or a thread fetches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from springtide.errors import OrderError
from springtide.shards import TRAIN, Manifest, SplitReader
from springtide.store import Folder
from springtide.stream.order import Order, corpus_and_row


class Batch(NamedTuple):
    """What one rank trains on in one step."""

    step: int
    """Steps done before it."""
    sample_ids: np.ndarray
    """uint64 (n,), as they came with the rows."""
    tokens: np.ndarray
    """uint16 or uint32 (n, sequence_length + 1)."""


class Read(NamedTuple):
    """The steps [first, last)."""

    first: int
    last: int


class RankReader:
    """Fetches reads of one rank from the shards. Picklable; opens nothing until the first read."""

    def __init__(
        self, datasets: tuple[str, ...], manifests: tuple[Manifest, ...], order: Order, rank: int, world_size: int
    ):
        """``datasets``: URLs, one a corpus of the order."""
        self._datasets, self._manifests, self._order = datasets, manifests, order
        self._rank, self._world_size = rank, world_size
        self._readers: list[SplitReader] | None = None

    def plan(self, first: int, last: int, read_bytes: int) -> list[Read]:
        """The steps [first, last) cut into reads of about ``read_bytes`` of tokens, at least one step each."""
        manifest = self._manifests[0]
        row_bytes = (manifest.sequence_length + 1) * np.dtype(manifest.token_type).itemsize
        rows = max(1, len(self._order.lanes_of(self._rank, self._world_size)) * self._order.rows_per_lane)
        steps = max(1, read_bytes // (rows * row_bytes))
        return [Read(start, min(start + steps, last)) for start in range(first, last, steps)]

    def fetch(self, read: Read) -> Iterator[Batch]:
        """The batches of ``read`` in order; the ids are those stored beside the rows, not those asked for."""
        if self._readers is None:
            pairs = zip(self._datasets, self._manifests, strict=True)
            self._readers = [SplitReader(Folder(url), manifest.splits[TRAIN]) for url, manifest in pairs]
        for step in range(read.first, read.last):
            wanted = self._order.rank_batch(step, self._rank, self._world_size)
            corpora, rows = corpus_and_row(wanted)
            ids = np.empty(len(wanted), dtype=np.uint64)
            tokens = np.empty((len(wanted), self._manifests[0].sequence_length + 1), self._manifests[0].token_type)
            for corpus in np.unique(corpora):
                here = corpora == corpus
                found = self._readers[corpus].read(rows[here])
                ids[here] = (np.uint64(corpus) << np.uint64(48)) | found.sample_ids.astype(np.uint64)
                tokens[here] = found.tokens
            yield Batch(step, ids, tokens)

    def nothing(self, step: int) -> Batch:
        """The batch of a step of which this rank has no rows."""
        manifest = self._manifests[0]
        return Batch(step, np.empty(0, np.uint64), np.empty((0, manifest.sequence_length + 1), manifest.token_type))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": None}


def check(order: Order, rank: int, world_size: int, step: int, batch: Batch) -> None:
    """OrderError unless ``batch`` is exactly what the order gives this rank at ``step``."""
    wanted = order.rank_batch(step, rank, world_size)
    if batch.step != step:
        raise OrderError(f"rank {rank} of {world_size} was fed step {batch.step} where step {step} was due")
    if not np.array_equal(batch.sample_ids, wanted):
        differ = np.flatnonzero(batch.sample_ids != wanted) if len(batch.sample_ids) == len(wanted) else np.array([0])
        first = int(differ[0])
        raise OrderError(
            f"rank {rank} of {world_size}, step {step}: sample {first} of {len(wanted)} should be {wanted[first : first + 1]} "
            f"and is {batch.sample_ids[first : first + 1]}; the feed and the order disagree"
        )


def load(reader: RankReader, plan: list[Read]) -> Iterator[Batch]:
    """The batches of ``plan``, one read ahead in a thread: the feed of a process without Ray."""
    ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(maxsize=1)
    closed = threading.Event()

    def put(item: list[Batch] | BaseException | None) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for read in plan:
                if closed.is_set():
                    return
                put(list(reader.fetch(read)))
            put(None)
        except BaseException as error:  # crosses to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="springtide-load", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        closed.set()
        thread.join()
