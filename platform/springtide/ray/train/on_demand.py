"""Order and give back on-demand nodes for a run with a deadline, as ``elastic/on_demand.py`` decides, through Ray's autoscaler.

    order: nodes with labels, progress --OrderBook--> an order --label selectors of the run's request--> Ray's coordinator
                                                         of all runs --> its autoscaler starts a node, which joins
    give back: the node is drained in Ray, as after a notice --> the group leaves it, no step lost --> the run's processes
                                                         on it are ended --> Ray ends the node

Ray's coordinator adds up the requests of all runs. With a deadline, each worker of a run's request has a label selector. It is
``ray.io/market-type: on-demand`` for the ordered workers. It is ``!on-demand`` for the others, which matches spot nodes and
nodes without the label.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import ScalingConfig

from springtide.checkpoint.branch import first_step
from springtide.checkpoint.staging import in_thread
from springtide.elastic.allocation import fits
from springtide.elastic.on_demand import ORDER_S, MarketNode, OnDemandPlan, Order, OrderBook, Outlook, StepWork, outlook
from springtide.elastic.policy import Bounds, Node
from springtide.events import DeadlineChecked, Ordered
from springtide.ray._ray_private import HEAD, MARKET_LABEL, GcsClient, GetClusterStatusReply, is_autoscaler_v2
from springtide.ray.cluster.nodes import drain
from springtide.ray.cluster.session import NAMESPACE
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress
from springtide.ray.train.process_pool import WorkerProcessPool
from springtide.ray.train.snapshot_lookup import name_prefix

ON_DEMAND = "on-demand"
"""Value of the market label for nodes that are not taken away, as in Ray's documentation."""
_Entry = Mapping[str, Any]
"""A node's entry in Ray's table of nodes."""
_LOOK_S = 1.0
_AGAIN_S = 15.0
"""Least time between two decisions while the nodes do not change [s]. Half of ``Deadline.change_s`` is used instead if it is
longer."""
_ASK_S = 5.0
"""Time between two checks that the autoscaler can provide what is requested [s]."""
_REFUSED = 2
"""The request is reduced after this many consecutive refusals by the autoscaler. A single refusal may be temporary: at first
the autoscaler still counts a node that is being ended."""
_REFUSED_S = 600.0
"""Time after which a reduced request is raised to the full one again [s]."""
_MEASURED = 3
_MANY = 2**20
_SURELY_S = 15.0
"""How long a deadline must be out of reach, or in reach again, before that is reported: first steps are slow [s]."""
_log = logging.getLogger(__name__)


