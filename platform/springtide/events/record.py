"""Convert events to JSON objects and back. A record of another format, or with a key or value that its event does not have, is
refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pydantic import TypeAdapter

from springtide.events import controller, saves, steps
from springtide.events.event import Event

FORMAT = 1
"""Increase it when a reader of the previous format would misread or refuse a record of the new one. A record without a number
is of format 1."""

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
    """Return the event of a ``record``. Raises ValueError for another format, an unknown kind or key, and a value of another
    type."""
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {type(record).__name__}")
    values = dict(record)
    kind, number = values.pop("kind", None), values.pop("format", FORMAT)
    if number != FORMAT:
        raise ValueError(f"is in format {number!r:.40}, this version of springtide reads {FORMAT}")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"no kind of event: {kind!r:.40}")
    return _adapter(kind).validate_python(values)


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    """Return what validates an event's values; made when the first event of its kind is read."""
    return TypeAdapter(EVENTS[kind])
