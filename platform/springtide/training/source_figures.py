"""Loss, tokens and epochs of each source in a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from springtide.checkpoint.restore import Restored
from springtide.config.steps import StepsDone, one_more
from springtide.stream import Data
from springtide.stream.sample_ids import corpus_and_row
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult, Work

MOST_SOURCES = 32
"""More are not told one by one: each adds two numbers to the step's all-reduce and three to its event."""
_NATS, _TOKENS = "nats by source", "tokens by source"


class SourceFigures(Part):
    """The figures of each source; none of a single one, or of more than ``MOST_SOURCES``. It keeps the counts of the last
    step, so that the next one costs no sum over all steps."""

    def __init__(self, data: Callable[[], Data], device: torch.device) -> None:
        """``data`` returns the data of the current order of samples."""
        self._data, self._device = data, device
        self._num_sources = len(data().corpora) if 1 < len(data().corpora) <= MOST_SOURCES else 0
        self.begin(None)  # makes the attributes

    def begin(self, found: Restored | None) -> None:
        self._step, self._done, self._drawn = StepsDone(0), StepsDone(-1), np.zeros(0, dtype=np.int64)
        """Rows of each corpus that were drawn in the steps done."""

    def before_step(self, work: Work) -> None:
        self._step = one_more(work.step)
        if self._num_sources:  # before the forward: this copy waits for the device
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
        """Add ``loss/NAME``, unless it is not known, ``step_tokens/NAME`` and ``epochs/NAME``."""
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
        """Count the rows drawn until ``done`` steps are done; without sums over all steps if only one was added."""
        if done == self._done + 1:
            corpora = data.order.corpora(data.order.step_before(done))
            self._drawn = self._drawn + np.bincount(corpora, minlength=len(self._drawn))
        else:
            self._drawn = data.order.drawn(done)
        self._done = done
