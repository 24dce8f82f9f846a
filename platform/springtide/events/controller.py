"""Events of the controller, the part of the driver that starts and ends worker groups. It sends them at any time, also during a
step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from springtide.events.event import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """A decision of the controller about the run's worker group. ``start``: start a group. ``leave``: the group saves and ends.
    ``replace``: the group lost nodes, start a new one. ``stay``: no change. ``giveup``: end a run that waited too long for
    nodes."""

    kind: ClassVar[str] = "decided"
    from_controller: ClassVar[bool] = True
    step: int
    decision: str
    reason: str

    @property
    def is_about_pause(self) -> bool:
        """True if the reason of this decision is that a user paused the run."""
        return self.reason.startswith("paused by")

    def describe(self) -> str:
        return f"{self.decision}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A worker group ended with a failure."""

    kind: ClassVar[str] = "failed"
    from_controller: ClassVar[bool] = True
    step: int
    cause: str
    """One of ``lost nodes``, ``unfit node`` (cannot run a worker, or computed wrong results), ``store`` (unreachable or full),
    ``failed workers``, ``out of memory``, ``start-up``, ``hung`` or ``given up`` (an error that no retry can repair)."""
    reason: str
    again: bool
    """True if the run starts another worker group, False if the run ends."""

    def describe(self) -> str:
        return f"{self.cause}: {self.reason}" + ("" if self.again else "; not retried")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commanded(Event):
    """A user gave the run a command (``run.control``)."""

    kind: ClassVar[str] = "commanded"
    from_controller: ClassVar[bool] = True
    step: int
    verb: str
    caller: str
    """User and host, as the caller reports them."""
    text: str = ""
    """For ``resize``: the requested number of workers. For a refused command: why it was refused. Older journals may contain
    a note of the user."""
    refused: bool = False

    def describe(self) -> str:
        what = f"{self.verb}{' REFUSED' if self.refused else ''}, by {self.caller}"
        return f"{what}: {self.text}" if self.text else what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """A new worker process on a node is ready for the next worker group."""

    kind: ClassVar[str] = "ready"
    from_controller: ClassVar[bool] = True
    step: int
    node: str
    took_s: float
    """Time since the process was requested, in seconds."""

    def describe(self) -> str:
        return f"a worker on node {self.node[:8]} is ready, {self.took_s:.1f} s after its process was started"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered(Event):
    """A run with a deadline changed the number of on-demand workers that it requests, or found that Ray cannot provide them."""

    kind: ClassVar[str] = "ordered"
    from_controller: ClassVar[bool] = True
    step: int
    workers: int
    """Number of on-demand workers that the run has or requests."""
    reason: str
    given_back: list[str] = dataclasses.field(default_factory=list)
    """Ids of the on-demand nodes that the run no longer uses."""
    problem: str = ""
    """Why Ray cannot provide the workers; empty if this event reports only a changed request."""

    def describe(self) -> str:
        given = f", gives back {', '.join(node[:8] for node in self.given_back)}" if self.given_back else ""
        return f"on demand: {self.workers} workers{given}: {self.problem or self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadlineChecked(Event):
    """The estimated end of the run moved past its deadline, or back before it."""

    kind: ClassVar[str] = "deadline"
    from_controller: ClassVar[bool] = True
    step: int
    can_be_met: bool
    finish_s: float
    """Earliest possible end of the run, if it trains with the largest worker group from now on; seconds since 1970."""
    reason: str

    def describe(self) -> str:
        return f"elastic.deadline {'can be met again' if self.can_be_met else 'CANNOT BE MET'}: {self.reason}"
