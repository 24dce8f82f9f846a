"""Events as JSON objects, and back. Unknown keys are an error: a journal of another version is not guessed at."""

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
    """The event as a flat JSON object."""
    return {"kind": event.kind, **dataclasses.asdict(event)}


def event(record: dict[str, Any]) -> Event:
    """The event that ``record`` was made from.

    Raises:
        KeyError: the kind is not known.
        TypeError: a key is not known.
    """
    values = dict(record)
    return EVENTS[values.pop("kind")](**values)
