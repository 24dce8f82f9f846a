"""Events of the controller, which posts them at any time, not between steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from springtide.events.event import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """What was decided of the size of the run: ``start``, ``leave``, ``replace`` or ``stay``."""

    kind: ClassVar[str] = "decided"
    from_controller: ClassVar[bool] = True
    step: int
    decision: str
    reason: str

    def describe(self) -> str:
        return f"{self.decision}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A group of workers ended by a failure."""

    kind: ClassVar[str] = "failed"
    from_controller: ClassVar[bool] = True
    step: int
    cause: str
    """``lost nodes``, ``failed workers``, ``start-up``, ``hung`` or ``given up``."""
    reason: str
    again: bool
    """Whether another is started."""

    def describe(self) -> str:
        return f"{self.cause}: {self.reason}" + ("" if self.again else "; this is not tried again")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """A new worker's process stands on a node, and can be used by the next group."""

    kind: ClassVar[str] = "ready"
    from_controller: ClassVar[bool] = True
    step: int
    node: str
    took_s: float
    """Since it was asked for."""

    def describe(self) -> str:
        return f"node {self.node[:8]} is ready, {self.took_s:.1f} s after its process was started"
