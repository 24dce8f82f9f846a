"""Read the rows of a few steps at a time in the run's order, and check batches against the order.

A *read* is a few consecutive steps of one rank: the unit that a Ray task or a thread fetches. In this file a step is given by
the number of steps done before it, as in training. Only ``fetch`` and ``check`` convert this number to an index in the order.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from springtide.config.steps import StepsDone
from springtide.errors import OrderError
from springtide.shards import Columns, ids_of, is_predicted
from springtide.shards.loss_mask import IGNORE_INDEX
from springtide.stream.order import Order

if TYPE_CHECKING:
    from springtide.stream.data import Data


Item = TypeVar("Item")
_NO_COLUMNS: Columns = {}
_END_S = 10.0
"""When the process ends, wait at most this long for a prefetch thread to finish its current read [s]."""


class Batch(NamedTuple):
    """The rows that one rank trains on in one step."""

    step: StepsDone
    """Number of steps done before this one."""
    sample_ids: np.ndarray
    """uint64 (n,): sample ids as stored with the rows."""
    tokens: np.ndarray
    """Tokens of the rows, uint16 or uint32 (n, sequence_length + 1). The top bit of a token is set if the token is not
    predicted."""
    columns: Columns = _NO_COLUMNS
    """A model's labels of the rows: name of a column -> array (n, ...) (``shards/labels.py``); empty if the run uses no
    labels."""

    @property
    def ids(self) -> np.ndarray:
        """Token ids, int64 (n, sequence_length + 1); a model reads ``ids[:, :-1]``."""
        return ids_of(self.tokens).astype(np.int64)

    @property
    def labels(self) -> np.ndarray:
        """``ids`` with -100 (ignored by torch's cross-entropy) at tokens that are not predicted; targets are ``labels[:,
        1:]``."""
        return np.where(is_predicted(self.tokens), self.ids, IGNORE_INDEX)


class Read(NamedTuple):
    """Consecutive steps [first, last) of one rank, fetched together. Each step is given by the number of steps done before
    it."""

    first: StepsDone
    last: StepsDone

    @property
    def steps(self) -> list[StepsDone]:
        return [StepsDone(step) for step in range(self.first, self.last)]


class Fetched(NamedTuple):
    """The fetched rows of a ``Read``, sorted by step."""

    steps: np.ndarray
    """int64 (rows,): for each row, the number of steps done before its step."""
    sample_ids: np.ndarray
    """uint64 (rows,): sample ids as stored with the rows, not as requested, so that ``check`` can detect wrong rows."""
    tokens: np.ndarray
    """uint16 or uint32 (rows, sequence_length + 1)."""
    columns: Columns = _NO_COLUMNS
    """A model's labels of the rows: name of a column -> array (rows, ...); empty if the run uses no labels."""


