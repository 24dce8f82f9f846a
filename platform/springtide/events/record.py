"""Convert events to JSON objects and back. A record of another format, or with an unknown key or an invalid value, is refused.
A record whose kind of event only another version has raises ``UnknownKind``: readers skip and count such records."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

from pydantic import TypeAdapter

from springtide.events import controller, saves, steps
from springtide.events.event import Event

FORMAT = 1
"""Increase it when a reader of the previous format would misread or refuse a record of the new one. A record without a format
number is of format 1."""

EVENTS: dict[str, type[Event]] = {
    one.kind: one
    for module in (steps, saves, controller)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Event) and one is not Event
}
"""Kind -> class of every event."""
LARGEST_INT = 2**53
"""Limit of whole numbers in a record: from here on float64 cannot represent all of them."""
MOST_WORKERS = 1_000_000
"""The largest ``world_size``."""
_TYPES = {kind: {field.name: str(field.type) for field in dataclasses.fields(one)} for kind, one in EVENTS.items()}
"""Kind -> field -> its annotation."""


_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Pattern of the kinds of events of all versions."""


class UnknownKind(ValueError):
    """A record's kind of event is not known to this version. ``args``: the kind."""

    @property
    def kind(self) -> str:
        """The unknown kind."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"no kind of event: {self.kind!r}"


def record(event: Event) -> dict[str, Any]:
    """Return the event as a flat JSON object."""
    return {"kind": event.kind, **dataclasses.asdict(event)}


def event(record: dict[str, Any]) -> Event:
    """Return the event of a ``record``. Numbers that were not finite are null in the record and NaN in the event. Raises
    UnknownKind for a kind that this version does not have. Raises another ValueError for another format, an unknown key, a
    value of another type, or a whole number that no run writes."""
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {type(record).__name__}")
    values = dict(record)
    kind, number = values.pop("kind", None), values.pop("format", FORMAT)
    if number != FORMAT:
        raise ValueError(f"is in format {number!r:.40}, this version of springtide reads {FORMAT}")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"no kind of event: {kind!r:.40}")
    if kind not in EVENTS:
        raise UnknownKind(kind)
    types = _TYPES[kind]
    for key, value in values.items():
        _check_size(key, value, types.get(key, ""))
    return _adapter(kind).validate_python({key: _number(value, types.get(key, "")) for key, value in values.items()})


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    """Return the validator for events of this kind; it is built when the first such event is read."""
    return TypeAdapter(EVENTS[kind])


def _check_size(key: str, value: Any, kind: str) -> None:
    least, limit = (0, MOST_WORKERS + 1) if key == "world_size" else (1 - LARGEST_INT, LARGEST_INT)
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, int) and "float" not in kind and not least <= one < limit:
            raise ValueError(f"{key} is a number that no run writes: it must be from {least} to {limit - 1}")


def _number(value: Any, kind: str) -> Any:
    if kind == "float":
        return math.nan if value is None else value
    if kind == "dict[str, float]" and isinstance(value, dict):
        return {key: math.nan if one is None else one for key, one in value.items()}
    if kind == "list[float]" and isinstance(value, list):
        return [math.nan if one is None else one for one in value]
    return value
