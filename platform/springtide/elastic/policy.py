"""Decide how many workers train, on which nodes, and when a new worker group replaces the current one.

    live nodes + worker group that trains + state + now --decide()--> decision with its reason, new state

``forecast.py`` estimates the cost of a restart. ``ray/train/scaling_policy.py`` observes the cluster and carries the decisions
out. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from springtide.elastic.forecast import ASSUMED_LOSS_S, RestartForecast, mean_time_to_loss
from springtide.elastic.group_sizes import most_lanes, speed
from springtide.elastic.node_table import Node as Node  # re-export: callers of `decide` import Node from here
from springtide.elastic.node_table import NodeTable

_ENOUGH = 0.5
"""A group starts with only the workers whose processes are ready, if these are at least this share of the possible workers. A
run's first group always waits for all processes."""
_GATHER_S = 30.0
"""A group that can grow first waits this long for further processes to get ready, so that it restarts only once [s]."""
_FORMING_S = 600.0
"""Added to the observed time when the rate of joining nodes is estimated; else the first joins would make the rate huge [s]."""
FAR_S = 3600.0
"""If a notice says that a node will be taken away in more than this time, the node is used like a node without a notice [s]."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits on a run's worker group: from its config, from device memory, and from other runs that share its cluster."""

    min_workers: int
    max_workers: int
    worker_multiple: int = 1
    """The number of workers must be a multiple of this."""
    settle_s: float = 2.0
    """Time without a change of the usable nodes before a group starts or grows, so that several joins cause one restart [s]."""
    reserve_s: float = 5.0
    """Minimum time to copy or save the state before a node is lost; more if copies or saves of the run took longer [s]."""
    grow: Literal["when_it_pays", "always", "never"] = "when_it_pays"
    wait_s: float = math.inf
    """The run ends if there is no capacity for ``min_workers`` for this long [s]."""
    expected_loss_s: float = ASSUMED_LOSS_S
    """Initial estimate of the mean time between losses of nodes [s]. It has the weight of one observed loss."""
    lanes: int = 0
    """Number of lanes: fixed shares of a batch that are never divided, so that the worker with the most lanes determines the
    step time. 0: a batch is divided evenly."""
    cluster_is_shared: bool = False
    """Whether other runs may get workers on this run's nodes."""
    others: str = ""
    """Only on a shared cluster: text that explains why this run gets no more workers, or which runs get the workers that it
    loses."""
    min_workers_for_memory: int = 1
    """Fewest workers with enough device memory for a step, as far as is known from groups that ran out of memory."""
    paused_by: str = ""
    """Who paused the run; empty if it is not paused."""

    def speed(self, workers: int) -> float:
        """Return the speed of a group of ``workers``, in units of one worker that never waits for others."""
        return speed(self.lanes, workers)

    def feasible(self, places: int) -> int:
        """Return the size of the largest allowed group with at most ``places`` workers; 0 if no allowed group is that small."""
        size = min(places, self.max_workers) // self.worker_multiple * self.worker_multiple
        return size if size >= max(self.min_workers, self.min_workers_for_memory) else 0


class WorkerGroup(NamedTuple):
    """The worker group that trains now."""

    nodes: tuple[str, ...]
    """Node of each worker, by rank."""


