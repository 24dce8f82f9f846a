"""Simulate a run with a deadline on spot nodes, which come and go as a record says, and on-demand nodes, which it orders.

    record of spot capacity --> nodes --decide()--> groups that train --> work done --market.py--> on-demand nodes

An on-demand node comes a fixed time after its order and stays until it is given back. Its group leaves it as at a notice.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from springtide.elastic.market import Deadline, Rented, Rule
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import SOON_S, Costs, Simulation
from springtide.elastic.traces import Trace

_LOOK_S = 60.0
"""Least time between two looks at the progress, if no node joins or goes [s]."""
_ON_DEMAND = "on-demand-"
"""How the names of on-demand nodes begin; no node of a record may have such a name."""


class MarketOutcome(NamedTuple):
    """What a run with a deadline took."""

    finish_s: float
    """When its work was done; infinite if it was not done when the record ended [s]."""
    spot_s: float
    """Time that spot nodes were rented [node-seconds]."""
    on_demand_s: float
    """Time that on-demand nodes were rented, from the order on [node-seconds]."""
    restarts: int
    orders: int
    """On-demand nodes that were ordered."""


class MarketSimulation(Simulation):
    """A simulation of one run with a deadline."""

    def __init__(self, trace: Trace, bounds: Bounds, costs: Costs, plan: Deadline, rule: Rule, order_s: float) -> None:
        """``order_s``: time from the order of an on-demand node until it is there [s]."""
        super().__init__(trace, bounds, costs, {})
        self._plan, self._rule, self._order_s = plan, rule, order_s
        self._starting: dict[str, float] = {}
        """On-demand node that has been ordered -> when it is there [s]."""
        self._owned: dict[str, bool] = {}
        """On-demand node that is there -> whether it is to stay."""
        self._spot_s = self._on_demand_s = 0.0
        self._orders = 0

    def outcome_of_run(self) -> MarketOutcome:
        """Simulate until the work is done, or to the end of the record."""
        found = self.run()
        finish_s = self._now if self._left <= 0 else math.inf
        return MarketOutcome(finish_s, self._spot_s, self._on_demand_s, found.restarts, self._orders)

    @property
    def _left(self) -> float:
        """Work that is left, but for what rounding leaves of it [worker-seconds]."""
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
        """Order and give back on-demand nodes. Returns when to look again, or when the work is done [s]."""
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
        """Have the group leave a node; one on which it does not train goes at once."""
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
        spot = min(here, max(0, self._plan.workers - sum(self._owned.values())))  # what it cannot use it does not rent
        super()._pass(until_s)
        self._spot_s += spot * (self._now - before_s)
        self._on_demand_s += (len(self._owned) + len(self._starting)) * (self._now - before_s)


def simulate_market(
    trace: Trace, bounds: Bounds, costs: Costs, plan: Deadline, rule: Rule, order_s: float
) -> MarketOutcome:
    """Simulate a run with a deadline. ``trace``: when spot nodes are there; ``order_s``: time from the order of an on-demand
    node until it is there [s]."""
    return MarketSimulation(trace, bounds, costs, plan, rule, order_s).outcome_of_run()


def without_spot(trace: Trace) -> Trace:
    """Return a record of the same length without spot nodes."""
    return dataclasses.replace(trace, changes=())
