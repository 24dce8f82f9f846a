"""Decide how many on-demand nodes a run rents in addition to spot nodes, so that it meets a deadline at a low price.

    lead over an even pace from the start to the deadline, slack -> number of on-demand nodes, with the reason

    behind the even pace              have as many on-demand nodes as the remaining work needs on average
    ahead of the even pace            order none: the lead covers times without spot capacity. Keep the existing on-demand nodes
                                      that the even pace needs, so that nodes are not given back and ordered again
    ahead by two changeovers          have one on-demand node less, so that the lead is used up slowly
    slack of two changeovers left     have an on-demand node for every missing worker until the end, also after spot losses

Slack is the time for which the whole group could be idle and the run still meet its deadline. A changeover is the time from
the order of an on-demand node until the group trains on it. All times are seconds since the start of the run.
Source: "uniform progress" of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). The
paper has one node; here a group may have spot and on-demand nodes at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from springtide.elastic.group_sizes import speed
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import SOON_S, Costs, Simulation
from springtide.elastic.traces import Trace

_CHANGEOVERS = 2.0
"""Two margins [changeovers]: the run keeps this much time spare before the deadline, and gives an on-demand node back once it
is this far ahead of an even pace. A changeover is the time from the order of a node until the group trains on it."""


class Deadline(NamedTuple):
    """The training work of a run, and when it must be done."""

    work: float
    """Training that the run needs [worker-seconds]."""
    deadline_s: float
    """When the work must be done [s]."""
    workers: int
    """Largest number of workers of the group, one per node."""
    change_s: float
    """Time from the order of an on-demand node until the group trains on it [s]."""
    loss_s: float = 0.0
    """Training time that the loss of a spot node costs: a restart, and steps that are computed again [s]."""
    lanes: int = 0
    """Number of lanes, the fixed shares into which a batch is divided, as in ``policy.Bounds``; 0: no lanes."""

    def slack_s(self, done: float, now: float) -> float:
        """Return how long the whole group could be idle and still meet the deadline, if ``done`` worker-seconds of work are
        done at time ``now`` [s]."""
        return self.deadline_s - now - (self.work - done) / speed(self.lanes, self.workers)

    def workers_for(self, pace: float) -> int:
        """Return the smallest number of workers with at least the speed ``pace``, in units of one worker that never waits. If
        no allowed number is fast enough, return the largest allowed number."""
        sizes = range(max(1, math.ceil(pace)), self.workers)
        return next((size for size in sizes if speed(self.lanes, size) >= pace), self.workers)


class Rented(NamedTuple):
    """Number of nodes that a run has or has ordered: spot and on-demand."""

    spot: int
    """Number of spot nodes without a notice that they will be taken away."""
    on_demand: int
    """Number of on-demand nodes, including ordered nodes that are still starting."""


class Rental(NamedTuple):
    """A decision: how many on-demand nodes the run should have, with the reason."""

    on_demand: int
    reason: str


Rule = Callable[[Deadline, Rented, float, float], Rental]
"""A function that decides how many on-demand nodes a run should have: (plan, rented, done, now) -> rental."""


def uniform_progress(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Decide how many on-demand nodes a run should have now, so that its work progresses evenly until the deadline. The run
    uses all spot nodes that it gets, because they cost less.

    Args:
        plan: the work, and when it must be done.
        rented: the nodes that the run has or has ordered.
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
    """Use only spot nodes until the slack (spare time before the deadline) is used up. Then have an on-demand node for every
    missing worker. "Can't Be Late" calls this rule greedy; it is here for comparison. The arguments are those of
    ``uniform_progress``.

    Examples:
        >>> plan = Deadline(work=8 * 36000.0, deadline_s=72000.0, workers=8, change_s=300.0)
        >>> until_the_last(plan, Rented(spot=1, on_demand=0), done=130000.0, now=36000.0).on_demand
        0
    """
    if (slack_s := plan.slack_s(done, now)) < _least_slack_s(plan, rented):
        return _all(plan, rented, slack_s)
    return Rental(0, f"slack of {slack_s:.0f} s: spot nodes only")


def always_full(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Use an on-demand node wherever a spot node is missing, whatever the deadline. The rule is for comparison; its arguments
    are those of ``uniform_progress``.

    Examples:
        >>> plan = Deadline(work=8 * 36000.0, deadline_s=72000.0, workers=8, change_s=300.0)
        >>> always_full(plan, Rented(spot=3, on_demand=0), done=0.0, now=0.0).on_demand
        5
    """
    return Rental(max(0, plan.workers - rented.spot), f"{rented.spot} spot nodes of {plan.workers}")


