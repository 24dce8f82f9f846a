"""A listener that tells Ray the metrics of a run, which Ray exports to Prometheus on every node. The driver is its only caller.

Source: https://docs.ray.io/en/releases-2.60.0/ray-observability/user-guides/add-app-metrics.html
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from springtide.events import Event
from springtide.tracking.prometheus import PREFIX, PROMETHEUS, RUN, observed

_KNOWN: dict[str, Gauge | Counter] = {}
"""Name -> metric: a process has one of each name, however many runs it trains."""


class RayMetrics:
    """A listener of one run."""

    def __init__(self, run: str) -> None:
        self._run = run

    def __call__(self, event: Event) -> None:
        """Tell what one event says; Ray sends it later, from a thread of its own."""
        for metric, labels, value in observed(event):
            known, tags = _metric(metric.name), {RUN: self._run, **labels}
            if isinstance(known, Gauge):
                known.set(value, tags)
            else:
                known.inc(value, tags)


def _metric(name: str) -> Gauge | Counter:
    if name not in _KNOWN:
        row = next(one for one in PROMETHEUS if one.name == name)
        kind = Gauge if row.kind == "gauge" else Counter
        _KNOWN[name] = kind(PREFIX + name, f"{row.meaning} [{row.unit}]", row.labels)
    return _KNOWN[name]
