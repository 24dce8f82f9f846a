"""What a run does, in words: one teller for lists, pages, handles and ``run status``."""

from __future__ import annotations

import dataclasses

import pytest
from journal_events import step

from springtide.events import Commanded, Decided, Event, Started, Stopped
from springtide.tracking.run_state import run_state

BEGUN = Started(step=0, world_size=2, time_s=1.0, term=1)
PAUSED = Decided(step=3, decision="stay", reason="paused by ana@host", time_s=2.0, term=1)
WAITING = dataclasses.replace(PAUSED, reason="waiting for capacity: room for 0 workers")
STOP = Commanded(step=3, verb="stop", caller="ana@host", time_s=2.0, term=1)
STOPPED = Stopped(step=3, status="stopped", time_s=3.0, term=1)
FAILED = dataclasses.replace(STOPPED, status="failed", reason="OSError: gone")
AGAIN = Started(step=3, world_size=1, time_s=4.0)


@pytest.mark.parametrize(
    ("events", "word", "known", "described"),
    [
        ([], "not started", "not started", "not started"),
        ([BEGUN], "starting", "running or killed", "running or killed"),
        ([BEGUN, step(1)], "training", "running or killed", "running or killed"),
        ([BEGUN, PAUSED], "paused", "paused", "paused"),
        ([BEGUN, WAITING], "waiting", "waiting", "waiting"),
        ([BEGUN, PAUSED, BEGUN], "starting", "running or killed", "running or killed"),
        ([BEGUN, STOPPED], "stopped", "stopped", "stopped at step 3"),
        ([BEGUN, STOP, STOPPED], "stopped", "stopped", "stopped at step 3, by ana@host"),
        ([BEGUN, dataclasses.replace(STOP, refused=True), STOPPED], "stopped", "stopped", "stopped at step 3"),
        ([BEGUN, STOP, FAILED], "failed", "failed", "failed at step 3: OSError: gone"),
        ([BEGUN, STOPPED, PAUSED], "stopped", "stopped", "stopped at step 3"),
        ([BEGUN, STOP, STOPPED, AGAIN], "starting", "running or killed", "running or killed"),
        (
            [BEGUN, STOPPED, dataclasses.replace(AGAIN, time_s=-9e3, term=2)],
            "starting",
            "running or killed",
            "running or killed",
        ),
        ([BEGUN, STOPPED, dataclasses.replace(PAUSED, term=2)], "paused", "paused", "paused"),
        (
            [BEGUN, STOP, STOPPED, AGAIN, dataclasses.replace(STOPPED, term=2)],
            "stopped",
            "stopped",
            "stopped at step 3",
        ),
    ],
)
def test_the_words_follow_the_events(events: list[Event], word: str, known: str, described: str) -> None:
    state = run_state(events)
    assert (state.word, state.known, state.describe()) == (word, known, described)
    assert state.is_over == (word in ("finished", "stopped", "failed"))
