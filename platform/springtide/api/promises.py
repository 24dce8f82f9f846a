"""What a drill promises besides equal losses, as its run's events tell: a notice is used to its end, a hang is found soon
and by name, and a whole state on the devices that stay is used.

    act of the drill (a notice, a stop, two nodes killed) -> what the run did next, and when -> the promises that it broke
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from springtide.elastic.forecast import RunHistory
from springtide.elastic.stalled import found_by_s
from springtide.events import Decided, Event, Failed, Left, Started, StepDone
from springtide.events.record import record
from springtide.planning.scenarios import ActDone

_LOOKS_S = 0.5
"""The controller looks at the nodes several times in this time, and asks the group to leave at a look [s]."""
_LIVE = "live copy"
"""What a group has resumed from begins so where devices that stayed held it."""


@dataclasses.dataclass(frozen=True)
class NoticeKept:
    """How a group left a node before its announced loss."""

    node: str
    """The first 8 characters of its id."""
    notice_s: float
    """Between the notice and the loss [s]."""
    margin_s: float
    """How long before the loss the group had to be asked to leave, by what the run had measured until then [s]."""
    asked_s: float
    """How long before the loss it was asked to [s]."""
    left_s: float
    """How long before the loss its last step ended [s]."""
    steps: int
    """Steps that ended between the request and the group's end."""
    step_s: float
    """Usual time of a step [s]."""
    steps_lost: int

    @property
    def broken(self) -> str:
        """What was promised and did not hold; empty if all did: no step is lost, and the group is asked to leave within a step,
        and a look, of the last moment."""
        if self.steps_lost:
            return f"a notice cost {self.steps_lost} steps"
        if abs(self.asked_s - self.margin_s) > self.step_s + _LOOKS_S:
            return f"node {self.node} was left {self.asked_s:.1f} s before its loss, {self.margin_s:.1f} s would do"
        return ""

    def describe(self) -> str:
        """Return it as a line of text."""
        last = f"{self.steps} steps later the last one ends, {self.left_s:.2f} s before it"
        asked = f"asked to leave {self.asked_s:.2f} s before the loss, measured margin {self.margin_s:.2f} s"
        return f"notice of {self.notice_s:g} s: {asked}; {last}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class HangFound:
    """How a worker that had stopped was found."""

    node: str
    """The first 8 characters of its node's id."""
    found_s: float
    """From the group's last step until it was ended [s]."""
    limit_s: float
    """How long that may take [s]."""
    named: bool
    """Whether it was told which rank the others wait for."""
    steps_lost: int

    @property
    def broken(self) -> str:
        """What was promised and did not hold; empty if all did: it is found by what the others do, and in time."""
        if not self.named:
            return f"nobody said that the others wait for node {self.node}"
        if self.found_s > self.limit_s:
            return f"the hang of node {self.node} was found after {self.found_s:.1f} s, not {self.limit_s:.1f} s"
        return ""

    def describe(self) -> str:
        """Return it as a line of text."""
        how = "named by what the others do" if self.named else "NOT NAMED"
        found = f"found {self.found_s:.2f} s after the last step, limit {self.limit_s:.2f} s"
        return f"hang: {found}; {how}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class CopiesLost:
    """How a run went on that lost a part of its newest snapshot with all copies of that part."""

    resumed_from: str
    steps_lost: int

    @property
    def broken(self) -> str:
        """What was promised and did not hold; empty if all did: the devices that stay hold the state after the last step."""
        if not self.resumed_from.startswith(_LIVE) or self.steps_lost:
            return f"the loss of all copies was answered from {self.resumed_from}, with {self.steps_lost} steps lost"
        return ""

    def describe(self) -> str:
        """Return it as a line of text."""
        return f"all copies of a snapshot lost: resumed from {self.resumed_from}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class NotSeen:
    """An act to which the run shows no answer."""

    act: str
    node: str
    """The first 8 characters of its id."""

    @property
    def broken(self) -> str:
        """That there was none: a drill that hits a node without a worker shows nothing."""
        return f"the run shows no answer to {self.act} of node {self.node}"

    def describe(self) -> str:
        """Return it as a line of text."""
        return f"{self.act}: no answer"


Kept = NoticeKept | HangFound | CopiesLost | NotSeen


def kept_of(events: Sequence[Event], done: Sequence[ActDone], reserve_s: float, live: bool = False) -> tuple[Kept, ...]:
    """Return what became of each notice, each hang, and each loss of all copies.

    Args:
        events: of the drilled run, as its journal has them.
        done: what was done to its nodes.
        reserve_s: as elastic.reserve.
        live: whether each worker has the whole state on its device, so that a loss of all copies costs nothing.
    """
    ordered = sorted(events, key=lambda event: event.time_s)
    found: list[Kept] = []
    for act in done:
        if act.what == "drain":
            found.append(next(_notice(ordered, act, reserve_s), NotSeen(act.what, act.node)))
        elif act.what == "hang":
            found.append(next(_hang(ordered, act), NotSeen(act.what, act.node)))
    lost = [act for act in done if act.what == "kill-copies"]
    if lost and live:
        found.append(next(_copies(ordered, lost[-1].time_s), NotSeen(lost[-1].what, lost[-1].node)))
    return tuple(found)


def _notice(events: Sequence[Event], act: ActDone, reserve_s: float) -> Iterator[NoticeKept]:
    history, lost_s = RunHistory(0), act.time_s + act.notice_s
    for place, event in enumerate(events):
        if event.time_s > act.time_s and _leaves(event, act.node):
            forecast = history.prospects()
            later = events[place:]
            end = next((number for number, one in enumerate(later) if isinstance(one, Left | Started)), len(later))
            last = [one for one in later[:end] if isinstance(one, StepDone)]
            last_s = last[-1].time_s if last else event.time_s
            yield NoticeKept(
                node=act.node,
                notice_s=act.notice_s,
                margin_s=round(forecast.leaving_s(reserve_s, durable=False), 3),
                asked_s=round(lost_s - event.time_s, 3),
                left_s=round(lost_s - last_s, 3),
                steps=len(last),
                step_s=round(forecast.step_s, 4),
                steps_lost=_lost(events, event.time_s),
            )
            return
        history.add(record(event))


def _leaves(event: Event, node: str) -> bool:
    return (
        isinstance(event, Decided)
        and event.decision == "leave"
        and event.reason.startswith("notice: ")
        and node in event.reason
    )


def _hang(events: Sequence[Event], act: ActDone) -> Iterator[HangFound]:
    history, last_s = RunHistory(0), act.time_s
    for event in events:
        if event.time_s > act.time_s and isinstance(event, Failed) and event.cause == "hung":
            yield HangFound(
                node=act.node,
                found_s=round(event.time_s - last_s, 3),
                limit_s=round(found_by_s(history.prospects().step_s), 3),
                named="all other ranks wait for" in event.reason,
                steps_lost=_lost(events, event.time_s),
            )
            return
        if isinstance(event, StepDone):
            last_s = event.time_s
        history.add(record(event))


def _copies(events: Sequence[Event], lost_s: float) -> Iterator[CopiesLost]:
    for event in events:
        if event.time_s > lost_s and isinstance(event, Started):
            yield CopiesLost(event.resumed_from, _lost(events, lost_s))
            return


def _lost(events: Sequence[Event], since_s: float) -> int:
    """Return how many steps the first group that starts since then trains again."""
    done = 0
    for event in events:
        if isinstance(event, StepDone):
            done = event.step
        elif isinstance(event, Started) and event.time_s > since_s:
            return max(0, done - event.step)
    return 0
