"""Decide how many on-demand nodes a run rents beside spot nodes, so that it meets a deadline at a low price.

    work done, its line from the start to the deadline, slack -> number of on-demand nodes, with the reason

    behind the line                   as many on-demand nodes as keep the pace that is needed from now on
    ahead of it                       none are ordered: the lead is for times without spot capacity. Those that are there stay
                                      while the group needs them to keep the line's pace, so that they do not come and go
    a lead of two changeovers         one of them less, so that the lead is used up slowly
    slack of two changeovers left     the whole group; whatever spot node is lost is replaced on demand for good

Source: "uniform progress" of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). There
it is for one node; here a group may have nodes of both markets. All times are seconds since the start of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from springtide.elastic.evenness import speed

_CHANGEOVERS = 2.0
"""Slack to keep, and lead after which on-demand nodes go, in changeovers."""


class Deadline(NamedTuple):
    """Work, and when it must be done."""

    work: float
    """Training that the run needs [worker-seconds]."""
    deadline_s: float
    """When it must be done [s]."""
    workers: int
    """Most workers of the group, one per node."""
    change_s: float
    """A changeover: from the order of an on-demand node until the group trains on it [s]."""
    loss_s: float = 0.0
    """Training time that the group loses with a spot node: a restart, and steps that are computed again [s]."""
    lanes: int = 0
    """Parts of a step that are never divided, as ``policy.Bounds`` has them."""

    def slack_s(self, done: float, now: float) -> float:
        """Return how long the whole group could be idle and still meet the deadline, with ``done`` worker-seconds done [s]."""
        return self.deadline_s - now - (self.work - done) / speed(self.lanes, self.workers)

    def workers_for(self, pace: float) -> int:
        """Return the fewest workers that are as fast as ``pace`` workers that never idle, or the most that there may be."""
        sizes = range(max(1, math.ceil(pace)), self.workers)
        return next((size for size in sizes if speed(self.lanes, size) >= pace), self.workers)


class Rented(NamedTuple):
    """Nodes of a run, and those that it has ordered."""

    spot: int
    """Spot nodes that are not to be taken away."""
    on_demand: int
    """On-demand nodes, with those that are starting."""


class Rental(NamedTuple):
    """A decision: how many on-demand nodes the run should have."""

    on_demand: int
    reason: str


Rule = Callable[[Deadline, Rented, float, float], Rental]
"""A function such as ``uniform_progress``."""


def uniform_progress(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Decide how many on-demand nodes a run should have now, so that its work progresses evenly until the deadline. The run
    uses all spot nodes that it gets, because they cost less.

    Args:
        plan: the work, and when it must be done.
        rented: the nodes that the run has.
        done: training that is done [worker-seconds].
        now: time since the start of the run [s].

    Examples:
        >>> plan = Deadline(work=8 * 36000.0, deadline_s=72000.0, workers=8, change_s=300.0)
        >>> uniform_progress(plan, Rented(spot=0, on_demand=0), done=150000.0, now=36000.0)
        Rental(on_demand=0, reason='1500 s ahead of an even pace of 4.0 workers')
        >>> uniform_progress(plan, Rented(spot=1, on_demand=0), done=130000.0, now=36000.0)
        Rental(on_demand=4, reason='3500 s behind: needs 4.4 workers on average')
        >>> uniform_progress(plan, Rented(spot=3, on_demand=0), done=8000.0, now=36600.0)
        Rental(on_demand=5, reason='slack of 400 s: all 8 workers are needed')
    """
    if (slack_s := plan.slack_s(done, now)) < _least_slack_s(plan, rented):
        return _all(plan, rented, slack_s)
    room, pace = max(0, plan.workers - rented.spot), plan.work / plan.deadline_s
    lead_s = done / pace - now
    if lead_s < 0:
        needed = (plan.work - done) / max(1.0, plan.deadline_s - now - plan.change_s)
        enough = max(rented.on_demand, plan.workers_for(needed) - rented.spot)
        return Rental(min(room, enough), f"{-lead_s:.0f} s behind: needs {needed:.1f} workers on average")
    kept = plan.workers_for(pace) - rented.spot - (lead_s >= _CHANGEOVERS * plan.change_s)
    return Rental(max(0, min(kept, rented.on_demand)), f"{lead_s:.0f} s ahead of an even pace of {pace:.1f} workers")


def until_the_last(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Use spot nodes only until the slack is used up, and from then on the whole group. "Can't Be Late" calls this greedy; it
    is here for comparison. The arguments are those of ``uniform_progress``.

    Examples:
        >>> plan = Deadline(work=8 * 36000.0, deadline_s=72000.0, workers=8, change_s=300.0)
        >>> until_the_last(plan, Rented(spot=1, on_demand=0), done=130000.0, now=36000.0).on_demand
        0
    """
    if (slack_s := plan.slack_s(done, now)) < _least_slack_s(plan, rented):
        return _all(plan, rented, slack_s)
    return Rental(0, f"slack of {slack_s:.0f} s: spot nodes only")


def always_full(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Use an on-demand node wherever a spot node is missing, whatever the deadline, for comparison. The arguments are those of
    ``uniform_progress``.

    Examples:
        >>> plan = Deadline(work=8 * 36000.0, deadline_s=72000.0, workers=8, change_s=300.0)
        >>> always_full(plan, Rented(spot=3, on_demand=0), done=0.0, now=0.0).on_demand
        5
    """
    return Rental(max(0, plan.workers - rented.spot), f"{rented.spot} spot nodes of {plan.workers}")


def never(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Use spot nodes only, whatever the deadline, for comparison. The arguments are those of ``uniform_progress``.

    Examples:
        >>> never(Deadline(work=36000.0, deadline_s=72000.0, workers=8, change_s=300.0), Rented(0, 0), 0.0, 70000.0).on_demand
        0
    """
    return Rental(0, "spot nodes only")


def _least_slack_s(plan: Deadline, rented: Rented) -> float:
    return _CHANGEOVERS * plan.change_s + rented.spot * plan.loss_s


def _all(plan: Deadline, rented: Rented, slack_s: float) -> Rental:
    """Return as many on-demand nodes as make the group whole, and no fewer than there are: a spot node that comes now may go
    again."""
    number = max(plan.workers - rented.spot, min(rented.on_demand, plan.workers), 0)
    return Rental(number, f"slack of {slack_s:.0f} s: all {plan.workers} workers are needed")
