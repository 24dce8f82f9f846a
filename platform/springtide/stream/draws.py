"""The samples that each lane draws in each step of the order, and the memory of those drawn last.

Symbols are those of ``springtide.stream.order``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from springtide.config.batch_schedule import Ramp
from springtide.config.steps import OrderStep
from springtide.stream.corpus_order import CorpusOrder
from springtide.stream.mixture import MixtureSchedule
from springtide.stream.sample_ids import join

_STEPS_PER_BLOCK = 64
_BLOCKS_KEPT = 8


class Draws:
    """The draws of all lanes.

    A lane's draws from one corpus are consecutive: the rows of a block of steps are one slice of that corpus's order. So
    steps are drawn a block at a time, and the latest blocks are kept. Block after block, the counts of draws before it are
    carried on; only after a seek are they summed up anew.
    """

    def __init__(
        self, corpora: Sequence[CorpusOrder], mixtures: Sequence[MixtureSchedule], ramp: Ramp, lanes: int
    ) -> None:
        """``mixtures``: one per piece of ``ramp``."""
        self._corpora, self._mixtures, self._ramp, self._lanes = corpora, mixtures, ramp, lanes
        self._block = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._draw_block)
        self._carried: dict[tuple[OrderStep, range], np.ndarray] = {}
        """Draws before a step by some lanes, for the block that is likely next."""

    def samples(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return the sample ids that ``lanes`` draw in ``step``, uint64 (len(lanes) * k,), lane by lane."""
        block, place = divmod(step, _STEPS_PER_BLOCK)
        return self._block(block, lanes)[place]

    def counts_before(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return how often each of ``lanes`` draws from each corpus before ``step``, int64 (len(lanes), corpora)."""
        counts = np.zeros((len(lanes), len(self._corpora)), dtype=np.int64)
        if len(self._corpora) == 1:
            return counts + self._ramp.before(step) // self._lanes
        for piece, begin, end in self._ramp.runs(0, step):
            mixture, k = self._mixtures[piece], self._ramp.pieces[piece][1] // self._lanes
            for place, lane in enumerate(lanes):
                for slot in range(lane * k, (lane + 1) * k):
                    before = mixture.count_before(slot, OrderStep(begin))
                    counts[place] += np.array(mixture.count_before(slot, OrderStep(end))) - np.array(before)
        return counts

    def _draw_block(self, block: int, lanes: range) -> list[np.ndarray]:
        """Return the sample ids that ``lanes`` draw in each step of a block, uint64 (len(lanes) * k,)."""
        first, last = OrderStep(block * _STEPS_PER_BLOCK), OrderStep((block + 1) * _STEPS_PER_BLOCK)
        corpora, ks = self._corpora_drawn(first, last, lanes)
        before = self._carried.pop((first, lanes), None)
        if before is None:
            before = self.counts_before(first, lanes)
        drawn, counts = np.empty(corpora.shape, dtype=np.uint64), np.zeros_like(before)
        for place, lane in enumerate(lanes):
            for number, corpus in enumerate(self._corpora):
                here = np.flatnonzero(corpora[place] == number)
                counts[place, number] = len(here)
                drawn[place, here] = join(number, corpus.draw(lane, int(before[place, number]), len(here)))
        self._carried = {(last, lanes): before + counts}
        return [part.reshape(-1) for part in np.split(drawn, np.cumsum(ks)[:-1], axis=1)]

    def _corpora_drawn(self, first: OrderStep, last: OrderStep, lanes: range) -> tuple[np.ndarray, list[int]]:
        """Return the corpus of every draw of ``lanes`` in the steps [first, last), int64 (len(lanes), draws), and k of each
        step."""
        parts, ks = [], []
        for piece, begin, end in self._ramp.runs(first, last):
            k = self._ramp.pieces[piece][1] // self._lanes
            for step in range(begin, end):
                corpora = self._mixtures[piece].corpora(OrderStep(step)).reshape(self._lanes, k)
                parts.append(corpora[lanes.start : lanes.stop])
                ks.append(k)
        return np.concatenate(parts, axis=1), ks