def never(plan: Deadline, rented: Rented, done: float, now: float) -> Rental:
    """Use spot nodes only, whatever the deadline. The rule is for comparison; its arguments are those of ``uniform_progress``.

    Examples:
        >>> never(Deadline(work=36000.0, deadline_s=72000.0, workers=8, change_s=300.0), Rented(0, 0), 0.0, 70000.0).on_demand
        0
    """
    return Rental(0, "spot nodes only")


def _least_slack_s(plan: Deadline, rented: Rented) -> float:
    return _CHANGEOVERS * plan.change_s + rented.spot * plan.loss_s


def _all(plan: Deadline, rented: Rented, slack_s: float) -> Rental:
    """Return the decision to have an on-demand node for every missing worker. When a spot node joins, no on-demand node is
    given back, because the spot node may be lost again."""
    number = max(plan.workers - rented.spot, min(rented.on_demand, plan.workers), 0)
    return Rental(number, f"slack of {slack_s:.0f} s: all {plan.workers} workers are needed")


# Simulate a run with a deadline on recorded spot nodes and on on-demand nodes that the run orders.
#
# record of spot capacity --> nodes --decide()--> groups that train --> work done --market.py--> on-demand nodes
#
# An on-demand node joins a fixed time after its order and stays until the run gives it back. Before a node is given back, the
# group stops using it, as it does after a notice that a spot node will be taken away.

_LOOK_S = 60.0
"""Minimum time between two decisions about on-demand nodes, if no node joins or leaves [s]."""
_ON_DEMAND = "on-demand-"
"""Prefix of the names of simulated on-demand nodes; no spot node in the record may have this prefix."""


class MarketOutcome(NamedTuple):
    """End time, rented nodes and restarts of a run with a deadline."""

    finish_s: float
    """When the run's work was done; infinite if the record of spot nodes ended before that [s]."""
    spot_s: float
    """Time that spot nodes were rented [node-seconds]."""
    on_demand_s: float
    """Time that on-demand nodes were rented, counted from the order [node-seconds]."""
    restarts: int
    orders: int
    """Number of on-demand nodes that were ordered during the run."""


