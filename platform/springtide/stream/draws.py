"""The samples that each lane draws in each step of the order, and the memory of those drawn last.

Symbols are those of ``springtide.stream.order``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from springtide.config.batch_schedule import Ramp
from springtide.config.steps import OrderStep
from springtide.stream.corpus_order import CorpusOrders
from springtide.stream.mixture import MixtureSchedule
from springtide.stream.sample_ids import join

_DRAWS_PER_BLOCK = 2**15
_STEPS_PER_BLOCK = 64
"""At most."""
_BLOCKS_KEPT = 8


class _Run(NamedTuple):
    """Consecutive steps of one batch size: what each slot draws."""

    corpora: np.ndarray
    """int64 (steps, G)."""
    draws: np.ndarray
    """int64 (steps, G): numbers of draws from that corpus."""


class Draws:
    """The draws of all lanes.

    The draws from a corpus in a step have consecutive numbers, from the count of draws before the step on. They are given to
    the slots of that corpus so that a lane gets rows of nearly the same columns in every step. Steps are dealt a block at a
    time, and the latest blocks are kept. Block after block, the counts are carried on; only after a seek are they summed anew.
    """

    def __init__(
        self, corpora: CorpusOrders, mixtures: Sequence[MixtureSchedule], ramp: Ramp, lanes: int, most_rows: int
    ) -> None:
        """``mixtures``: one per piece of ``ramp``; ``most_rows``: G of the largest step."""
        self._corpora, self._mixtures, self._ramp, self._lanes = corpora, mixtures, ramp, lanes
        self._steps = min(_STEPS_PER_BLOCK, max(1, _DRAWS_PER_BLOCK // most_rows))
        self._dealt = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._deal_block)
        self._block = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._draw_block)
        self._carried: dict[OrderStep, np.ndarray] = {}
        """Draws before a step, for the block that is likely next."""

    def samples(self, step: OrderStep, lanes: range) -> np.ndarray:
        """Return the sample ids that ``lanes`` draw in ``step``, uint64 (len(lanes) * k,), lane by lane."""
        block, place = divmod(step, self._steps)
        return self._block(block, lanes)[place]

    def counts_before(self, step: OrderStep) -> np.ndarray:
        """Return how often each corpus is drawn from before ``step``, int64 (corpora,)."""
        return self.counts(OrderStep(0), step)

    def counts(self, first: OrderStep, last: OrderStep) -> np.ndarray:
        """Return how often each corpus is drawn from in the steps [first, last), int64 (corpora,)."""
        counts = np.zeros(len(self._corpora.rows), dtype=np.int64)
        for piece, begin, end in self._ramp.runs(first, last):
            counts += self._mixtures[piece].counts(OrderStep(begin), OrderStep(end))
        return counts

    def _draw_block(self, block: int, lanes: range) -> list[np.ndarray]:
        """Return the sample ids that ``lanes`` draw in each step of a block, uint64 (len(lanes) * k,)."""
        found = []
        for run in self._dealt(block):
            k = run.corpora.shape[1] // self._lanes
            own = slice(lanes.start * k, lanes.stop * k)
            corpora, draws = run.corpora[:, own].reshape(-1), run.draws[:, own].reshape(-1)
            found += list(join(corpora, self._corpora.draw(corpora, draws)).reshape(len(run.corpora), -1))
        return found

    def _deal_block(self, block: int) -> list[_Run]:
        """Deal the steps of a block."""
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
        """Number the draws of consecutive steps, int64 (steps, G), from the counts ``before`` them; and return those after."""
        steps, most = len(corpora), len(before)
        keys = (corpora + np.arange(steps)[:, None] * most).reshape(-1)
        counts = np.bincount(keys, minlength=steps * most)
        slots = np.argsort(keys, kind="stable")  # by step, then corpus, then lane
        keys, by_corpus = keys[slots], corpora.reshape(-1)[slots]
        inside = np.arange(len(keys)) - (np.cumsum(counts) - counts)[keys]
        after = np.cumsum(counts.reshape(steps, most), axis=0)
        draws = (before + after).reshape(-1)[keys] - counts[keys] + inside
        # the same by step, then corpus, then column
        draws = draws[np.argsort(keys + self._corpora.places(by_corpus, draws), kind="stable")]
        numbered = np.empty_like(draws)
        numbered[slots] = draws
        return numbered.reshape(corpora.shape), before + after[-1]
