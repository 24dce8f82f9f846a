"""Which faults are crossed with which fault points, and the table of what they cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

from fault_points.watch import name_of
from springtide.errors import ConfigError, explain
from springtide.events import Event, Started, StepDone
from springtide.faults import POINTS, Point, When

Fault = Literal["kill", "notice", "stop", "halt", "store"]

PROMISED: dict[Fault, int] = {"kill": 2, "notice": 0, "stop": 2, "halt": 2, "store": 0}
"""Steps that a fault may cost: a loss the step under way and the one whose copy was on its way, what is announced none."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault at a point."""

    point: Point
    when: When
    fault: Fault

    @property
    def name(self) -> str:
        """As ``restore-before-kill``."""
        return f"{name_of(self.point, self.when)}-{self.fault}"


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What a fault at a point cost."""

    case: Case
    held: bool
    """Whether training went on and cost no more steps than promised."""
    gap_s: float
    """Longest time without a step, from the trigger to the end of the case [s]."""
    steps_lost: int
    """Steps that were trained again, those of the trigger included."""
    remark: str
    """Where the fault hit, and what went wrong if anything did."""

    def __str__(self) -> str:
        result = "held" if self.held else "NOT HELD"
        return f"{self.case.name:32}  {result:8}  {self.gap_s:6.1f} s  {self.steps_lost:2} steps lost  {self.remark}"


@dataclasses.dataclass(frozen=True)
class CrossingResult:
    """What faults at the fault points cost."""

    cases: tuple[CaseResult, ...]
    passed: tuple[str, ...]
    """Names of the points that were passed."""
    verified: bool
    """Whether every run trained on the samples of its order; see ``run.verify``."""
    leftovers: dict[str, int]
    """Actors and placement groups that the runs left in the cluster, by name."""

    @property
    def ok(self) -> bool:
        """Whether every case held, and nothing was left."""
        return all(one.held for one in self.cases) and self.verified and not self.leftovers

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``--json`` prints it."""
        return {
            "ok": self.ok,
            "cases": len(self.cases),
            "held": sum(one.held for one in self.cases),
            "steps_lost_max": max((one.steps_lost for one in self.cases), default=0),
            "gap_s_max": round(max((one.gap_s for one in self.cases), default=0.0), 2),
            "table": [{"name": one.case.name, **_plain(one)} for one in self.cases],
            "passed": list(self.passed),
            "verified": self.verified,
            "leftovers": self.leftovers,
        }

    def describe(self) -> str:
        """Return the result as text: a line a case, and a summary."""
        found = self.as_dict()
        kept = "verified" if self.verified else "NOT VERIFIED"
        left = f", LEFT BEHIND: {self.leftovers}" if self.leftovers else ", nothing left behind"
        total = f"{found['held']} of {found['cases']} cases held; at most {found['steps_lost_max']} steps lost"
        rows = [str(one) for one in self.cases]
        return "\n".join([*rows, f"{total} and {found['gap_s_max']:.1f} s without a step; {kept}{left}"])


def cases_of(only: str = "") -> list[Case]:
    """Return the cases, those whose name contains one of the parts of ``only``, which commas separate. Raises ConfigError if
    there is none.

    >>> [case.name for case in cases_of("restore-before-kill,commit-after-s")]
    ['restore-before-kill', 'commit-after-stop', 'commit-after-store']
    """
    every = [Case(point, when, fault) for point in POINTS for when in get_args(When) for fault in get_args(Fault)]
    parts = [part.strip() for part in only.split(",") if part.strip()] or [""]
    found = [case for case in every if any(part in case.name for part in parts)]
    if not found:
        names = "a part of a name POINT-WHEN-FAULT, as restore-before-kill"
        raise ConfigError(explain("--only", only, "is in the name of no case", f"give {names}"))
    return found


def steps_lost(events: Sequence[Event], first: int) -> int:
    """Return how many steps were trained again, as told by ``events[first:]``."""
    done = lost = 0
    for place, event in enumerate(events):
        if isinstance(event, StepDone):
            done = event.step
        elif isinstance(event, Started):
            lost += max(0, done - event.step) * (place >= first)
            done = event.step
    return lost


def longest_gap_s(events: Sequence[Event], begin_s: float, end_s: float) -> float:
    """Return the longest time without a step between two times, in seconds since 1970 [s]."""
    times = [begin_s, *(event.time_s for event in events if isinstance(event, StepDone)), end_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def _plain(result: CaseResult) -> dict[str, Any]:
    """Return a row of the table as plain data, without the case itself."""
    return {key: value for key, value in dataclasses.asdict(result).items() if key != "case"}
