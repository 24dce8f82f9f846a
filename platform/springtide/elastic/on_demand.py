"""Decide which on-demand nodes a run orders and gives back, so that it meets its deadline: ``market.py`` for a real cluster.

    nodes with their markets, steps done, measured times --Deadline, Rented--> uniform_progress --> an order

    wanted > rented     the order grows: Ray's autoscaler starts nodes for it
    wanted < rented     first what has not come is cancelled, then whole nodes are given back: the group leaves them, as at a
                        notice. The order shrinks at once: Ray ends no node that is in use, but would replace one that leaves

A run gives back no more than it has ordered: nodes that are there anyway count as spot nodes do, whatever their market.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from springtide.elastic.evenness import speed
from springtide.elastic.forecast import RestartForecast
from springtide.elastic.market import Deadline, Rented, Rule, uniform_progress
from springtide.elastic.policy import Bounds

ORDER_S = 180.0
"""Assumed time from an order until a worker on its node is ready, until one is measured [s]."""
_LEAST_STEPS = 3
"""Steps of a group that are measured before their time counts: the first one may compile."""


class MarketNode(NamedTuple):
    """A node that a run may use."""

    id: str
    places: int
    """Number of workers that fit on it."""
    on_demand: bool
    """Whether its market label says that it is an on-demand node."""
    in_group: bool = False
    """Whether the group that trains is on it."""


class Order(NamedTuple):
    """What a run asks of the autoscaler, and the nodes that it gives back."""

    workers: int
    """Workers to have on demand."""
    give_back: tuple[str, ...]
    reason: str


class OnDemandPlan(NamedTuple):
    """A run with a deadline."""

    num_steps: int
    """Its last step."""
    first_step: int
    """Steps that were done when it began."""
    begun_s: float
    """When it was first started [s]."""
    until_s: float
    """When its last step must be done, on the same clock [s]."""

    def deadline(self, step_work: float, bounds: Bounds, costs: RestartForecast, order_s: float) -> Deadline:
        """Return the plan in units of work.

        Args:
            step_work: work of a step [worker-seconds].
            bounds: limits of the run's workers.
            costs: measured times of the run.
            order_s: time from an order until a worker on its node is ready [s].

        Examples:
            >>> plan = OnDemandPlan(num_steps=100, first_step=20, begun_s=1000.0, until_s=4600.0)
            >>> plan.deadline(30.0, Bounds(1, 9, worker_multiple=2), RestartForecast(restart_s=5.0, step_s=4.0), order_s=60.0)
            Deadline(work=2400.0, deadline_s=3600.0, workers=8, change_s=65.0, loss_s=13.0, lanes=0)
        """
        loss_s = costs.restart_s + (2 * costs.step_s if costs.step_s < math.inf else 0.0)
        most = max(1, bounds.max_workers - bounds.max_workers % bounds.worker_multiple)
        return Deadline(
            (self.num_steps - self.first_step) * step_work,
            self.until_s - self.begun_s,
            most,
            order_s + costs.restart_s,
            loss_s,
            bounds.lanes,
        )

    def done(self, step: int, step_work: float) -> float:
        """Return the work that is done after ``step`` [worker-seconds]."""
        return max(0, step - self.first_step) * step_work


class StepWork:
    """The work of a step, as the groups of a run have measured it.

    >>> work = StepWork(lanes=12)
    >>> work.measure(steps=2, step_s=3.0, workers=8), work.measure(steps=3, step_s=3.0, workers=8)
    (None, 18.0)
    """

    def __init__(self, lanes: int = 0) -> None:
        """``lanes``: as ``policy.Bounds`` has them."""
        self._lanes = lanes
        self.newest: float | None = None
        """Work of a step; None until one is measured [worker-seconds]."""

    def measure(self, steps: int, step_s: float, workers: int) -> float | None:
        """Take the time of a step of a group of ``workers`` that has done ``steps``; return ``newest``."""
        if steps >= _LEAST_STEPS and workers and 0 < step_s < math.inf:
            self.newest = step_s * speed(self._lanes, workers)
        return self.newest


@dataclasses.dataclass
class OrderBook:
    """What a run has ordered."""

    workers: int = 0
    """Workers that it asks the autoscaler for on demand."""
    owed: int = 0
    """Workers that it has ever ordered, less those on nodes that it has given back: most that it may give back."""

    def mine(self, nodes: Iterable[MarketNode]) -> list[MarketNode]:
        """Return the on-demand nodes of ``nodes`` that count as ordered, those of the group first. The last of them may have
        more places than were ordered."""
        found, left = [], self.owed
        for node in sorted(nodes, key=lambda node: (not node.in_group, node.places, node.id)):
            if node.on_demand and node.places and left > 0:
                found.append(node)
                left -= node.places
        return found

    def decide(
        self,
        deadline: Deadline,
        nodes: Sequence[MarketNode],
        done: float,
        now: float,
        multiple: int = 1,
        rule: Rule = uniform_progress,
    ) -> Order:
        """Decide what to order and what to give back, and note it.

        Args:
            deadline: the work, and when it must be done.
            nodes: those that stay and that the run may use.
            done: work that is done [worker-seconds].
            now: time since the start of the run [s].
            multiple: workers come in multiples of this.
            rule: how many on-demand workers to have.

        Examples:
            >>> book, plan = OrderBook(), Deadline(8 * 36000.0, 72000.0, workers=8, change_s=300.0)
            >>> spot = [MarketNode("a", 1, False)]
            >>> book.decide(plan, spot, done=130000.0, now=36000.0)
            Order(workers=4, give_back=(), reason='3500 s behind: needs 4.4 workers on average')
            >>> here = [*spot, MarketNode("b", 2, True, in_group=True), MarketNode("c", 1, True)]
            >>> book.decide(plan, here, done=200000.0, now=36000.0)
            Order(workers=2, give_back=('c',), reason='14000 s ahead of an even pace of 4.0 workers')
        """
        here = self.mine(nodes)
        owned = sum(node.places for node in here)
        rented = Rented(sum(node.places for node in nodes) - owned, max(self.workers, owned))
        rental = rule(deadline, rented, done, now)
        wanted = rental.on_demand
        if wanted and (left := (rented.spot + wanted) % multiple):
            wanted += min(multiple - left, max(0, deadline.workers - rented.spot - wanted))
        given: tuple[str, ...] = ()
        if wanted < rented.on_demand:
            surplus = owned - wanted
            for node in reversed(here):  # those outside the group first, of the others the largest
                if node.places <= surplus:
                    given += (node.id,)
                    surplus -= node.places
            wanted += max(0, surplus)
        self._note(max(0, wanted), sum(node.places for node in here if node.id in given))
        return Order(self.workers, given, rental.reason)

    def first(self, nodes: Sequence[MarketNode], workers: int) -> Order:
        """Order what lacks to ``workers``: no step has been measured yet, and one must be before anything can be planned."""
        lacking = workers - sum(node.places for node in nodes)
        self._note(max(self.workers, lacking), 0)
        return Order(self.workers, (), f"no step has been measured yet, and {workers} workers measure one")

    def cancel(self) -> None:
        """Order nothing."""
        self.workers = 0

    def _note(self, workers: int, given: int) -> None:
        self.owed = max(0, self.owed + max(0, workers - self.workers) - given)
        self.workers = workers


class Outlook(NamedTuple):
    """Whether a deadline can be met with on-demand nodes from now on."""

    finish_s: float
    """When the run would be done, from its start [s]."""
    can_be_met: bool
    dollars: float
    """What that costs from now on [dollars]."""
    workers: int = 0
    """Most workers with which it could be met; 0 if it can be met, or with no number of workers."""
    workers_dollars: float = 0.0
    """What that costs from now on [dollars]."""


def outlook(deadline: Deadline, here: int, done: float, now: float, price: float) -> Outlook:
    """Return what the fastest way to the end would take: the whole group, on demand where nodes are missing.

    Args:
        deadline: the work, and when it must be done.
        here: workers that train or can.
        done: work that is done [worker-seconds].
        now: time since the start of the run [s].
        price: of a worker on demand [dollars/hour].

    Examples:
        >>> plan = Deadline(8 * 36000.0, 36000.0, workers=8, change_s=300.0)
        >>> outlook(plan, here=8, done=144000.0, now=18000.0, price=1.0)
        Outlook(finish_s=36000.0, can_be_met=True, dollars=40.0, workers=0, workers_dollars=0.0)
        >>> late = outlook(plan, here=4, done=100800.0, now=18000.0, price=1.0)
        >>> late.finish_s, late.can_be_met, late.workers
        (41550.0, False, 11)
    """
    left = max(0.0, deadline.work - done)
    fastest, change_s = speed(deadline.lanes, deadline.workers), deadline.change_s if here < deadline.workers else 0.0
    meanwhile = change_s * speed(deadline.lanes, here) if here else 0.0
    takes_s = change_s + max(0.0, left - meanwhile) / fastest
    finish_s = now + takes_s
    dollars = takes_s * deadline.workers * price / 3600
    if finish_s <= deadline.deadline_s:
        return Outlook(finish_s, True, dollars)
    more_s = deadline.deadline_s - now - deadline.change_s
    needed = math.ceil(max(0.0, left - meanwhile) / more_s) if more_s > 0 else 0
    while needed and deadline.lanes and speed(deadline.lanes, needed) * more_s < left - meanwhile:
        needed = needed + 1 if needed < deadline.lanes else 0
    hours = (deadline.deadline_s - now) / 3600
    return Outlook(finish_s, False, dollars, needed, needed * hours * price)
