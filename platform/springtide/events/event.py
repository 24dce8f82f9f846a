"""The base of all events: its time, the lease's term, the account that time is charged to, and a line of text."""

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
    """The kind of time, one of ``tracking.ledger.KINDS``, that the time since the previous event is charged to."""
    from_controller: ClassVar[bool] = False
    """Whether the controller posts it: at any time, not in the order of training."""
    time_s: Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)] = dataclasses.field(
        default_factory=lambda: time.time()
    )
    """Seconds since 1970."""
    term: int = 0
    """The term of the driver's lease; the first is 1."""

    def describe(self) -> str:
        """Return the event as one line for people."""
        return self.kind