class PolicyState(NamedTuple):
    """State that the policy carries from one decision to the next."""

    usable: frozenset[tuple[str, int]] = frozenset()
    """(id, number of workers that fit) of each usable node: no notice of its loss, no problem. Unchanged since ``since_s``."""
    key: int = 0
    """Hash of the usable nodes (``NodeTable.key``), which changes when these nodes change."""
    since_s: float = -math.inf
    lacking_s: float | None = None
    """Since when there is too little capacity to train; None while there is enough capacity."""
    held: frozenset[str] = frozenset()
    """Nodes of the current worker group, or of the previous group if none runs now. Empty before the first group."""
    room_s: float | None = None
    """Since when the group could grow onto nodes with ready processes; None while it cannot grow."""
    begin_s: float | None = None
    """When the first decision about the run's worker group was made."""
    losses: int = 0
    """Number of times that nodes were lost, or that a notice of their loss came."""
    joins: int = 0
    """Number of times that nodes joined, after the first decision."""
    joined: int = 0
    """Number of workers that fit on the nodes that joined after the first decision."""
    missing: float = 0.0
    """Speed that the group would gain by growing onto all ready processes, in units of one worker that never waits."""
    missed: float = 0.0
    """Work lost since ``room_s`` because the group has not grown [worker-seconds]."""
    looked_s: float = 0.0
    """When the last decision about a training group was made [s]."""

    def loss_s(self, bounds: Bounds, now: float) -> float:
        """Return the estimated mean time to the next loss of a node [s]."""
        return mean_time_to_loss(bounds.expected_loss_s, self._observed_s(now), self.losses)

    def change_s(self, bounds: Bounds, now: float) -> float:
        """Return the estimated mean time until a node is lost or joins [s]."""
        joins_per_s = self.joins / (self._observed_s(now) + _FORMING_S)
        return 1 / (1 / self.loss_s(bounds, now) + joins_per_s)

    def _observed_s(self, now: float) -> float:
        return 0.0 if self.begin_s is None else now - self.begin_s


class Stay(NamedTuple):
    """Change nothing: continue to train, or to wait for capacity."""

    reason: str
    until_s: float = math.inf
    """When to decide again even if nothing has changed [s]."""
    save: bool = False
    """Whether to save the newest training state to storage meanwhile, because it may be in nodes' memory only."""


class Start(NamedTuple):
    """Start a worker group; no group is running."""

    workers: int
    nodes: tuple[str, ...]
    """Node of each worker."""
    reason: str


class Leave(NamedTuple):
    """Ask the worker group to copy or save its state between two steps and to end, so that another group can start."""

    reason: str
    durable: bool = False
    """Whether the state must be saved to storage, for example because no node stays to keep it in memory."""
    by_s: float = math.inf
    """When the copy of the state in memory must be complete. If the copy is late, the state is also saved to storage [s]."""


class GiveUp(NamedTuple):
    """End the run: it has waited for capacity as long as ``Bounds.wait_s`` allows."""

    reason: str


class Replace(NamedTuple):
    """End the worker group at once: it has lost nodes and cannot continue."""

    reason: str


Decision = Stay | Start | Leave | Replace | GiveUp


def decide(
    bounds: Bounds,
    nodes: Sequence[Node] | NodeTable,
    group: WorkerGroup | None,
    prospects: RestartForecast,
    memory: PolicyState,
    now: float,
) -> tuple[Decision, PolicyState]:
    """Return the next decision about the worker group, and the new state of the policy. Every such decision is made here.
    ``nodes``: the live nodes; ``group``: the group that trains, None if there is none; ``memory``: the state that the previous
    call returned."""
    table = nodes if isinstance(nodes, NodeTable) else NodeTable(nodes)
    far_s = now + FAR_S  # notices of losses later than this are ignored
    if far := [node for node in table.leaving.values() if node.leaves_at is not None and node.leaves_at > far_s]:
        table = NodeTable((table.by_id | {node.id: node._replace(leaves_at=None) for node in far}).values())
    if table.key != memory.key or memory.begin_s is None:
        memory = _noted(table, memory, now)
    room = _room(bounds, table)
    if group is None:
        return _without_group(bounds, table, room, memory._replace(missing=0.0), now)
    grows = room.ready > len(group.nodes)
    room_s = (now if memory.room_s is None else memory.room_s) if grows else None
    missed = memory.missed + memory.missing * (now - memory.looked_s) if grows else 0.0
    missing = bounds.speed(room.ready) - bounds.speed(len(group.nodes)) if grows else 0.0
    memory = memory._replace(room_s=room_s, missed=missed, missing=missing, looked_s=now, lacking_s=None)
    memory = memory._replace(held=frozenset(group.nodes))
    return _with_group(bounds, table, group, room, prospects, memory, now), memory


