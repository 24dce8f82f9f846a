"""Steps whose loss or gradient is far from those before: found before the weights have changed, by robust statistics, so that
one spike does not hide the next."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

_FEWEST = 16
"""Steps to compare with; before, nothing is a spike."""
_RECENT = 9
"""The last of them, whose median is what a step is expected to be: a loss falls."""
_DEVIATIONS = 1.4826 / math.sqrt(2)
"""Median difference from one step to the next -> standard deviation of normal noise; a trend hardly shows in it."""
_LEAST = 0.01
"""Of the usual value: no deviation is taken for smaller."""


class Spike(NamedTuple):
    """What was far off."""

    what: str
    value: float
    usual: float
    """The median of the steps just before."""
    deviations: float
    """Robust z-score: how many deviations above."""


class Spikes:
    """The recent past of a run. What all ranks feed it is the same, so they find the same."""

    def __init__(self, window: int, threshold: float) -> None:
        """``window``: steps to compare with; ``threshold``: deviations above the median that make a spike."""
        self._threshold = threshold
        self._past: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def find(self, loss: float, grad_norm: float) -> Spike | None:
        """The spike that a step with this loss [nats] and norm is, if it is one."""
        for what, value in self._named(loss, grad_norm).items():
            past = self._past[what]
            if len(past) < _FEWEST:
                continue
            usual = statistics.median(list(past)[-_RECENT:])
            spread = _DEVIATIONS * statistics.median(abs(after - one) for one, after in itertools.pairwise(past))
            above = (value - usual) / max(spread, _LEAST * abs(usual), 1e-12)
            if not math.isfinite(value) or above > self._threshold:
                return Spike(what, value, usual, above)
        return None

    def remember(self, loss: float, grad_norm: float) -> None:
        """A step that has changed the weights: what follows is compared with it."""
        for what, value in self._named(loss, grad_norm).items():
            self._past[what].append(value)

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: a run that is resumed compares with what the uninterrupted one would."""
        return {what: list(past) for what, past in self._past.items()}

    @staticmethod
    def _named(loss: float, grad_norm: float) -> dict[str, float]:
        return {"loss": loss, "gradient norm": grad_norm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``."""
        for what, past in self._past.items():
            past.extend(state.get(what, []))
