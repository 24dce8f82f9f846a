"""Loss, tokens and epochs of each source in a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from springtide.config.steps import StepsDone
from springtide.stream import Data
from springtide.stream.sample_ids import corpus_and_row
from springtide.training.step import StepResult

MOST_SOURCES = 32
"""More are not told one by one: each adds two numbers to the step's all-reduce and three to its event."""


def num_sources(data: Data) -> int:
    """Return how many sources are told one by one."""
    return len(data.corpora) if 1 < len(data.corpora) <= MOST_SOURCES else 0


def numbers(data: Data, sample_ids: np.ndarray, device: torch.device) -> Tensor | None:
    """Return the number of the source of each row, int64 (n,); None if nothing is told."""
    return torch.from_numpy(corpus_and_row(sample_ids)[0]).to(device) if num_sources(data) else None


class SourceFigures:
    """What the events of steps tell of each source; nothing of a single one, or of more than ``MOST_SOURCES``. It keeps the
    counts of the last step, so that the next costs no sum over all steps."""

    def __init__(self) -> None:
        self._done, self._drawn = StepsDone(-1), np.zeros(0, dtype=np.int64)
        """Rows of each corpus that were drawn in the steps done."""

    def of_step(self, data: Data, done: StepsDone, result: StepResult) -> dict[str, float]:
        """Return what the event of the step that was done last tells (``events.metrics.EXTRA_METRICS``)."""
        if not num_sources(data):
            return {}
        self._count(data, done)
        told: dict[str, float] = {}
        for corpus, drawn, (loss, tokens) in zip(data.corpora, self._drawn.tolist(), result.sources, strict=True):
            if loss is not None:
                told[f"loss/{corpus.name}"] = loss
            told[f"step_tokens/{corpus.name}"] = float(tokens)
            told[f"epochs/{corpus.name}"] = round(drawn / corpus.rows, 6)
        return told

    def _count(self, data: Data, done: StepsDone) -> None:
        """Count the rows drawn until ``done`` steps are done; without sums over all steps if only one was added."""
        if done == self._done + 1:
            corpora = data.order.corpora(data.order.step_before(done))
            self._drawn = self._drawn + np.bincount(corpora, minlength=len(self._drawn))
        else:
            self._drawn = data.order.drawn(done)
        self._done = done