class MarketSimulation(Simulation):
    """A simulation of one run with a deadline, on recorded spot nodes and on on-demand nodes that it orders."""

    def __init__(self, trace: Trace, bounds: Bounds, costs: Costs, plan: Deadline, rule: Rule, order_s: float) -> None:
        """``order_s``: time from the order of an on-demand node until it joins [s]."""
        super().__init__(trace, bounds, costs, {})
        self._plan, self._rule, self._order_s = plan, rule, order_s
        self._starting: dict[str, float] = {}
        """On-demand node that has been ordered -> when it joins [s]."""
        self._owned: dict[str, bool] = {}
        """On-demand node that has joined -> whether the run keeps it; False once the node is being given back."""
        self._spot_s = self._on_demand_s = 0.0
        self._orders = 0

    def outcome_of_run(self) -> MarketOutcome:
        """Simulate the run until its work is done, or to the end of the record of spot nodes."""
        found = self.run()
        finish_s = self._now if self._left <= 0 else math.inf
        return MarketOutcome(finish_s, self._spot_s, self._on_demand_s, found.restarts, self._orders)

    @property
    def _left(self) -> float:
        """Work of the run that is not done yet, less a tolerance for rounding errors [worker-seconds]."""
        return self._plan.work - self.outcome.productive - SOON_S * self._plan.workers

    @property
    def _left_s(self) -> float:
        return max(0.0, self._left) / max(1, len(self._group.nodes) if self._group else self._plan.workers)

    def _change(self, what: str, nodes: Sequence[str]) -> list[str]:
        for node in nodes:
            if what == "go":
                self._owned.pop(node, None)
            elif node in self._starting:
                del self._starting[node]
                self._owned[node] = True
        return super()._change(what, nodes)

    def _look(self) -> float:
        """Order or give back on-demand nodes. Return when to decide about them again, or when the run's work ends [s]."""
        if self._left <= 0:
            self._end_s = self._now
            return self._now
        staying = [node for node, stays in self._owned.items() if stays]
        spot = sum(node not in self._owned for node in self._nodes.usable_places)
        rented = Rented(spot, len(staying) + len(self._starting))
        wanted = self._rule(self._plan, rented, self.outcome.productive, self._now).on_demand
        if wanted > rented.on_demand:
            self._order(wanted - rented.on_demand)
        for _ in range(rented.on_demand - wanted):
            if self._starting:
                self._cancel(next(reversed(self._starting)))
            else:
                self._give_back(staying.pop())
        again_s = self._now + (SOON_S if wanted < rented.on_demand else max(_LOOK_S, self._plan.change_s / 2))
        if self._group is None or self._hung_until_s < math.inf:
            return again_s
        speed = len(self._group.nodes) * self._trains * self._even
        return min(again_s, max(self._now, self._trains_from) + (self._left + SOON_S * self._plan.workers) / speed)

    def _order(self, number: int) -> None:
        names = [f"{_ON_DEMAND}{self._orders + one}" for one in range(number)]
        self._orders += number
        self._starting |= dict.fromkeys(names, self._now + self._order_s)
        self._later(self._now + self._order_s, "join", names)

    def _cancel(self, node: str) -> None:
        del self._starting[node]
        self._events = [event for event in self._events if event[2] != (node,)]

    def _give_back(self, node: str) -> None:
        """Give back a node: at once if the group does not train on it, else after the group has left it."""
        self._owned[node] = False
        if self._group is None or node not in self._group.nodes:
            self._later(self._now, "go", [node])
            return
        leaves_s = self._now + (self._costs.leave_steps + 1) * self._step_s + self._bounds.reserve_s
        self._nodes.set(self._nodes.by_id[node]._replace(leaves_at=leaves_s))
        self._later(leaves_s, "go", [node])

    def _later(self, time_s: float, what: str, nodes: Sequence[str]) -> None:
        for node in nodes:
            bisect.insort(self._events, (time_s, what, (node,)), lo=self._next, key=lambda event: event[0])

    def _pass(self, until_s: float) -> None:
        before_s = self._now
        here = len(self._nodes.by_id) - len(self._owned)
        # spot nodes beyond the largest group are not rented, so they cost nothing
        spot = min(here, max(0, self._plan.workers - sum(self._owned.values())))
        super()._pass(until_s)
        self._spot_s += spot * (self._now - before_s)
        self._on_demand_s += (len(self._owned) + len(self._starting)) * (self._now - before_s)


def simulate_market(
    trace: Trace, bounds: Bounds, costs: Costs, plan: Deadline, rule: Rule, order_s: float
) -> MarketOutcome:
    """Simulate a run with a deadline. ``trace``: record of the spot nodes; ``order_s``: time from the order of an on-demand
    node until it joins [s]."""
    return MarketSimulation(trace, bounds, costs, plan, rule, order_s).outcome_of_run()


def without_spot(trace: Trace) -> Trace:
    """Return a trace of the same length without spot nodes, for a run on on-demand nodes only."""
    return dataclasses.replace(trace, changes=())
