"""Ray drops a gauge that is not set again: a run's gauges are set again until the run ends, each to its newest value."""

from __future__ import annotations

import dataclasses
import math
import queue

import pytest
from journal_events import step
from ray.util.metrics import Gauge

from springtide.events import Left, Started
from springtide.ray.train import driver_listeners
from springtide.ray.train.driver_listeners import RayMetrics

WAIT_S = 60.0
WORKERS = "springtide_workers"


class HeardGauge(Gauge):
    """A gauge of Ray that also puts its name and each value that is set into a queue."""

    heard: queue.SimpleQueue[tuple[str, float]]

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        super().set(value, tags)
        assert value is not None
        self.heard.put((self.info["name"], value))


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[tuple[str, float]]:
    """What is set, in order; the thread does not wait long."""
    found: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
    monkeypatch.setattr(HeardGauge, "heard", found, raising=False)
    monkeypatch.setattr(driver_listeners, "Gauge", HeardGauge)
    monkeypatch.setattr(driver_listeners, "_KNOWN", {})
    monkeypatch.setattr(driver_listeners, "_REFRESH_S", 0.01)
    return found


def until(heard: queue.SimpleQueue[tuple[str, float]], workers: float, times: int = 1) -> set[str]:
    """Wait until the number of workers was set so often; the gauges that were set before it."""
    names = set()
    while times:
        name, value = heard.get(timeout=WAIT_S)
        names.add(name.removeprefix("springtide_"))
        times -= (name, value) == (WORKERS, workers)
    return names


def test_gauges_are_set_again_until_the_run_ends(heard: queue.SimpleQueue[tuple[str, float]]) -> None:
    with RayMetrics("run") as metrics:
        for workers in (3, 2):
            metrics(Started(step=0, world_size=workers))
            until(heard, workers)
            assert [heard.get(timeout=WAIT_S) for _ in range(3)] == [(WORKERS, workers)] * 3
    assert not metrics._thread.is_alive()


def test_rates_end_with_the_group_and_values_that_are_not_finite_at_once(
    heard: queue.SimpleQueue[tuple[str, float]],
) -> None:
    with RayMetrics("run") as metrics:
        metrics(step(3))
        metrics(dataclasses.replace(step(4), grad_norm=math.inf))
        until(heard, step(4).world_size, times=2)
        trains = until(heard, step(4).world_size, times=3)
        assert {"step", "loss", "step_seconds"} <= trains
        assert "grad_norm" not in trains
        metrics(Left(step=4, kept_in="store"))
        until(heard, 0.0)
        rests = until(heard, 0.0, times=3)
    assert {"step", "loss"} <= rests
    assert not {"step_seconds", "tokens_per_second", "data_wait_seconds"} & rests
