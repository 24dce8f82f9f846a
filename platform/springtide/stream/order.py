"""The order of samples: (seed, step) -> the same rows at any world size.

Symbols: T rows of a corpus, G rows in a step, C lanes, k = G / C rows of a lane in a step, W workers,
L = floor(T / C) rows of a lane in an epoch, w rows of a window. Steps are those of the order: they count from 0, and
skipped ones count too (``springtide.config.steps``).

    epoch    permutes the row groups and concatenates them: a virtual sequence of T rows
    lane     owns L rows of that sequence; at most C - 1 rows remain, different ones in every epoch
    window   shuffles w rows of the lane among each other: the bound of the read-ahead
    mixture  decides which corpus each of the lane's k slots draws from
    rank     owns whole lanes: slicing by rank is the last operation, so a batch does not depend on W

The first three are ``corpus_order``, the fourth is ``mixture``; ``draws`` puts them together, and ``Order`` adds what a run
leaves out (skipped steps, excluded samples), the slices of ranks, and the identity.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json

import numpy as np

from springtide.config import steps
from springtide.config.batch_schedule import Ramp
from springtide.config.steps import OrderStep, StepsDone
from springtide.stream.corpus_order import CorpusOrder
from springtide.stream.draws import Draws
from springtide.stream.mixture import MixtureSchedule, WeightTable


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows of every step of a run. Two orders with the same ``identity`` give the same batches at any W.

    Example: T = 12 rows in three row groups of four, batches of G = 4 rows, C = 2 lanes of L = 6 rows, windows of w = 3 rows.
    The first epoch permutes the row groups to third, second, first. ``|`` separates the row groups, then the windows, then
    the steps, of k = 2 rows a lane:

        virtual sequence      8  9 10 11 |  4  5  6  7 |  0  1  2  3
        lane 0, shuffled     10  8  9 |  4 11  5          10  8 |  9  4 | 11  5
        lane 1, shuffled      6  0  7 |  3  1  2           6  0 |  7  3 |  1  2

    A batch is the rows of its step in lane 0, then in lane 1. Step 3 begins the second epoch, which is permuted anew:

        >>> order = Order(("manifest's digest",), group_rows=((4, 4, 4),), seed=6, global_batch=4, lanes=2, window=3)
        >>> [order.batch(OrderStep(step)).tolist() for step in range(4)]
        [[10, 8, 6, 0], [9, 4, 7, 3], [11, 5, 1, 2], [8, 9, 2, 3]]

    Two workers own a lane each; one worker owns both:

        >>> [order.rank_batch(OrderStep(1), rank, world_size=2).tolist() for rank in range(2)]
        [[9, 4], [7, 3]]

    A run that skips step 1 trains on step 2 when one step is done, and on nothing else than it would have:

        >>> skipping = dataclasses.replace(order, skip=(OrderStep(1),))
        >>> skipping.batch(skipping.step_after(StepsDone(1))).tolist()
        [11, 5, 1, 2]
    """

    manifests: tuple[str, ...]
    """Digest of each corpus's manifest."""
    group_rows: tuple[tuple[int, ...], ...]
    """Rows of every row group, one tuple per corpus."""
    seed: int
    global_batch: int
    """G of a step of full size."""
    lanes: int
    window: int
    schedule: WeightTable = ((0, (1.0,)),)
    skip: tuple[OrderStep, ...] = ()
    """Steps that the run does not train on."""
    skip_samples: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(from_step, sample ids) to exclude from the batches from that step on."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(from_step, rows of a step from there on), see ``Ramp``; empty: all steps are of full size."""

    @property
    def identity(self) -> str:
        """Digest of everything that decides the batches, 32 hex digits."""
        return self._identity(None)

    def identity_at(self, done: StepsDone) -> str:
        """Return the identity of the first ``done`` steps alone: orders that differ only in later steps share it."""
        return self._identity(self.step_before(done) + 1 if done else 0)

    def _identity(self, end: int | None) -> str:
        def begun(start: int) -> bool:
            return end is None or start < end

        pieces = [
            (start, [(number, self.manifests[number], cut) for number, cut in self._mixtures[0].shares(piece)])
            for piece, (start, _) in enumerate(self.schedule)
            if begun(start)
        ]
        skip = sorted({step for step in self.skip if begun(step)})
        samples = [(start, sorted(ids)) for start, ids in self.skip_samples if begun(start)]
        parts = [self.seed, self.global_batch, self.lanes, self.window, pieces, skip, samples]
        if len(self._ramp.pieces) > 1:
            parts.append([piece for piece in self._ramp.pieces if begun(piece[0])])
        return hashlib.blake2b(json.dumps(parts, allow_nan=False).encode(), digest_size=16).hexdigest()

    def step_after(self, done: StepsDone) -> OrderStep:
        """Return the step that is trained next when ``done`` steps are done."""
        return steps.step_after(done, self.skip)

    def step_before(self, done: StepsDone) -> OrderStep:
        """Return the step that was trained last when ``done`` steps are done, at least one."""
        return steps.step_before(done, self.skip)

    @property
    def rows_per_lane(self) -> int:
        """k of a step of full size."""
        return self.global_batch // self.lanes

    def rows(self, step: OrderStep) -> int:
        """Return G of ``step``, excluded samples counted too."""
        return self._ramp.rows(step)

    def lane_share(self, step: OrderStep) -> int:
        """Return k of ``step``."""
        return self.rows(step) // self.lanes

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Return the lanes l with floor(l * W / C) == rank: contiguous; sizes differ by at most one."""
        return range(-(-rank * self.lanes // world_size), -(-(rank + 1) * self.lanes // world_size))

    def batch(self, step: OrderStep) -> np.ndarray:
        """Return the sample ids of ``step``, uint64 (G,), in slot order."""
        return self.samples(step, range(self.lanes))

    def rank_batch(self, step: OrderStep, rank: int, world_size: int) -> np.ndarray:
        """Return the part of ``batch(step)`` that ``rank`` of ``world_size`` trains on, uint64 (n,)."""
        return self.samples(step, self.lanes_of(rank, world_size))

    def samples(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return the sample ids of ``lanes`` in ``step``, uint64 (at most len(lanes) * k,), lane by lane."""
        drawn = self._draws.samples(step, lanes)
        return drawn[self._kept(step, drawn)] if self.skip_samples else drawn

    def lane_rows(self, step: OrderStep, rank: int, world_size: int) -> list[int]:
        """Return the rows of ``step`` in each lane of ``rank``: k, less the excluded ones."""
        kept = self._kept(step, self._draws.samples(step, self.lanes_of(rank, world_size)))
        return kept.reshape(-1, self.lane_share(step)).sum(axis=1).tolist()

    def _kept(self, step: OrderStep, drawn: np.ndarray) -> np.ndarray:
        """Return which of the samples drawn in ``step`` are not excluded, bool (n,)."""
        kept = np.ones(len(drawn), dtype=bool)
        for start, excluded in self.skip_samples:
            if start <= step:
                kept &= ~np.isin(drawn, np.array(excluded, dtype=np.uint64))
        return kept

    def corpora(self, step: OrderStep) -> np.ndarray:
        """Return the corpus of every slot of ``step``, int64 (G,)."""
        return self._mixtures[self._ramp.piece(step)].corpora(step)

    def epoch(self, step: OrderStep, corpus: int = 0) -> float:
        """Return the epochs of ``corpus`` that the first lane has drawn before ``step``, fractions included."""
        draws = self._draws.counts_before(step, range(1))[0, corpus]
        return float(draws / self._corpora[corpus].draws_per_epoch)

    @functools.cached_property
    def _ramp(self) -> Ramp:
        return Ramp(self.ramp or ((0, self.global_batch),))

    @functools.cached_property
    def _mixtures(self) -> tuple[MixtureSchedule, ...]:
        """One schedule per piece of the ramp: a step's slots are evenly spaced, whatever their number."""
        return tuple(MixtureSchedule(rows, self.schedule) for _, rows in self._ramp.pieces)

    @functools.cached_property
    def _corpora(self) -> tuple[CorpusOrder, ...]:
        return tuple(
            CorpusOrder(self.seed, number, rows, self.lanes, self.rows_per_lane, self.window)
            for number, rows in enumerate(self.group_rows)
        )

    @functools.cached_property
    def _draws(self) -> Draws:
        return Draws(self._corpora, self._mixtures, self._ramp, self.lanes)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the fields only: what is remembered is drawn anew."""
        return Order, tuple(getattr(self, field.name) for field in dataclasses.fields(self))