def used_for_hours(nodes: Sequence[Node], held: Mapping[str, int], now: float) -> list[Node]:
    """Return ``nodes``, with notices removed if the loss is more than ``FAR_S`` away, so that such nodes are used until then.
    The cluster starts no process on a node with a notice. The node's room is therefore limited to the processes that the run
    already has there (``held``: node -> number of processes)."""
    far = {node.id for node in nodes if node.leaves_at is not None and node.leaves_at > now + FAR_S}
    return [
        node._replace(leaves_at=None, places=min(node.places, held.get(node.id, 0))) if node.id in far else node
        for node in nodes
    ]


def following(bounds: Bounds, nodes: Iterable[Node], memory: PolicyState) -> tuple[str, ...]:
    """Return the nodes that the next worker group would have if all processes were ready, one entry per worker."""
    table = NodeTable(nodes)
    return _choose(_room(bounds, table).size, table.usable, memory.held)


def _noted(table: NodeTable, memory: PolicyState, now: float) -> PolicyState:
    """Return the policy's state with a change of the usable nodes recorded: losses, joins and the time of the change."""
    here = frozenset(table.usable_places.items())
    gone = any(name not in table.by_id or name in table.leaving for name, _ in memory.usable - here)
    joined = sum(places for _, places in here - memory.usable) if memory.begin_s is not None else 0
    begin_s = now if memory.begin_s is None else memory.begin_s
    losses, joins, joined = memory.losses + gone, memory.joins + bool(joined), memory.joined + joined
    since_s = now if here != memory.usable else memory.since_s
    return memory._replace(
        usable=here, key=table.key, since_s=since_s, begin_s=begin_s, losses=losses, joins=joins, joined=joined
    )


class _Room(NamedTuple):
    """Sizes of two groups on the usable nodes: the largest that fits, and the largest whose processes are ready now."""

    size: int
    ready: int
    """Size of the largest group whose processes are ready now."""


def _room(bounds: Bounds, table: NodeTable) -> _Room:
    return _Room(bounds.feasible(table.places), bounds.feasible(table.standing))


def _without_group(
    bounds: Bounds, table: NodeTable, room: _Room, memory: PolicyState, now: float
) -> tuple[Decision, PolicyState]:
    size = room.size
    if bounds.paused_by:
        return Stay(f"paused by {bounds.paused_by}, and holds no workers", save=True), memory._replace(lacking_s=None)
    if not size:
        lacking_s = now if memory.lacking_s is None else memory.lacking_s
        memory, lack = memory._replace(lacking_s=lacking_s), _lack(bounds, table)
        if now - lacking_s >= bounds.wait_s:
            return GiveUp(f"waited for {bounds.wait_s:g} s, as elastic.wait says; {lack}"), memory
        return Stay(lack, save=bool(table.leaving) or now - lacking_s >= bounds.settle_s), memory
    memory = memory._replace(lacking_s=None)
    # A run's first group waits until nodes stop joining, so that it need not restart soon in order to grow. Later groups do not
    # wait. Nor does a group on a shared cluster, because the allocation fixes its number of workers.
    begins = not memory.held and not bounds.cluster_is_shared
    if size < bounds.feasible(bounds.max_workers) and begins and not _quiet(bounds, memory, now):
        return Stay(f"room for {size} of {bounds.max_workers} workers; more nodes may be joining"), memory
    usable = table.usable
    if memory.held and bounds.grow != "never" and room.ready >= _ENOUGH * size:
        size = room.ready
        usable = [node if node.ready is None else node._replace(places=node.standing) for node in usable]
    chosen = _choose(size, usable, memory.held)
    reason = f"{size} of {bounds.max_workers} workers on {_count(len(set(chosen)), 'node')}"
    return Start(size, chosen, reason), memory


