"""Metrics of each source of a data mixture in a step: loss, tokens and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from springtide.checkpoint.restore import Restored
from springtide.config.steps import StepsDone, one_more
from springtide.stream import Data
from springtide.stream.chain import corpus_and_row
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult, Work

MOST_SOURCES = 32
"""Largest number of sources with separate metrics. Each adds two numbers to the step's all-reduce and three to its event."""
_NATS, _TOKENS = "nats by source", "tokens by source"


class SourceFigures(Part):
    """Reports the metrics of each source of the data mixture. Reports nothing for a single source, or for more than
    ``MOST_SOURCES``. It stores the row counts up to the last step, so that the next step needs no sum over all steps."""

    def __init__(self, data: Callable[[], Data], device: torch.device) -> None:
        """``data``: returns the data with the current order of samples, which a rollback changes."""
        self._data, self._device = data, device
        self._num_sources = len(data().corpora) if 1 < len(data().corpora) <= MOST_SOURCES else 0
        self.begin(None)  # creates the attributes. Each restore calls ``begin`` again to reset them

    def begin(self, found: Restored | None) -> None:
        self._step, self._done, self._drawn = StepsDone(0), StepsDone(-1), np.zeros(0, dtype=np.int64)
        """``_drawn``: number of rows of each corpus in the batches of the first ``_done`` steps, int64 (corpora,)."""

    def before_step(self, work: Work) -> None:
        self._step = one_more(work.step)
        if self._num_sources:  # copy before forward is queued, because the copy waits for the device
            self._sources_N = torch.from_numpy(corpus_and_row(work.sample_ids)[0]).to(self._device)

    def contribute(self, message: StepMessage, share: Share) -> None:
        if not self._num_sources:
            return
        tokens_N = share.row_tokens
        nats_N = torch.full_like(tokens_N, math.nan) if share.row_nats is None else share.row_nats
        by_source = tokens_N.new_zeros(2, self._num_sources)
        by_source.index_add_(1, self._sources_N, torch.stack([nats_N, tokens_N]))
        message.sum(_NATS, by_source[0])
        message.sum(_TOKENS, by_source[1])

    def receive(self, result: StepResult) -> None:
        """Add the metrics ``step_tokens/NAME`` and ``epochs/NAME`` of each source, and ``loss/NAME`` if losses per row are
        known."""
        if not self._num_sources:
            return
        data = self._data()
        self._count(data, self._step)
        sums = zip(result.agreed[_NATS], result.agreed[_TOKENS], strict=True)
        for corpus, drawn, (nats, tokens) in zip(data.corpora, self._drawn.tolist(), sums, strict=True):
            if tokens and not math.isnan(nats):
                result.extra[f"loss/{corpus.name}"] = nats / tokens
            result.extra[f"step_tokens/{corpus.name}"] = tokens
            result.extra[f"epochs/{corpus.name}"] = round(drawn / corpus.rows, 6)

    def _count(self, data: Data, done: StepsDone) -> None:
        """Update the number of rows of each corpus in the batches of the first ``done`` steps. If only one step was added since
        the last call, its rows are added, without a sum over all steps."""
        if done == self._done + 1:
            corpora = data.order.corpora(data.order.step_before(done))
            self._drawn = self._drawn + np.bincount(corpora, minlength=len(self._drawn))
        else:
            self._drawn = data.order.drawn(done)
        self._done = done
