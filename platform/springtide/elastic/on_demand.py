"""Decide which on-demand nodes a run orders and gives back to meet its deadline, by the rules of ``market.py``.

    nodes (spot or on-demand), steps done, measured times --Deadline, Rented--> uniform_progress --> an order

    wanted > rented     the order grows, and Ray's autoscaler starts nodes for it
    wanted < rented     first cancel the orders whose nodes have not joined. Then give back whole nodes: the worker group leaves
                        them as if a notice of their loss had come. The order shrinks at once, so that Ray does not replace
                        these nodes. Ray ends a node only when nothing runs on it

A run gives back at most as many workers as it has ordered. On-demand nodes that it did not order count as spot nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from springtide.elastic.forecast import RestartForecast
from springtide.elastic.group_sizes import speed
from springtide.elastic.market import Deadline, Rented, Rule, uniform_progress
from springtide.elastic.policy import Bounds

ORDER_S = 180.0
"""Time from an order until a worker on the new node is ready, assumed until the run has measured it [s]."""
_LEAST_STEPS = 3
"""The step time of a group is used only after this many steps, because the first step may compile."""


class MarketNode(NamedTuple):
    """A node that a run may use, with its market: spot or on-demand."""

    id: str
    places: int
    """Number of workers that fit on the node."""
    on_demand: bool
    """Whether the node's market label says on-demand."""
    in_group: bool = False
    """Whether the group that trains has workers on the node."""


class Order(NamedTuple):
    """Number of on-demand workers that a run requests from the autoscaler, and the nodes that it gives back."""

    workers: int
    """Workers to request on on-demand nodes, including workers that are running there."""
    give_back: tuple[str, ...]
    reason: str


class OnDemandPlan(NamedTuple):
    """The steps of a run, and the deadline for its last step."""

    num_steps: int
    """Number of the last step of the run."""
    first_step: int
    """Number of steps that were already done when the run began."""
    begun_s: float
    """When the run was first started [s]."""
    until_s: float
    """When the last step must be done, by the same clock as ``begun_s`` [s]."""

    def deadline(self, step_work: float, bounds: Bounds, costs: RestartForecast, order_s: float) -> Deadline:
        """Return the run's work and deadline, in worker-seconds and in seconds since the start of the run.

        Args:
            step_work: work of a step [worker-seconds].
            bounds: limits of the number of the run's workers.
            costs: measured times of the run's steps and restarts.
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
        """Return the work that the run has done when ``step`` is done [worker-seconds]."""
        return max(0, step - self.first_step) * step_work


class StepWork:
    """Work of a step, measured by a run's worker groups: step time times speed, where one worker that never waits has speed 1
    [worker-seconds].

    >>> work = StepWork(lanes=12)
    >>> work.measure(steps=2, step_s=3.0, workers=8), work.measure(steps=3, step_s=3.0, workers=8)
    (None, 18.0)
    """

    def __init__(self, lanes: int = 0) -> None:
        """``lanes``: number of lanes (fixed shares of a batch), as in ``policy.Bounds``; 0: no lanes."""
        self._lanes = lanes
        self.newest: float | None = None
        """Work of a step; None until one is measured [worker-seconds]."""

    def measure(self, steps: int, step_s: float, workers: int) -> float | None:
        """Record the step time of a group of ``workers`` that has done ``steps`` steps. Return the work of a step
        [worker-seconds]; None before the first group with ``_LEAST_STEPS`` steps."""
        if steps >= _LEAST_STEPS and workers and 0 < step_s < math.inf:
            self.newest = step_s * speed(self._lanes, workers)
        return self.newest


@dataclasses.dataclass
class OrderBook:
    """The on-demand workers that a run has ordered."""

    workers: int = 0
    """Workers that the run now requests from the autoscaler on on-demand nodes."""
    owed: int = 0
    """Workers ordered so far, less the workers on nodes given back. The run may give back at most this many."""

    def mine(self, nodes: Iterable[MarketNode]) -> list[MarketNode]:
        """Return the on-demand nodes among ``nodes`` that count as ordered by this run. Nodes of the run's worker group come
        first. Nodes are added until there is room for ``owed`` workers (ordered and not given back), so the last node may have
        room for more workers than were ordered."""
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
        """Decide how many on-demand workers to order and which nodes to give back, and record the decision.

        Args:
            deadline: the work, and when it must be done.
            nodes: the nodes that the run may use, without nodes that have a notice of their loss.
            done: work that is done [worker-seconds].
            now: time since the start of the run [s].
            multiple: the number of workers must be a multiple of this.
            rule: function that decides how many on-demand workers to have.

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
            for node in reversed(here):  # first nodes without workers of the group, then the group's largest nodes
                if node.places <= surplus:
                    given += (node.id,)
                    surplus -= node.places
            wanted += max(0, surplus)  # nodes are given back whole, so the rest of the surplus stays ordered
        self._note(max(0, wanted), sum(node.places for node in here if node.id in given))
        return Order(self.workers, given, rental.reason)

    def first(self, nodes: Sequence[MarketNode], workers: int) -> Order:
        """Order the on-demand workers that a group of ``workers`` lacks, before the run's first step. ``decide`` cannot be used
        yet, because it needs the measured time of a step."""
        lacking = workers - sum(node.places for node in nodes)
        self._note(max(self.workers, lacking), 0)
        return Order(self.workers, (), f"no step has been measured yet, and {workers} workers measure one")

    def cancel(self) -> None:
        """Withdraw the request for on-demand workers."""
        self.workers = 0

    def _note(self, workers: int, given: int) -> None:
        self.owed = max(0, self.owed + max(0, workers - self.workers) - given)
        self.workers = workers


class Outlook(NamedTuple):
    """Whether a run can meet its deadline with on-demand nodes from now on, and the cost."""

    finish_s: float
    """When the run would be done, in seconds since its start [s]."""
    can_be_met: bool
    dollars: float
    """Cost from now until the run is done [dollars]."""
    workers: int = 0
    """If the deadline cannot be met: the number of workers that would meet it, or 0 if no number would. Else 0."""
    workers_dollars: float = 0.0
    """Cost of ``workers`` workers from now until the deadline [dollars]."""


def outlook(deadline: Deadline, here: int, done: float, now: float, price: float) -> Outlook:
    """Forecast when the run is done, and its cost, if it trains from now on with the largest group. On-demand nodes take the
    place of missing workers.

    Args:
        deadline: the work, and when it must be done.
        here: number of workers that fit on the nodes that exist now.
        done: work that is done [worker-seconds].
        now: time since the start of the run [s].
        price: price of an on-demand worker [dollars/hour].

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
    # work that the current workers do until the on-demand nodes train
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
