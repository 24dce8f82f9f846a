"""The base class of all events. An event has a time, the number of the driver's lease, a category of wall-clock time (such as
waiting for data), and a line of text for users."""

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
    """Name of the event class in the journal, such as ``step`` or ``saved``."""
    charged_to: ClassVar[str] = "other"
    """Category of wall-clock time, such as ``evaluation`` (one of ``tracking.ledger.KINDS``). The ledger counts the time since
    the previous event under it."""
    from_controller: ClassVar[bool] = False
    """True if the driver's controller sends this event. Such events come at any time, even in the middle of a step."""
    time_s: Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)] = dataclasses.field(
        default_factory=lambda: time.time()
    )
    """Time of the event in seconds since 1970."""
    term: int = 0
    """Number of the driver's lease (the right to write the run) when the event happened; the first lease is 1."""

    def describe(self) -> str:
        """Return the event as one line of text for users."""
        return self.kind
