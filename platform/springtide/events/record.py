"""Convert events to JSON objects and back. Unknown keys are an error: journals of other versions are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from springtide.events.controller import Decided, Failed, Ready
from springtide.events.event import Event
from springtide.events.saves import (
    Left,
    Rejected,
    Saved,
    SaveFailed,
    SaveIntervalChanged,
    SaveSkipped,
    SnapshotIntervalChanged,
)
from springtide.events.steps import (
    Evaluated,
    Profiled,
    RolledBack,
    Sampled,
    Spiked,
    Started,
    StepDone,
    Stopped,
    Straggling,
    Waited,
    Warned,
)

_KINDS = (
    *(Started, StepDone, Spiked, RolledBack, Waited, Straggling, Evaluated, Sampled, Profiled, Warned, Stopped),
    *(Saved, SaveFailed, SaveSkipped, SaveIntervalChanged, SnapshotIntervalChanged, Rejected, Left),
    *(Decided, Failed, Ready),
)
EVENTS: dict[str, type[Event]] = {event.kind: event for event in _KINDS}


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