@dataclasses.dataclass(frozen=True)
class RankReader:
    """Reader of one rank's rows. Picklable; opens no file until the first read."""

    data: Data
    rank: int
    world_size: int

    def plan(self, first: StepsDone, last: StepsDone, read_bytes: int) -> list[Read]:
        """Cut the steps [first, last) into reads of about ``read_bytes`` bytes of tokens and labels, at least one step per
        read."""
        row_bytes = (self.data.sequence_length + 1) * np.dtype(self.data.token_type).itemsize
        row_bytes += self.data.labels.row_bytes if self.data.labels else 0
        order = self.data.order
        rows = max(1, len(order.lanes_of(self.rank, self.world_size)) * order.rows_per_lane)
        steps = max(1, read_bytes // (rows * row_bytes))
        starts = range(first, last, steps)
        return [Read(StepsDone(start), StepsDone(min(start + steps, last))) for start in starts]

    def fetch(self, read: Read) -> Fetched:
        """Fetch and return this rank's rows for the steps of ``read``."""
        order, steps = self.data.order, read.steps
        wanted = [order.rank_batch(order.step_after(step), self.rank, self.world_size) for step in steps]
        all_wanted = np.concatenate(wanted)
        sample_ids, tokens = self.data.rows(all_wanted)
        counts = [len(ids) for ids in wanted]
        return Fetched(np.repeat(steps, counts), sample_ids, tokens, self.data.columns(all_wanted))

    def batches(self, read: Read) -> Iterator[Batch]:
        """Yield the batches of ``read``, one per step. If all rows of a step are excluded, its batch has no rows."""
        found = self.fetch(read)
        bounds = np.searchsorted(found.steps, range(read.first, read.last + 1)).tolist()
        for step, begin, end in zip(read.steps, bounds[:-1], bounds[1:], strict=True):
            columns = {name: column[begin:end] for name, column in found.columns.items()}
            yield Batch(step, found.sample_ids[begin:end], found.tokens[begin:end], columns)

    def nothing(self, step: StepsDone) -> Batch:
        """Return an empty batch, for a step in which this rank has no rows."""
        tokens = np.empty((0, self.data.sequence_length + 1), self.data.token_type)
        no_ids = np.empty(0, np.uint64)
        return Batch(step, no_ids, tokens, self.data.columns(no_ids))


def check(order: Order, rank: int, world_size: int, step: StepsDone, batch: Batch) -> None:
    """Raise OrderError unless ``batch`` has exactly the rows that the order assigns to this rank when ``step`` steps are
    done."""
    wanted = order.rank_batch(order.step_after(step), rank, world_size)
    if batch.step != step:
        raise OrderError(f"rank {rank} of {world_size} received step {batch.step}, expected step {step}")
    if len(batch.sample_ids) != len(wanted) or (batch.sample_ids != wanted).any():
        differ = np.flatnonzero(batch.sample_ids != wanted) if len(batch.sample_ids) == len(wanted) else np.array([0])
        first = int(differ[0])
        raise OrderError(
            f"rank {rank} of {world_size}, step {step}: sample {first} of {len(wanted)} should be {wanted[first : first + 1]} "
            f"and is {batch.sample_ids[first : first + 1]}; the data pipeline returned wrong rows"
        )


def load(reader: RankReader, plan: Iterable[Read]) -> Iterator[Batch]:
    """Yield the batches of the reads in ``plan``, with one read prefetched: the data pipeline of a process without Ray."""
    rest = iter(plan)
    reads = itertools.chain(*map(growing, itertools.islice(rest, 1)), rest)
    for batches in ahead(list(reader.batches(read)) for read in reads):
        yield from batches


def growing(read: Read) -> Iterator[Read]:
    """Split a read into reads of 1, 1, 2, 4, ... steps. So a starting worker group waits for the rows of one step only, and
    the number of requests to the store stays small.

    >>> [part.last for part in growing(Read(StepsDone(10), StepsDone(17)))]
    [11, 12, 14, 17]
    """
    begin, last = read.first, read.last
    while begin < last:
        end = StepsDone(min(last, begin + max(1, begin - read.first)))
        yield Read(begin, end)
        begin = end


_drawing: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _end_drawing() -> None:
    """Stop the prefetch threads at exit: a thread that runs C++ library code when Python exits would abort the process."""
    for thread, closed in list(_drawing.items()):
        closed.set()
        thread.join(_END_S)


class ahead(Iterator[Item]):  # noqa: N801  used like a function
    """Iterator over ``items`` that fetches one item ahead in a thread. An exception raised by ``items`` is raised again when
    the consumer reaches it.

    The thread ends after the last item, or when this object is closed or deleted.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._ready: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        # do not pass self: the thread would keep this object alive, and __del__ would never run
        work = (items, self._ready, self._closed)
        thread = threading.Thread(target=_draw, args=work, name="springtide-ahead", daemon=True)
        _drawing[thread] = self._closed
        thread.start()

    def __next__(self) -> Item:
        item = None if self._closed.is_set() else self._ready.get()
        if item is None or isinstance(item, BaseException):
            self._closed.set()
            raise StopIteration if item is None else item
        return item

    def close(self) -> None:
        """Stop prefetching after the current item."""
        self._closed.set()

    def __del__(self) -> None:
        self._closed.set()


def _draw(items: Iterable[Item], ready: queue.Queue[Item | BaseException | None], closed: threading.Event) -> None:
    def put(item: Item | BaseException | None) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    try:
        for item in items:
            put(item)
            if closed.is_set():
                return
        put(None)
    except BaseException as error:  # passed to the consumer, which raises it
        put(error)
