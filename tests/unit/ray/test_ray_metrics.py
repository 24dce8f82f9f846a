"""Ray drops a gauge that is not set again: a run's gauges are set again until the run ends, each to its newest value."""

from __future__ import annotations

import queue

import pytest
from ray.util.metrics import Gauge

from springtide.events import Started
from springtide.ray.train import driver_listeners
from springtide.ray.train.driver_listeners import RayMetrics

WAIT_S = 60.0


class HeardGauge(Gauge):
    """A gauge of Ray that also puts each value that is set into a queue."""

    heard: queue.SimpleQueue[float]

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        super().set(value, tags)
        assert value is not None
        self.heard.put(value)


def test_gauges_are_set_again_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeardGauge, "heard", queue.SimpleQueue(), raising=False)
    monkeypatch.setattr(driver_listeners, "Gauge", HeardGauge)
    monkeypatch.setattr(driver_listeners, "_KNOWN", {})
    monkeypatch.setattr(driver_listeners, "_REFRESH_S", 0.01)
    with RayMetrics("run") as metrics:
        for workers in (3, 2):
            metrics(Started(step=0, world_size=workers))
            while HeardGauge.heard.get(timeout=WAIT_S) != workers:
                pass
            assert [HeardGauge.heard.get(timeout=WAIT_S) for _ in range(3)] == [workers] * 3
    assert not metrics._thread.is_alive()
