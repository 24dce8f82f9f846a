"""A sweep's worker pool keeps the shares of clients that are alive. The pool runs in this process, without Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from springtide.elastic.allocation import ResourceRequest
from springtide.elastic.policy import Node
from springtide.ray.tune import worker_pool
from springtide.ray.tune.worker_pool import WorkerPool


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cluster of four workers, and the time."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(worker_pool, "live", list)
    monkeypatch.setattr(worker_pool, "observed", lambda *_: [Node("node", 4)])
    return now


def test_a_client_that_beats_keeps_its_workers_however_long_its_processes_take(clock: SimpleNamespace) -> None:
    pool, cold, other = WorkerPool({"CPU": 1.0}), ResourceRequest("cold", 2, 2), ResourceRequest("other", 1, 4)
    pool.claim(cold)
    pool.claim(other)
    assert pool.mine(cold) == {"node": {"CPU": 2.0}}
    for _ in range(30):
        clock.s += 20.0
        pool.beat("cold")
        assert pool.mine(other) == {"node": {"CPU": 2.0}}
    assert pool.mine(cold) == {"node": {"CPU": 2.0}}


def test_a_client_that_was_taken_for_gone_is_back_with_its_next_question(clock: SimpleNamespace) -> None:
    pool, away, other = WorkerPool({"CPU": 1.0}), ResourceRequest("away", 2, 2), ResourceRequest("other", 1, 4)
    pool.claim(away)
    pool.claim(other)
    clock.s += 130.0
    assert pool.mine(other) == {"node": {"CPU": 4.0}}
    pool.beat("away")  # says nothing of what it wants
    assert pool.mine(other) == {"node": {"CPU": 4.0}}
    assert pool.mine(away) == {"node": {"CPU": 2.0}}
    assert pool.mine(other) == {"node": {"CPU": 2.0}}


def test_a_client_whose_cluster_has_ended_starts_none_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pool = SimpleNamespace(beat=SimpleNamespace(remote=asked.append))
    is_there = iter([True, True, False])
    monkeypatch.setattr(worker_pool.ray, "is_initialized", lambda: next(is_there))
    monkeypatch.setattr(worker_pool, "_BEAT_S", 0.0)
    client = worker_pool.WorkerPoolClient(pool)
    client._beat(threading.Event())
    assert asked == [client._client_id] * 2