class OnDemandNodes:
    """The on-demand nodes of one run with a deadline. Called in the controller's thread."""

    def __init__(self, job: TrainJob, scaling: ScalingConfig, bounds: Bounds, processes: WorkerProcessPool) -> None:
        """``scaling``: Ray's scaling config of the run. ``bounds``: the limits on the number of its workers."""
        config = job.config
        until_s = config.elastic.deadline.at_s(job.begun_s)
        self._plan = OnDemandPlan(config.num_steps, first_step(config.train), job.begun_s, until_s)
        self._job, self._processes, self._price = job, processes, config.track.price
        self._worker = scaling._resources_per_worker_not_none
        self._book, self._work = OrderBook(), StepWork(bounds.lanes)
        self._group: tuple[str, ...] = ()
        self._group_from = self._seen_step = 0
        """``_group``: node of each worker of the training group. ``_group_from``: the step at which that group was first seen.
        ``_seen_step``: 0 until a step is known."""
        self._given: dict[str, float] = {}
        """Node that was given back -> when the group leaves it, by ``time.monotonic`` [s]."""
        self._ordered_s: float | None = None
        """When more on-demand workers were last ordered, by ``time.monotonic`` [s]. None once a worker on a newly started node
        is ready."""
        self._known: set[str] = set()
        """The on-demand nodes that existed when more were last ordered."""
        self._orders_s: deque[float] = deque(maxlen=_MEASURED)
        self._spot_most = math.inf
        """Most workers to request on spot nodes, besides the ordered on-demand workers. Infinite until the autoscaler has no
        nodes for more."""
        self._refusals, self._problem, self._not_before_s = 0, "", math.inf
        """``_refusals``: consecutive refusals by the autoscaler. ``_problem``: why nothing can be ordered, empty if it can.
        ``_not_before_s``: until when the request stays reduced, by ``time.monotonic`` [s]."""
        self._begin_s = time.monotonic()
        self._looked_s = self._asked_s = -math.inf
        self._asked: Future[Provision] | None = None
        """The pending query of the autoscaler; None if there is none."""
        self._shared: set[str] = set()
        """Nodes that were given back and on which other runs have workers."""
        self._ended: set[str] = set()
        """Nodes that were given back and on which no snapshot server is left."""
        self._sent: tuple[int, float] = (0, math.inf)
        self._usable, self._again_s = frozenset[tuple[str, int]](), -math.inf
        """``_usable``: each node with its places at the last decision. ``_again_s``: when the next decision is due if nodes and
        places have not changed, by ``time.monotonic`` [s]."""
        self._can_be_met, self._doubted_s = True, math.inf
        """``_can_be_met``: whether the deadline was last reported as in reach. ``_doubted_s``: since when the opposite holds,
        by ``time.monotonic`` [s]; infinite if it does not."""

    def labelled(self, scaling: ScalingConfig) -> ScalingConfig:
        """Return a copy of ``scaling`` for the run's resource request, with a label selector for each worker."""
        mine = copy.copy(scaling)
        mine._label_selector_per_worker = self.selectors
        return mine

    def selectors(self, number: int) -> list[dict[str, str]] | None:
        """Return a label selector for each of ``number`` workers; None if nothing can be ordered, as when the autoscaler
        ignores labels."""
        if self._problem:
            return None
        ordered = min(self._book.workers, number)
        return [{MARKET_LABEL: ON_DEMAND}] * ordered + [{MARKET_LABEL: f"!{ON_DEMAND}"}] * (number - ordered)

    def requested(self, number: int) -> int:
        """Return how many of ``number`` workers to request: fewer once the autoscaler has no nodes for more spot workers."""
        return number if self._problem else int(min(number, self._book.workers + self._spot_most))

    def look(
        self,
        nodes: Sequence[Node],
        table: Sequence[_Entry],
        busy: tuple[str, ...],
        bounds: Bounds,
        progress: Progress,
        is_saved: bool,
    ) -> list[Node]:
        """Order nodes, and give nodes back, if a decision is due.

        Args:
            nodes: the nodes that the run may use.
            table: Ray's entries of these nodes.
            busy: node of each worker of the group that trains.
            bounds: limits of the run's workers now.
            progress: the run's progress.
            is_saved: whether the checkpoint store has the state that the last group left in memory.

        Returns:
            ``nodes``. A node that was given back has no places in it, and a time at which it leaves: so the training group
            leaves the node, and no other group starts on it.
        """
        now = time.monotonic()
        entries = {entry["NodeID"]: entry for entry in table}
        if now - self._looked_s >= _LOOK_S and not bounds.paused_by:
            self._looked_s = now
            if busy != self._group or progress.step < self._group_from or not self._seen_step:
                self._group, self._group_from, self._seen_step = busy, progress.step, progress.step
            self._end_what_is_left(entries, busy, is_saved or (bool(busy) and progress.step > self._group_from))
            self._decide(nodes, entries, busy, bounds, progress, now)
        elif bounds.paused_by:
            self._book.cancel()
        self._given = {node: at_s for node, at_s in self._given.items() if node in entries}
        self._ended &= self._given.keys()
        self._shared &= self._given.keys()
        return [
            one._replace(places=0, leaves_at=self._given[one.id]) if one.id in self._given else one for one in nodes
        ]

    def has_changed(self) -> bool:
        """Return True if the numbers of workers to request (on demand, on spot nodes) have changed since the last call."""
        before, self._sent = self._sent, (-1 if self._problem else self._book.workers, self._spot_most)
        return before != self._sent

    def _decide(
        self,
        nodes: Sequence[Node],
        entries: Mapping[str, _Entry],
        busy: tuple[str, ...],
        bounds: Bounds,
        progress: Progress,
        now: float,
    ) -> None:
        here = [
            MarketNode(one.id, one.places, _market(entries[one.id]) == ON_DEMAND, one.id in busy)
            for one in nodes
            if one.is_usable and one.id not in self._given
        ]
        self._measure_order(here, now)
        self._ask(here, progress.step, now)
        costs, multiple = progress.prospects, bounds.worker_multiple
        step_work = self._work.measure(progress.step - self._group_from, costs.step_s, len(busy))
        before = self._book.workers
        if step_work is None:
            if busy or self._problem or now - self._begin_s < ORDER_S:  # wait: spot nodes may still come
                return
            order = self._book.first(here, -(-bounds.min_workers // multiple) * multiple)
        else:
            deadline = self._plan.deadline(step_work, bounds, costs, max(self._orders_s, default=ORDER_S))
            done, passed_s = self._plan.done(progress.step, step_work), time.time() - self._plan.begun_s
            places = sum(one.places for one in here)
            if self._problem:
                deadline = deadline._replace(workers=max(1, min(places, deadline.workers)))
            self._tell(outlook(deadline, places, done, passed_s, self._price), deadline.workers, progress.step)
            usable = frozenset((one.id, one.places) for one in here)
            if self._problem or (usable == self._usable and now < self._again_s):
                return
            self._usable, self._again_s = usable, now + max(_AGAIN_S, deadline.change_s / 2)
            order = self._book.decide(deadline, here, done, passed_s, multiple)
        if order.workers > before:
            self._ordered_s, self._known = now, {one.id for one in here if one.on_demand}
            for node in self._shared - {*busy}:  # other runs keep these given-back nodes: use them again
                self._given.pop(node, None)
        self._give_back(order, {one.id: one for one in here}, entries, progress, now)
        if order.workers != before or order.give_back:
            self._post(order, progress.step)

    def _measure_order(self, here: Sequence[MarketNode], now: float) -> None:
        """Record how long the newest order took until a worker on a newly started node was ready."""
        new = {one.id for one in here if one.on_demand} - self._known
        if self._ordered_s is not None and new and new & self._processes.ready(()).keys() | new & {*self._group}:
            self._orders_s.append(now - self._ordered_s)
            self._ordered_s = None

    def _give_back(
        self,
        order: Order,
        here: Mapping[str, MarketNode],
        entries: Mapping[str, _Entry],
        progress: Progress,
        now: float,
    ) -> None:
        """Make the group leave the nodes that ``order`` gives back. Ray ends those of them on which no other run has
        workers."""
        costs, reserve_s = progress.prospects, float(self._job.config.elastic.reserve)
        for node in order.give_back:
            in_s = costs.leaving_s(reserve_s, durable=False) + costs.step_s if here[node].in_group else 0.0
            self._given[node] = now + in_s
            if fits(entries[node]["Resources"], self._worker.items()) > here[node].places:
                self._shared.add(node)  # no drain: the autoscaler ends the node once the other runs have left it
                continue
            try:
                deadline_ms = int((time.time() + max(in_s, 1.0)) * 1000)
                drain(ray.get_runtime_context().gcs_address, node, deadline_ms, "on demand no longer needed")
            except (RayError, OSError, RuntimeError) as error:
                _log.warning("node %s is given back, but Ray does not drain it: %s", node[:8], error)

    def _end_what_is_left(self, entries: Mapping[str, _Entry], busy: tuple[str, ...], is_safe: bool) -> None:
        """End the run's processes and snapshot servers on given-back nodes, because Ray ends only idle nodes. Does nothing
        until the group has left these nodes, and its state is safe: the next group trains, or the state is in the store.
        Snapshots (copies of the state in memory) on these nodes were copied to nodes that stay."""
        left = [node for node in self._given if node in entries and node not in busy]
        if not left or not is_safe:
            return
        self._processes.trim({node: 0 if node in self._given else _MANY for node in entries}, busy)
        for node in {*left} - self._ended:
            self._ended.add(node)
            with contextlib.suppress(ValueError, RayError):
                server = f"{name_prefix(self._job.folder)}{node}"
                ray.kill(ray.get_actor(server, namespace=NAMESPACE))

    def _ask(self, here: Sequence[MarketNode], step: int, now: float) -> None:
        """Check whether the autoscaler can provide what is requested. After ``_REFUSED`` refusals, request less."""
        if now >= self._not_before_s:
            self._problem, self._spot_most, self._not_before_s = "", math.inf, math.inf
        if self._problem:
            return
        if self._asked is None and now - self._asked_s >= _ASK_S:
            gcs, self._asked_s = ray.get_runtime_context().gcs_address, now
            # in a thread: the head may not answer
            self._asked = in_thread("springtide-autoscaler", lambda: provision(gcs), daemon=True)
        if self._asked is None or not self._asked.done():
            return
        found, self._asked = self._asked.result(), None
        if found is Provision.UNKNOWN:
            return
        self._refusals = 0 if found is Provision.FEASIBLE else self._refusals + 1
        if self._refusals < _REFUSED:
            return
        self._refusals, self._not_before_s = 0, now + _REFUSED_S
        spot = sum(one.places for one in here if not one.on_demand)
        asked = min(self._spot_most, self._job.config.elastic.max_workers)
        if found is Provision.INFEASIBLE and asked > spot:
            self._spot_most = spot + (asked - spot) // 2
            return
        ordered = self._book.workers
        self._problem = f"{found.value}; the run uses the nodes that are there"
        self._book.cancel()
        self._mailbox_post(Ordered(step=step, workers=ordered, reason="", problem=self._problem))

    def _tell(self, found: Outlook, workers: int, step: int) -> None:
        """Report when the deadline cannot be met any more, and when it can be met again. If it cannot, also report the earliest
        possible finish, or the larger number of workers that would meet it."""
        begun_s, until_s = self._plan.begun_s, self._plan.until_s
        finish_s = begun_s + found.finish_s
        spare_s, now = until_s - finish_s, time.monotonic()
        self._doubted_s = math.inf if found.can_be_met == self._can_be_met else min(self._doubted_s, now)
        if now - self._doubted_s < _SURELY_S or self._doubted_s == math.inf:
            return
        self._can_be_met, self._doubted_s = found.can_be_met, math.inf
        reason = f"{workers} workers would be done {_span(abs(spare_s))} {'before' if spare_s > 0 else 'after'} it"
        if not found.can_be_met:
            reason += f"; the earliest is {_time(finish_s)} ({found.dollars:.2f} dollars on demand from now)"
            if found.workers:
                reason += f", or elastic.max_workers = {found.workers} ({found.workers_dollars:.2f} dollars)"
        self._mailbox_post(DeadlineChecked(step=step, can_be_met=found.can_be_met, finish_s=finish_s, reason=reason))

    def _post(self, order: Order, step: int) -> None:
        given = list(order.give_back)
        self._mailbox_post(Ordered(step=step, workers=order.workers, reason=order.reason, given_back=given))

    def _mailbox_post(self, event: Ordered | DeadlineChecked) -> None:
        self._job.mailbox.post([event])


def _market(entry: _Entry) -> str:
    """Return a node's market label in lower case; empty for the head, which is never ordered or given back."""
    return "" if HEAD in entry["Resources"] else str((entry.get("Labels") or {}).get(MARKET_LABEL, "")).lower()


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(at_s))


# Query Ray's autoscaler: whether it starts nodes by their labels, and whether it can meet what is requested.
#
# Ray has one request of resources for the whole cluster. Its ``AutoscalingCoordinator``, an actor that Ray Train and Ray Data
# share, adds up the requests of all runs. The autoscaler meets the whole request or nothing: a single worker that fits on no
# kind of node keeps it from starting any node.

_ANSWER_S = 2.0


class Provision(Enum):
    """Whether the autoscaler can meet the cluster's request; if not, the value says why."""

    FEASIBLE = "it starts what is requested"
    INFEASIBLE = (
        "no kind of node that Ray's autoscaler may still start has room for all that the cluster's runs request"
    )
    WITHOUT_LABELS = (
        "Ray's autoscaler of version 1 cannot choose nodes by label (RAY_enable_autoscaler_v2=1 on the head)"
    )
    MISSING = "the cluster has no autoscaler that starts nodes"
    UNKNOWN = "the head does not answer"


def provision(gcs: str) -> Provision:
    """Return whether the autoscaler can meet the newest request that it has seen. ``gcs``: address of the control store of the
    cluster that this process is connected to."""
    try:
        client = _client(gcs)
        if not is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
            return Provision.WITHOUT_LABELS
        reply = GetClusterStatusReply()
        reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_S))
    except (RayError, OSError, RuntimeError):
        return Provision.UNKNOWN
    if not reply.HasField("autoscaling_state"):
        return Provision.MISSING
    return (
        Provision.INFEASIBLE if reply.autoscaling_state.infeasible_cluster_resource_constraints else Provision.FEASIBLE
    )


@functools.cache
def _client(gcs: str) -> Any:
    return GcsClient(address=gcs)  # cached, because each client opens a connection
