"""When the dashboard of a private cluster starts. No cluster."""

from __future__ import annotations

import threading

import pytest
from journal_events import step

from springtide.events import Started
from springtide.ray.cluster import session
from springtide.ray.cluster.session import LateDashboard

STEP = step(1)


def test_a_dashboard_starts_once_a_run_has_trained_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, starts, said = [0.0], list[str](), list[str]()

    def start() -> str:
        starts.append(threading.current_thread().name)
        return "127.0.0.1:8265"

    monkeypatch.setattr(session, "start_dashboard", start)
    monkeypatch.setattr(session, "dashboard_hint", str)
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    with LateDashboard(said.append) as listener:
        for clock[0], event in ((100.0, Started(step=0, world_size=1)), (400.0, STEP), (419.0, STEP)):
            listener(event)
        assert starts == []
        for clock[0] in (420.0, 500.0):
            listener(STEP)
    assert starts == ["springtide-dashboard"]
    assert said == ["Ray dashboard: http://127.0.0.1:8265"]


def test_a_short_run_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "start_dashboard", lambda: pytest.fail("nobody would see it"))
    with LateDashboard(pytest.fail) as listener:
        listener(STEP)
