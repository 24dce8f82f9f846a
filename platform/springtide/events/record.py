"""Convert events to JSON objects (records) and back. A record with another format number, an unknown key or an invalid value
raises ValueError. A record of a kind of event that this version lacks raises ``UnknownKind``, a subclass of ValueError. Readers
skip such records."""

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
"""Format number of a record. Increase it if readers of the previous format would misread or refuse a new record. A record
without a number has format 1."""

EVENTS: dict[str, type[Event]] = {
    one.kind: one
    for module in (steps, saves, controller)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Event) and one is not Event
}
"""Kind (name of an event in the journal) -> class of the event."""
LARGEST_INT = 2**53
"""Whole numbers in a record must be below this, because float64 cannot represent every whole number above it."""
MOST_WORKERS = 1_000_000
"""Largest ``world_size`` (number of workers) that a record may contain."""
_TYPES = {kind: {field.name: str(field.type) for field in dataclasses.fields(one)} for kind, one in EVENTS.items()}
"""Kind of event -> name of each field -> type annotation of the field, as text."""


_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Pattern that the kind of every event matches, in all versions: a short lower-case name."""


class UnknownKind(ValueError):
    """A record has a kind of event that this version does not know. ``args[0]``: the kind."""

    @property
    def kind(self) -> str:
        """The unknown kind."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"no kind of event: {self.kind!r}"


def record(event: Event) -> dict[str, Any]:
    """Return the event as a flat JSON object, the record."""
    return {"kind": event.kind, **dataclasses.asdict(event)}


def event(record: dict[str, Any]) -> Event:
    """Return the event that ``record`` (a JSON object) describes. A null in a number field becomes NaN: the writer replaced NaN
    and infinity by null. Raises UnknownKind for a kind of event that this version lacks. Raises a plain ValueError for a wrong
    format number, an unknown key, a value of a wrong type, or a whole number beyond ``LARGEST_INT`` or ``MOST_WORKERS``."""
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
    """Return pydantic's validator for events of this kind. It is built when the first event of the kind is read."""
    return TypeAdapter(EVENTS[kind])


def _check_size(key: str, value: Any, kind: str) -> None:
    least, limit = (0, MOST_WORKERS + 1) if key == "world_size" else (1 - LARGEST_INT, LARGEST_INT)
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, int) and "float" not in kind and not least <= one < limit:
            raise ValueError(
                f"{key} is a number outside the range that a run can write: it must be from {least} to {limit - 1}"
            )


def _number(value: Any, kind: str) -> Any:
    if kind == "float":
        return math.nan if value is None else value
    if kind == "dict[str, float]" and isinstance(value, dict):
        return {key: math.nan if one is None else one for key, one in value.items()}
    if kind == "list[float]" and isinstance(value, list):
        return [math.nan if one is None else one for one in value]
    return value
