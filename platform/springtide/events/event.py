"""The base class of all events: its time, the number of the driver's lease, the kind of time to which it is charged, and a line
of text."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    kind: ClassVar[str]
    """The event's name in a journal."""
    charged_to: ClassVar[str] = "other"
    """Kind of time, one of ``tracking.ledger.KINDS``, to which the time since the previous event is charged."""
    from_controller: ClassVar[bool] = False
    """Whether the controller posts this event, which may be at any time and not in the order of training."""
    time_s: Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)] = dataclasses.field(
        default_factory=lambda: time.time()
    )
    """Seconds since 1970."""
    term: int = 0
    """Number of the driver's lease (the right to write the run) when the event happened; the first lease is 1."""

    def describe(self) -> str:
        """Return the event as one line for people."""
        return self.kind
