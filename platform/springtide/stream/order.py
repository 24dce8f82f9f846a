"""The order of samples: a function from (seed, step) to the rows of the step, which are equal at any world size.

Symbols: T rows of a corpus, G rows in a step, C lanes, k = G / C rows of a lane in a step, W workers, w rows of a window,
S = T / w columns of a corpus, at least 1 and at most C. Steps are numbered from 0 in the order. Skipped steps have a number
too (``springtide.config.steps``).

    mixture  decides which corpus each slot of a step draws from
    draw     n of a corpus takes place n mod T of its epoch floor(n / T): no row is repeated before all rows were drawn once
    epoch    permutes the row groups and concatenates them: a virtual sequence of T rows, cut into S columns
    column   owns every S-th place of the epoch, and T / S consecutive rows of the virtual sequence
    window   shuffles w rows of a column among each other; w limits how far ahead rows must be read
    lane     owns k slots of a step; the draws of a step go to the lanes in the order of their columns
    rank     owns whole lanes: slicing by rank is the last operation, so a batch does not depend on W

The draws before a step are counted in closed form, without visiting the earlier steps. A lane draws from the same columns in
every step (exactly with one corpus and S = C, else nearly), so each rank reads its own part of the row groups. A column of
T / S rows is at least one window long. A corpus smaller than a window is a single column, which is shuffled as a whole and
shared by all lanes. The rows of one row group (R rows) in one column are drawn within (R + 2 w) S consecutive draws of the
corpus.

The module ``mixture`` computes the corpus of each slot, ``corpus_order`` the row of each draw. ``Draws`` combines both results.
``Order`` adds skipped steps, excluded samples, the slices of ranks, and the identity (digest of all that decides the batches).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from springtide.config import steps
from springtide.config.data import Ramp
from springtide.config.steps import OrderStep, StepsDone
from springtide.stream.chain import join
from springtide.stream.corpus_order import CorpusOrders
from springtide.stream.mixture import MixtureSchedule, WeightTable

_ARITHMETIC = 2
"""Version of the order's arithmetic, part of the order's identity. Increase it with every code change that assigns other rows
to a step. Then a run that began under the older arithmetic refuses to resume, instead of training on rows in a different
order."""


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows of every step of a run. Two orders with equal ``identity`` give equal batches at any number of workers W.

    Example: T = 12 rows in three row groups of four, batches of G = 4 rows, C = 2 lanes, windows of w = 3 rows, S = 2 columns.
    The first epoch permutes the row groups to third, second, first. ``|`` separates the row groups, the windows (those of
    column 1 begin half a window earlier), and the steps, of k = 2 rows a lane:

        virtual sequence      8  9 10 11 |  4  5  6  7 |  0  1  2  3
        column 0, shuffled    9 10  8 |  4 11  5        lane 0    9 10 |  8  4 | 11  5
        column 1, shuffled    6  7 |  1  2  0 |  3      lane 1    6  7 |  1  2 |  0  3

    A batch is the rows of its step in lane 0, then in lane 1. Step 3 begins the second epoch, which is permuted anew:

        >>> order = Order(("manifest's digest",), group_rows=((4, 4, 4),), seed=6, global_batch=4, lanes=2, window=3)
        >>> [order.batch(OrderStep(step)).tolist() for step in range(4)]
        [[9, 10, 6, 7], [8, 4, 1, 2], [11, 5, 0, 3], [8, 9, 2, 3]]

    With two workers, each owns one lane. With one worker, it owns both lanes:

        >>> [order.rank_batch(OrderStep(1), rank, world_size=2).tolist() for rank in range(2)]
        [[8, 4], [1, 2]]

    A run that skips step 1 trains on step 2 when one step is done. The batches of the other steps do not change:

        >>> skipping = dataclasses.replace(order, skip=(OrderStep(1),))
        >>> skipping.batch(skipping.step_after(StepsDone(1))).tolist()
        [11, 5, 0, 3]

    In a mixture of 3 to 1 with a second corpus of two rows, three steps draw 9 rows of the first corpus and 3 of the second.
    They read the second corpus one and a half times:

        >>> both = {"manifests": ("big", "small"), "group_rows": ((4, 4, 4), (2,)), "schedule": ((0, (3, 1)),)}
        >>> mixed = dataclasses.replace(order, **both)
        >>> mixed.drawn(StepsDone(3)).tolist(), mixed.epochs(StepsDone(3)).tolist()
        ([9, 3], [0.75, 1.5])
    """

    manifests: tuple[str, ...]
    """Digest of each corpus's manifest."""
    group_rows: tuple[Sequence[int] | np.ndarray, ...] = dataclasses.field(compare=False)
    """For each corpus, the number of rows of every row group. Left out of comparisons, because the digests of the manifests
    already decide these numbers."""
    seed: int
    global_batch: int
    """Number of rows of a full-size step, G."""
    lanes: int
    window: int
    schedule: WeightTable = ((0, (1.0,)),)
    skip: tuple[OrderStep, ...] = ()
    """Steps of the order that the run does not train on."""
    skip_samples: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(from_step, sample ids): these samples are excluded from all batches from that step on."""
    ramp: tuple[tuple[int, int], ...] = ()
    """Batch size ramp: (from_step, number of rows of each step from there on), see ``Ramp``; empty if all steps have full
    size."""

    @property
    def identity(self) -> str:
        """Digest of everything that decides the batches, 32 hex digits."""
        return self._identity(None)

    def identity_at(self, done: StepsDone) -> str:
        """Return the digest of everything that decides the batches of the first ``done`` steps. Orders that differ only in
        later steps have the same digest."""
        return self._identity(self.step_before(done) + 1 if done else 0)

    def _identity(self, end: int | None) -> str:
        def begun(start: int) -> bool:
            return end is None or start < end

        pieces = [
            (start, [(number, self.manifests[number], cut) for number, cut in self._mixtures[-1].shares(piece)])
            for piece, (start, _) in enumerate(self.schedule)
            if begun(start)
        ]
        skip = sorted({step for step in self.skip if begun(step)})
        samples = [(start, sorted(ids)) for start, ids in self.skip_samples if begun(start)]
        parts = [_ARITHMETIC, self.seed, self.global_batch, self.lanes, self.window, pieces, skip, samples]
        if len(self._ramp.pieces) > 1:
            parts.append([piece for piece in self._ramp.pieces if begun(piece[0])])
        return hashlib.blake2b(json.dumps(parts, allow_nan=False).encode(), digest_size=16).hexdigest()

    def step_after(self, done: StepsDone) -> OrderStep:
        """Return the index, in the order, of the step that is trained next when ``done`` steps are done."""
        return steps.step_after(done, self.skip)

    def step_before(self, done: StepsDone) -> OrderStep:
        """Return the index, in the order, of the step that was trained last when ``done`` steps are done. ``done`` is at least
        1."""
        return steps.step_before(done, self.skip)

    @property
    def rows_per_lane(self) -> int:
        """Number of rows of a lane (one of the equal parts of a batch) in a full-size step, k."""
        return self.global_batch // self.lanes

    def rows(self, step: OrderStep) -> int:
        """Return the number of rows of ``step``, G. Excluded samples are counted."""
        return self._ramp.rows(step)

    def rows_per_lane_at(self, step: OrderStep) -> int:
        """Return the number of rows of a lane (one of the equal parts of a batch) in ``step``, k."""
        return self.rows(step) // self.lanes

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Return the lanes (equal parts of each batch) that ``rank`` owns: all lanes l with floor(l * W / C) == rank, for W
        ranks and C lanes. A rank's lanes are contiguous. Two ranks own equal numbers of lanes, or numbers that differ by
        one."""
        return range(-(-rank * self.lanes // world_size), -(-(rank + 1) * self.lanes // world_size))

    def batch(self, step: OrderStep) -> np.ndarray:
        """Return the sample ids of ``step`` in the order of its slots (places for a row), uint64 (G,), fewer if samples are
        excluded."""
        return self.samples(step, range(self.lanes))

    def rank_batch(self, step: OrderStep, rank: int, world_size: int) -> np.ndarray:
        """Return the part of ``batch(step)`` that ``rank`` of ``world_size`` trains on, uint64 (n,)."""
        return self.samples(step, self.lanes_of(rank, world_size))

    def samples(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return the sample ids of ``lanes`` (equal parts of a batch) in ``step``, uint64 (at most len(lanes) * k,), lane by
        lane."""
        drawn = self._draws.samples(step, lanes)
        return drawn[self._kept(step, drawn)] if self.skip_samples else drawn

    def lane_rows(self, step: OrderStep, rank: int, world_size: int) -> list[int]:
        """Return the number of rows of each lane (equal part of a batch) of ``rank`` in ``step``: k, minus the excluded
        samples."""
        lanes = self.lanes_of(rank, world_size)
        if not any(start <= step for start, _ in self.skip_samples):
            return [self.rows_per_lane_at(step)] * len(lanes)
        kept = self._kept(step, self._draws.samples(step, lanes))
        return kept.reshape(-1, self.rows_per_lane_at(step)).sum(axis=1).tolist()

    def _kept(self, step: OrderStep, drawn: np.ndarray) -> np.ndarray:
        """Return a mask of the samples drawn in ``step``: True if the sample is kept, False if it is excluded; bool (n,)."""
        kept = np.ones(len(drawn), dtype=bool)
        for start, excluded in self._excluded:
            if start <= step:
                kept &= ~np.isin(drawn, excluded)
        return kept

    def corpora(self, step: OrderStep) -> np.ndarray:
        """Return the corpus of every slot (place for a row) of ``step``, int64 (G,)."""
        return self._mixtures[self._ramp.piece(step)].corpora(step)

    def drawn(self, done: StepsDone) -> np.ndarray:
        """Return how many rows of each corpus the first ``done`` steps draw, int64 (corpora,), including excluded samples.

        The count is exact for any number of steps, and computed without drawing rows. Rows of skipped steps are not counted.
        """
        if not done:
            return np.zeros(len(self.group_rows), dtype=np.int64)
        end = OrderStep(self.step_before(done) + 1)
        counts = self._draws.counts_before(end)
        for step in {step for step in self.skip if step < end}:
            counts -= self._draws.counts(step, OrderStep(step + 1))
        return counts

    def epochs(self, done: StepsDone) -> np.ndarray:
        """Return how many times the first ``done`` steps train on each corpus, with fractions, float64 (corpora,)."""
        return self.drawn(done) / self._corpora.rows

    @functools.cached_property
    def _ramp(self) -> Ramp:
        return Ramp(self.ramp or ((0, self.global_batch),))

    @functools.cached_property
    def _mixtures(self) -> tuple[MixtureSchedule, ...]:
        """One mixture schedule per batch size of the ramp, because the slots (places for a row) of a step must be evenly
        spaced."""
        return tuple(MixtureSchedule(rows, self.schedule) for _, rows in self._ramp.pieces)

    @functools.cached_property
    def _corpora(self) -> CorpusOrders:
        return CorpusOrders(self.seed, self.group_rows, self.lanes, self.window)

    @functools.cached_property
    def _draws(self) -> Draws:
        return Draws(self._corpora, self._mixtures, self._ramp, self.lanes, self.global_batch)

    @functools.cached_property
    def _excluded(self) -> tuple[tuple[int, np.ndarray], ...]:
        return tuple((start, np.array(sorted(ids), dtype=np.uint64)) for start, ids in self.skip_samples)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the fields only; cached draws are computed again after unpickling."""
        return Order, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


# The samples that each lane draws in each step of the order, with a cache of the latest blocks of steps.
#
# Symbols: see the top of this file.

_DRAWS_PER_BLOCK = 2**15
_STEPS_PER_BLOCK = 64
"""Most steps in a block."""
_BLOCKS_KEPT = 8


class _Run(NamedTuple):
    """Corpus and draw number of each slot (place for a row), in consecutive steps with the same batch size."""

    corpora: np.ndarray
    """int64 (steps, G): corpus of each slot."""
    draws: np.ndarray
    """int64 (steps, G): number of each slot's draw, counted from 0 for each corpus."""


class Draws:
    """The sample ids that each lane draws in each step.

    In a step, the draws from a corpus have consecutive numbers, which begin at the count of earlier draws from this corpus.
    They are assigned to the corpus's slots so that a lane (equal part of a batch) gets rows of nearly the same columns (parts
    of the corpus) in every step. Draws are computed for a block of steps at a time, and the latest blocks are cached. The
    counts at the end of a block are the counts at the start of the next block. After a seek the counts are summed again.
    """

    def __init__(
        self, corpora: CorpusOrders, mixtures: Sequence[MixtureSchedule], ramp: Ramp, lanes: int, most_rows: int
    ) -> None:
        """``mixtures``: one per batch size of ``ramp``; ``most_rows``: number of rows of the largest step."""
        self._corpora, self._mixtures, self._ramp, self._lanes = corpora, mixtures, ramp, lanes
        self._steps = min(_STEPS_PER_BLOCK, max(1, _DRAWS_PER_BLOCK // most_rows))
        self._dealt = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._deal_block)
        self._block = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._draw_block)
        self._carried: dict[OrderStep, np.ndarray] = {}
        """Counts at the end of the last computed block of steps: first step of the next block -> number of draws from each
        corpus before that step. Used if the next block is computed next."""

    def samples(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return the sample ids that ``lanes`` (equal parts of a batch) draw in ``step``, uint64 (len(lanes) * k,), lane by
        lane."""
        block, place = divmod(step, self._steps)
        return self._block(block, lanes)[place]

    def counts_before(self, step: OrderStep) -> np.ndarray:
        """Return the number of draws from each corpus before ``step``, int64 (corpora,)."""
        return self.counts(OrderStep(0), step)

    def counts(self, first: OrderStep, last: OrderStep) -> np.ndarray:
        """Return the number of draws from each corpus in the steps [first, last), int64 (corpora,)."""
        counts = np.zeros(len(self._corpora.rows), dtype=np.int64)
        for piece, begin, end in self._ramp.runs(first, last):
            counts += self._mixtures[piece].counts(OrderStep(begin), OrderStep(end))
        return counts

    def _draw_block(self, block: int, lanes: range) -> list[np.ndarray]:
        """Return the sample ids that ``lanes`` draw in a block of steps: for each step an array, uint64 (len(lanes) * k,)."""
        found = []
        for run in self._dealt(block):
            k = run.corpora.shape[1] // self._lanes
            own = slice(lanes.start * k, lanes.stop * k)
            corpora, draws = run.corpora[:, own].reshape(-1), run.draws[:, own].reshape(-1)
            found += list(join(corpora, self._corpora.draw(corpora, draws)).reshape(len(run.corpora), -1))
        return found

    def _deal_block(self, block: int) -> list[_Run]:
        """Return the corpus and the draw number of each slot in the steps of a block, one ``_Run`` per batch size."""
        first, last = OrderStep(block * self._steps), OrderStep((block + 1) * self._steps)
        before = self._carried.pop(first, None)
        if before is None:
            before = self.counts_before(first)
        runs = []
        for piece, begin, end in self._ramp.runs(first, last):
            corpora = np.stack([self._mixtures[piece].corpora(OrderStep(step)) for step in range(begin, end)])
            draws, before = self._number(corpora, before)
            runs.append(_Run(corpora, draws))
        self._carried = {last: before}
        return runs

    def _number(self, corpora: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number the draws of consecutive steps. Returns the draw number of each slot, int64 (steps, G), and the count of draws
        from each corpus after these steps. ``before``: the count of draws from each corpus before these steps."""
        steps, most = len(corpora), len(before)
        keys = (corpora + np.arange(steps)[:, None] * most).reshape(-1)
        counts = np.bincount(keys, minlength=steps * most)
        slots = np.argsort(keys, kind="stable")  # slots sorted by step, then corpus, then lane
        keys, by_corpus = keys[slots], corpora.reshape(-1)[slots]
        inside = np.arange(len(keys)) - (np.cumsum(counts) - counts)[keys]
        after = np.cumsum(counts.reshape(steps, most), axis=0)
        draws = (before + after).reshape(-1)[keys] - counts[keys] + inside
        # sort draws by step, then corpus, then column: so every lane gets draws of nearly the same columns in each step
        draws = draws[np.argsort(keys + self._corpora.places(by_corpus, draws), kind="stable")]
        numbered = np.empty_like(draws)
        numbered[slots] = draws
        return numbered.reshape(corpora.shape), before + after[-1]