def _with_group(
    bounds: Bounds,
    table: NodeTable,
    group: WorkerGroup,
    room: _Room,
    prospects: RestartForecast,
    memory: PolicyState,
    now: float,
) -> Decision:
    workers, mine = len(group.nodes), memory.held
    if lost := mine - table.by_id.keys():
        return Replace(f"lost nodes: {_names(_in_order(group, lost))}")
    if bounds.paused_by:
        return Leave(f"paused by {bounds.paused_by}", durable=True)
    if leaving := mine & table.leaving.keys():
        first = min(table.leaving[name].leaves_at or 0.0 for name in leaving)
        what = f"notice: {_names(_in_order(group, leaving))} will be taken away in {max(0.0, first - now):.0f} s"
        by_s = first - prospects.leaving_s(bounds.reserve_s, durable=not room.size)
        if now < by_s and (why := _not_yet(bounds, workers, room, prospects, memory, by_s, now)):
            return why._replace(reason=f"{what}; {why.reason}")
        return Leave(what, durable=not room.size, by_s=prospects.copied_by(first, bounds.reserve_s, now))
    if bad := mine & table.unfit.keys():
        reason = "; ".join(f"{name[:8]} {table.unfit[name].problem}" for name in _in_order(group, bad))
        return Leave(reason) if room.size else Stay(f"{reason}; there is nowhere else to go")
    if workers > bounds.max_workers:
        if not room.size:
            return Stay(f"{bounds.max_workers} workers are too few for a step; {workers} train")
        return Leave(f"resize from {workers} to {bounds.max_workers} workers")
    if bounds.cluster_is_shared and (owed := _owed(group, table.by_id)):
        whom = f": {bounds.others}" if bounds.others else ""
        return Leave(f"{_count(owed, 'worker')} for other runs{whom}", durable=not room.size)
    return _growth(bounds, workers, room, prospects, memory, now)


def _owed(group: WorkerGroup, alive: Mapping[str, Node]) -> int:
    """Return how many workers the group must give up: on each node, those beyond the number that this run may have there."""
    return sum(max(0, number - alive[name].places) for name, number in Counter(group.nodes).items())


def _not_yet(
    bounds: Bounds,
    workers: int,
    room: _Room,
    prospects: RestartForecast,
    memory: PolicyState,
    by_s: float,
    now: float,
) -> Stay | None:
    """Return why the group should keep training although it must leave some nodes by ``by_s``; None if it should leave now.
    A group that keeps training uses these nodes longer, and one restart can serve several changes. The group leaves early only
    to grow onto other nodes. With ``elastic.grow = when_it_pays``, the gain must also exceed the expected cost of a second
    restart before ``by_s``."""
    if not room.size:
        return Stay("too few nodes would remain, so it trains until they leave", by_s, save=True)
    if bounds.speed(room.size) <= bounds.speed(workers) or bounds.grow == "never":
        return Stay("it trains on until it must leave", by_s)
    if not _quiet(bounds, memory, now):
        return Stay("more nodes may be joining", by_s)
    fast, faster, left_s = bounds.speed(workers), bounds.speed(room.ready), by_s - now
    if faster <= fast:
        return Stay("processes on more nodes are getting ready", by_s)
    # expected work lost by another restart: its cost times the probability of a loss or join before by_s
    another = faster * prospects.restart_s * min(1.0, left_s / memory.change_s(bounds, now))
    if bounds.grow != "always" and (faster - fast) * left_s <= another:
        return Stay("more nodes may join: one restart for all of them", by_s)
    if room.ready < room.size and now < _gathered_s(memory):
        return Stay("processes on more nodes are getting ready", min(by_s, _gathered_s(memory)))
    return None


def _gathered_s(memory: PolicyState) -> float:
    """Return until when a group that can grow waits for further processes to get ready; infinite if it cannot grow [s]."""
    return math.inf if memory.room_s is None else memory.room_s + _GATHER_S


