"""The order of samples: (seed, step) -> the same rows at any world size.

Symbols: T rows of a corpus, G rows in a step, C lanes, k = G / C rows of a lane in a step, W workers,
L = floor(T / C) rows of a lane in an epoch, w rows of a window. Steps count from 0 here: step s runs when s steps are done.

    epoch    permutes the row groups and concatenates them: a virtual sequence of T rows
    lane     owns L rows of that sequence; at most C - 1 rows remain, different ones in every epoch
    window   shuffles w rows of the lane among each other: the bound of the read-ahead
    mixture  decides which corpus each of the lane's k slots draws from
    rank     owns whole lanes: slicing by rank is the last operation, so a batch does not depend on W
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable

import numpy as np

from springtide.config.batch_schedule import Ramp
from springtide.errors import CorpusError, explain
from springtide.stream.mixture import MixtureSchedule, WeightTable
from springtide.stream.permute import key, mix, permutation

_CORPUS_SHIFT = np.uint64(48)
_LANES_KEPT = 4096
_STEPS_A_BLOCK = 64
"""Steps that are drawn together: a lane's rows of them are consecutive, and each step is then a slice of one array."""
_BLOCKS_KEPT = 8


@dataclasses.dataclass(frozen=True)
class CorpusOrder:
    """The order in which each lane draws the rows of one corpus."""

    seed: int
    number: int
    """Index of the corpus in the mixture."""
    group_rows: tuple[int, ...]
    """Rows of every row group, in the order of the manifest."""
    lanes: int
    rows_per_step: int
    """k: rows of a lane in a step."""
    window: int

    def __post_init__(self) -> None:
        if self.draws_per_epoch == 0:
            rows = sum(self.group_rows)
            raise CorpusError(
                explain(
                    "stream.global_batch",
                    self.lanes * self.rows_per_step,
                    f"is more than the {rows} rows of the corpus",
                    "use a smaller batch, shorter sequences or more text",
                )
            )
        object.__setattr__(self, "_epoch", functools.lru_cache(maxsize=4)(self._permute_groups))
        object.__setattr__(self, "_shuffle", functools.lru_cache(maxsize=_LANES_KEPT)(self._permute_window))

    @property
    def lane_rows(self) -> int:
        """L: rows of a lane in an epoch."""
        return sum(self.group_rows) // self.lanes

    @functools.cached_property
    def draws_per_epoch(self) -> int:
        """Rows that a lane draws before it begins the next epoch: L, rounded down to whole steps."""
        return self.lane_rows // self.rows_per_step * self.rows_per_step

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.group_rows)])

    def _permute_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = permutation(key(self.seed, self.number, epoch), len(self.group_rows))
        return order, np.cumsum(np.array(self.group_rows, dtype=np.int64)[order])

    def _permute_window(self, epoch: int, lane: int, window: int) -> np.ndarray:
        size = min(self.window, self.lane_rows - window * self.window)
        return permutation(key(self.seed, self.number, epoch, lane + 1, window), size)

    def draw(self, lane: int, first: int, count: int) -> np.ndarray:
        """Return the rows of draws ``first`` to ``first + count - 1`` of ``lane``, int64 (count,)."""
        rows = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(first + done, self.draws_per_epoch)
            window, inside = divmod(offset, self.window)
            shuffle = self._shuffle(epoch, lane, window)  # type: ignore[attr-defined]
            take = min(count - done, len(shuffle) - inside, self.draws_per_epoch - offset)
            virtual = lane * self.lane_rows + window * self.window + shuffle[inside : inside + take]
            rows[done : done + take] = self._real(epoch, virtual)
            done += take
        return rows

    def _real(self, epoch: int, virtual: np.ndarray) -> np.ndarray:
        order, ends = self._epoch(epoch)  # type: ignore[attr-defined]
        place = np.searchsorted(ends, virtual, side="right")
        group = order[place]
        size = self._starts[group + 1] - self._starts[group]
        return self._starts[group] + virtual - (ends[place] - size)

    def __reduce__(self) -> tuple[object, ...]:
        return CorpusOrder, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows of every step of a run. Two orders with the same ``identity`` give the same batches at any W."""

    manifests: tuple[str, ...]
    """Digest of each corpus's manifest."""
    group_rows: tuple[tuple[int, ...], ...]
    """Rows of every row group, one tuple per corpus."""
    seed: int
    global_batch: int
    lanes: int
    window: int
    schedule: WeightTable = ((0, (1.0,)),)
    skip: tuple[int, ...] = ()
    """Steps to skip. These steps and those of the fields below are steps of the order, which counts skipped ones too."""
    skip_samples: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(from_step, sample ids) to exclude from the batches from that step on."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(from_step, rows of a step from there on), see ``Ramp``; empty: all steps are of full size."""

    @property
    def identity(self) -> str:
        """Digest of everything that decides the batches, 32 hex digits."""
        return self._identity(None)

    def identity_at(self, step: int) -> str:
        """Return the identity of the first ``step`` steps alone: orders that differ only in later steps share it."""
        return self._identity(self.order_step(step - 1) + 1 if step else 0)

    def _identity(self, end: int | None) -> str:
        def begun(start: int) -> bool:
            return end is None or start < end

        pieces = [
            (start, [(number, self.manifests[number], cut) for number, cut in self._deals[0].shares(piece)])
            for piece, (start, _) in enumerate(self.schedule)
            if begun(start)
        ]
        skip = sorted({step for step in self.skip if begun(step)})
        samples = [(start, sorted(ids)) for start, ids in self.skip_samples if begun(start)]
        parts = [self.seed, self.global_batch, self.lanes, self.window, pieces, skip, samples]
        if len(self._ramp.pieces) > 1:
            parts.append([piece for piece in self._ramp.pieces if begun(piece[0])])
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _ramp(self) -> Ramp:
        return Ramp(self.ramp or ((0, self.global_batch),))

    @functools.cached_property
    def _deals(self) -> tuple[MixtureSchedule, ...]:
        """One schedule per piece of the ramp: a step's slots are evenly spaced, whatever their number."""
        return tuple(MixtureSchedule(rows, self.schedule) for _, rows in self._ramp.pieces)

    @functools.cached_property
    def _corpora(self) -> tuple[CorpusOrder, ...]:
        return tuple(
            CorpusOrder(self.seed, number, rows, self.lanes, self.rows_per_lane, self.window)
            for number, rows in enumerate(self.group_rows)
        )

    @functools.cached_property
    def _gaps(self) -> list[int]:
        return [step - place for place, step in enumerate(sorted(set(self.skip)))]

    @property
    def rows_per_lane(self) -> int:
        """k of a step of full size."""
        return self.global_batch // self.lanes

    def rows(self, step: int) -> int:
        """Return G of ``step``, excluded samples counted too."""
        return self._ramp.rows(self.order_step(step))

    def lane_share(self, step: int) -> int:
        """Return k of ``step``."""
        return self.rows(step) // self.lanes

    def order_step(self, step: int) -> int:
        """Return the step of the order that ``step`` of the run is: ``step`` plus the number of steps skipped until then."""
        # each skipped step moves every later one by one: count those at or before the result
        return step + bisect.bisect_right(self._gaps, step)

    def epoch(self, step: int, corpus: int = 0) -> float:
        """Return the epochs of ``corpus`` that the first lane has drawn before ``step``, fractions included."""
        draws = self._drawn_before(self.order_step(step), range(1))[0, corpus]
        return float(draws / self._corpora[corpus].draws_per_epoch)

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Return the lanes l with floor(l * W / C) == rank: contiguous; sizes differ by at most one."""
        return range(-(-rank * self.lanes // world_size), -(-(rank + 1) * self.lanes // world_size))

    def lane_rows(self, step: int, rank: int, world_size: int) -> list[int]:
        """Return the rows of ``step`` in each lane of ``rank``: k, less the excluded ones."""
        _, kept = self._drawn_and_kept(step, self.lanes_of(rank, world_size))
        return kept.reshape(-1, self.lane_share(step)).sum(axis=1).tolist()

    def batch(self, step: int) -> np.ndarray:
        """Return the sample ids of ``step``, uint64 (G,), in slot order."""
        return self.samples(step, range(self.lanes))

    def rank_batch(self, step: int, rank: int, world_size: int) -> np.ndarray:
        """Return the part of ``batch(step)`` that ``rank`` of ``world_size`` trains on, uint64 (n,)."""
        return self.samples(step, self.lanes_of(rank, world_size))

    def samples(self, step: int, lanes: range) -> np.ndarray:
        """Return the sample ids that ``lanes`` draw in ``step``, uint64 (at most len(lanes) * k,), lane by lane."""
        drawn, kept = self._drawn_and_kept(step, lanes)
        return drawn[kept] if self.skip_samples else drawn

    def _drawn_and_kept(self, step: int, lanes: range) -> tuple[np.ndarray, np.ndarray]:
        """Return all drawn samples, uint64 (len(lanes) * k,), and which of them are not excluded."""
        dealt = self.order_step(step)
        block, place = divmod(dealt, _STEPS_A_BLOCK)
        drawn = self._block(block, lanes)[place]
        kept = np.ones(len(drawn), dtype=bool)
        for start, left_out in self.skip_samples:
            if start <= dealt:
                kept &= ~np.isin(drawn, np.array(left_out, dtype=np.uint64))
        return drawn, kept

    def corpora(self, step: int) -> np.ndarray:
        """Return the corpus of every slot of ``step``, int64 (G,)."""
        dealt = self.order_step(step)
        return self._deals[self._ramp.piece(dealt)].corpora(dealt)

    @functools.cached_property
    def _block(self) -> Callable[[int, range], list[np.ndarray]]:
        return functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._draw)

    def _draw(self, block: int, lanes: range) -> list[np.ndarray]:
        """Return the sample ids that ``lanes`` draw in each step of a block, uint64 (len(lanes) * k,)."""
        first = block * _STEPS_A_BLOCK
        runs = list(self._ramp.runs(first, first + _STEPS_A_BLOCK))
        ks = [self._ramp.pieces[piece][1] // self.lanes for piece, begin, end in runs for _ in range(begin, end)]
        drawn = np.empty((len(lanes), sum(ks)), dtype=np.uint64)
        if len(self.group_rows) == 1:
            before = self._ramp.before(first) // self.lanes
            for place, lane in enumerate(lanes):
                drawn[place] = self._corpora[0].draw(lane, before, sum(ks))
        else:
            dealt, counts = self._dealt(block)
            for place, lane in enumerate(lanes):
                for corpus in np.unique(dealt[lane]).tolist():
                    here = np.flatnonzero(dealt[lane] == corpus)  # a lane's draws from one corpus are consecutive
                    rows = self._corpora[corpus].draw(lane, int(counts[lane, corpus]), len(here))
                    drawn[place, here] = join(corpus, rows)
        return [part.reshape(-1) for part in np.split(drawn, np.cumsum(ks)[:-1], axis=1)]

    @functools.cached_property
    def _dealt(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        return functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._deal_block)

    def _deal_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of every draw of each lane in a block, int64 (C, draws), and how often the lane drew from each
        corpus before, int64 (C, corpora)."""
        first = block * _STEPS_A_BLOCK
        parts = []
        for piece, begin, end in self._ramp.runs(first, first + _STEPS_A_BLOCK):
            corpora = np.stack([self._deals[piece].corpora(step) for step in range(begin, end)])
            parts.append(corpora.reshape(end - begin, self.lanes, -1).swapaxes(0, 1).reshape(self.lanes, -1))
        dealt = np.concatenate(parts, axis=1)
        before = self._counted.pop(block, None)
        if before is None:  # after a seek; block after block, an addition is enough
            before = self._drawn_before(first, range(self.lanes))
        after = before + (dealt[:, :, None] == np.arange(len(self.group_rows))).sum(axis=1)
        self._counted.clear()
        self._counted[block + 1] = after
        return dealt, before

    def _drawn_before(self, dealt: int, lanes: range) -> np.ndarray:
        """Return how often each of ``lanes`` drew from each corpus before step ``dealt`` of the order, int64
        (len(lanes), corpora)."""
        counts = np.zeros((len(lanes), len(self.group_rows)), dtype=np.int64)
        for piece, begin, end in self._ramp.runs(0, dealt):
            deal, k = self._deals[piece], self._ramp.pieces[piece][1] // self.lanes
            for place, lane in enumerate(lanes):
                for slot in range(lane * k, (lane + 1) * k):
                    counts[place] += np.array(deal.count_before(slot, end)) - np.array(deal.count_before(slot, begin))
        return counts

    @functools.cached_property
    def _counted(self) -> dict[int, np.ndarray]:
        """Draws before a block, for the block that is likely next."""
        return {}

    def __reduce__(self) -> tuple[object, ...]:
        return Order, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def join(corpus: int, rows: np.ndarray) -> np.ndarray:
    """Return the sample ids, uint64 (n,), of rows of one corpus."""
    return (np.uint64(corpus) << _CORPUS_SHIFT) | rows.astype(np.uint64)


def corpus_and_row(sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus number and the row in that corpus of each sample id, int64 (n,) both."""
    ids = sample_ids.astype(np.uint64)
    return (ids >> _CORPUS_SHIFT).astype(np.int64), (ids & ((np.uint64(1) << _CORPUS_SHIFT) - np.uint64(1))).astype(
        np.int64
    )


def digest(sample_ids: np.ndarray) -> int:
    """Return a 64-bit digest of a set of sample ids that does not depend on their order: the sum of hashes mod 2**64.

    Digests of parts add up, so each rank can digest its own part.
    """
    return int(np.sum(mix(sample_ids), dtype=np.uint64)) if len(sample_ids) else 0
