"""A run has many listeners, and none speaks for the others."""

from __future__ import annotations

import pytest
from journal_events import step

from springtide.events import Event, Stopped
from springtide.events.listeners import Listeners


def test_one_listener_that_fails_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        if isinstance(event, Stopped):
            return
        raise BrokenPipeError("nobody reads")

    listeners = Listeners([broken, heard.append, broken, heard.append])
    events = [step(1), step(2), Stopped(step=2, status="finished"), step(3)]
    for event in events:
        listeners(event)
    assert heard == [event for event in events for _ in range(2)]
    assert len(caplog.records) == 4, "each listener is named once, and once more when it fails anew"
    assert "(nobody reads)" in caplog.text


def test_what_is_no_storage_trouble_is_raised_when_all_have_heard() -> None:
    heard: list[Event] = []

    def wrong(event: Event) -> None:
        raise ValueError("a bug")

    listeners = Listeners([wrong, heard.append])
    with pytest.raises(ValueError, match="a bug"):
        listeners(step(1))
    assert [one.kind for one in heard] == ["step"]


def test_what_was_heard_of_the_run_needs_no_store() -> None:
    listeners = Listeners([])
    listeners(step(7))
    assert (listeners.last_step, listeners.finished) == (7, False)
    listeners(Stopped(step=8, status="finished"))
    assert (listeners.last_step, listeners.finished) == (8, True)
    listeners(Stopped(step=8, status="failed"))
    assert not listeners.finished
