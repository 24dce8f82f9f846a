"""Detection of steps whose loss or gradient norm is far above those before: before the weights change, and by robust
statistics, so that one spike does not hide the next."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

_FEWEST = 16
"""Least number of steps to compare with; with fewer, nothing is a spike."""
_RECENT = 9
"""Number of latest steps whose median a step is expected to have: a loss falls."""
_DEVIATIONS = 1.4826 / math.sqrt(2)
"""Median difference of successive steps -> standard deviation of normal noise; a trend hardly changes it."""
_LEAST = 0.01
"""Least deviation, as a share of the usual value [ratio]."""


class Spike(NamedTuple):
    """A value far above the usual one."""

    what: str
    value: float
    usual: float
    """The median of the steps just before."""
    deviations: float
    """Robust z-score: the number of deviations above the usual value."""


class Spikes:
    """The recent steps of a run. All ranks give it the same values, so they find the same spikes."""

    def __init__(self, window: int, threshold: float) -> None:
        """``window``: steps to compare with; ``threshold``: deviations above the median that make a spike."""
        self._threshold = threshold
        self._past: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def find(self, loss: float, grad_norm: float) -> Spike | None:
        """Return the spike of a step with this loss [nats] and gradient norm, None if it is not one."""
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
        """Add a step that has changed the weights: later steps are compared with it."""
        for what, value in self._named(loss, grad_norm).items():
            self._past[what].append(value)

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint: a resumed run compares with the same steps as an uninterrupted one."""
        return {what: list(past) for what, past in self._past.items()}

    @staticmethod
    def _named(loss: float, grad_norm: float) -> dict[str, float]:
        return {"loss": loss, "gradient norm": grad_norm}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        for what, past in self._past.items():
            past.extend(state.get(what, []))
