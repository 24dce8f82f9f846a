"""What every event has: when, under which lease, what the time before it is charged to, and its line for people."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    kind: ClassVar[str]
    """Its name in a journal."""
    charged_to: ClassVar[str] = "other"
    """The kind of time, of ``track.ledger.KINDS``, that the time since the event before counts as."""
    from_controller: ClassVar[bool] = False
    """Whether the controller posts it: at any time, not in the order of training."""
    time_s: float = dataclasses.field(default_factory=time.time)
    """When, seconds since 1970."""
    term: int = 0
    """The term of the driver's lease; the first is 1."""

    def describe(self) -> str:
        """The event in one line, for a person."""
        return self.kind