def _quiet(bounds: Bounds, memory: PolicyState, now: float) -> bool:
    return now - memory.since_s >= bounds.settle_s


def _growth(
    bounds: Bounds, workers: int, room: _Room, prospects: RestartForecast, memory: PolicyState, now: float
) -> Stay | Leave:
    """Decide whether to restart with more workers. Growing pays if the work gained until the next loss of a node exceeds the
    cost of the restart; the loss forces a restart anyway. If the nodes that are expected to join next would justify a restart
    by themselves, the group waits for them, so that one restart serves all. It waits at most until the wait has cost as much as
    a restart."""
    if room.size <= workers:
        return Stay(f"{workers} workers train")
    more = f"room for {room.size} workers instead of {workers}"
    if not _quiet(bounds, memory, now):
        return Stay(f"{more}; more nodes may be joining")
    until_s = _gathered_s(memory)
    if room.ready < room.size and now < until_s:
        return Stay(f"{more}; their processes are getting ready", until_s)
    size = room.ready
    if bounds.grow == "never":
        return Stay(f"room for {size} workers instead of {workers}, elastic.grow is 'never'")
    fast, faster = bounds.speed(workers), bounds.speed(size)
    if faster <= fast and bounds.grow != "always":
        most = most_lanes(bounds.lanes, size)
        return Stay(
            f"{size} workers instead of {workers} would be no faster: one would still have {most} lanes of a step"
        )
    restart_s, loss_s = prospects.restart_s, memory.loss_s(bounds, now)
    # `missing`: work that the group may still lose by waiting, before the wait has cost as much as a restart
    missing = faster * restart_s - memory.missed
    # `alone`: whether the workers of an average join, by themselves, gain more work until the next loss than a restart costs
    alone = memory.joined / memory.joins * loss_s > faster * restart_s if memory.joins else True
    lasts_s = min(memory.change_s(bounds, now) if alone and missing > 0 else loss_s, prospects.left_s)
    if bounds.grow == "always" or faster * (lasts_s - restart_s) > fast * lasts_s:
        return Leave(f"grow from {workers} to {size} workers")
    return Stay(
        f"{size} workers instead of {workers} would not pay: a restart takes {restart_s:.0f} s, the gain lasts {lasts_s:.0f} s",
        now + missing / (faster - fast) if alone and missing > 0 else math.inf,
    )


def _choose(size: int, usable: Sequence[Node], held: Collection[str]) -> tuple[str, ...]:
    """Return a node for each of ``size`` workers: first nodes with ready processes, then nodes of the previous group
    (``held``), then the largest nodes, so that the group spans few nodes."""
    ranked = sorted(usable, key=lambda node: (not node.standing, node.id not in held, -node.places, node.id))
    return tuple([node.id for node in ranked for _ in range(node.places)][:size])


def _lack(bounds: Bounds, table: NodeTable) -> str:
    left_out = [f"{node.id[:8]} {node.problem}" for node in table.unfit.values()]
    least = f"elastic.min_workers is {bounds.min_workers}"
    if bounds.min_workers_for_memory > bounds.min_workers:
        least = f"a step needs the memory of {bounds.min_workers_for_memory}"
    reasons = [f"room for {table.places} workers, {least}"]
    if table.leaving:
        final = "" if table.places else " (Ray uses such a node again only after `ray stop` and `ray start` on it)"
        reasons.append(f"leaving: {_names(table.leaving)}{final}")
    reasons += [f"excluded: {', '.join(left_out)}"] if left_out else []
    reasons += [bounds.others] if bounds.others else []
    return "waiting for capacity: " + "; ".join(reasons)


def _in_order(group: WorkerGroup, names: Collection[str]) -> list[str]:
    return [name for name in dict.fromkeys(group.nodes) if name in names]


def _names(ids: Collection[str]) -> str:
    return ", ".join(name[:8] for name in ids)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
