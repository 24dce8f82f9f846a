"""Event classes of a run (frozen dataclasses), and the names and units of its metrics.

The training loop yields events. A listener is any code that receives them, to print, store or plot them. Layer rule: this
package imports no other package of springtide than ``config``.
"""

from springtide.events.controller import Commanded, DeadlineChecked, Decided, Failed, Ordered, Ready
from springtide.events.event import Event
from springtide.events.record import EVENTS, event, record
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
    Miscomputed,
    Monitored,
    Paused,
    Profiled,
    Resumed,
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

__all__ = [
    "EVENTS",
    "Commanded",
    "DeadlineChecked",
    "Decided",
    "Evaluated",
    "Event",
    "Failed",
    "Left",
    "Miscomputed",
    "Monitored",
    "Ordered",
    "Paused",
    "Profiled",
    "Ready",
    "Rejected",
    "Resumed",
    "RolledBack",
    "Sampled",
    "SaveFailed",
    "SaveIntervalChanged",
    "SaveSkipped",
    "Saved",
    "SnapshotIntervalChanged",
    "Spiked",
    "Started",
    "StepDone",
    "Stopped",
    "Straggling",
    "Waited",
    "Warned",
    "event",
    "record",
]
