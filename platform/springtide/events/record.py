"""Convert events to JSON objects and back. Unknown keys are an error: journals of other versions are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from springtide.events import controller, saves, steps
from springtide.events.event import Event

EVENTS: dict[str, type[Event]] = {
    one.kind: one
    for module in (steps, saves, controller)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Event) and one is not Event
}
"""Kind -> class of every event."""


def record(event: Event) -> dict[str, Any]:
    """Return the event as a flat JSON object."""
    return {"kind": event.kind, **dataclasses.asdict(event)}


def event(record: dict[str, Any]) -> Event:
    """Return the event of a ``record``.

    Raises:
        KeyError: unknown kind.
        TypeError: unknown key.
    """
    values = dict(record)
    return EVENTS[values.pop("kind")](**values)
