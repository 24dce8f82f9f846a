"""Decide how many workers train, on which nodes, and when to change that.

    observation (nodes, the group that trains) + state + now -> a decision with its reason

``on_ray/train/policy.py`` observes a cluster and carries decisions out. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from springtide.elastic.save_interval import mean_time_to_loss

_LIKELY = 0.2
"""Probability that another node is lost before this one; above it, a group waits, so that one restart serves both."""
_ENOUGH = 0.5
"""Least share of the possible workers that starts without waiting for the processes of the others."""
_STEPS_TO_LEAVE = 3
"""A request is made during one step, known to rank 0 after the next one, and agreed on in the one after that."""
_MARGIN = 1.5
_SAVES = 2.5
"""A save may be under way when the last one is to begin: two saves, and a margin."""
_GATHER_S = 30.0
"""How long ready nodes wait for nodes that are not ready yet, so that the group grows once [s]."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits that a run's config sets."""

    min_workers: int
    max_workers: int
    worker_multiple: int = 1
    """Workers come in multiples of this."""
    settle_s: float = 2.0
    """Changes within less than this time of each other are one change [s]."""
    reserve_s: float = 5.0
    """Least time before a node's loss to bring the state to safety after the step; what is measured may need more [s]."""
    grow: Literal["when_it_pays", "always", "never"] = "when_it_pays"
    wait_s: float = math.inf
    """How long to wait for ``min_workers`` [s]."""
    expected_loss_s: float = 4 * 3600.0
    """Mean time between node losses, assumed before one is seen [s]."""
    shares: bool = False
    """Whether places on a node that stays may be given to other runs."""
    fits: int = 1
    """Fewest workers that have enough memory for a step, as far as known."""
    paused_by: str = ""
    """Who paused the run; empty if it is not paused."""

    def feasible(self, places: int) -> int:
        """Return the most workers for ``places``; 0 if there are too few."""
        size = min(places, self.max_workers) // self.worker_multiple * self.worker_multiple
        return size if size >= max(self.min_workers, self.fits) else 0


class Node(NamedTuple):
    """A live node."""

    id: str
    places: int
    """Number of workers that fit on it."""
    leaves_at: float | None = None
    """When it will be taken away; None if that is not announced [s]."""
    problem: str = ""
    """Why it must not be used; empty if it may."""
    ready: int | None = None
    """Number of ready worker processes on it; None: ``places``."""

    @property
    def standing(self) -> int:
        """Workers whose process is ready."""
        return self.places if self.ready is None else min(self.places, self.ready)


class WorkerGroup(NamedTuple):
    """The worker group that trains."""

    nodes: tuple[str, ...]
    """Node of each worker, by rank."""


class RestartForecast(NamedTuple):
    """Cost of a restart, and how long its gain can last."""

    restart_s: float = 10.0
    left_s: float = math.inf
    """Training time left at the current group size [s]."""
    step_s: float = 0.0
    """Time of a step, after which a group can leave; infinite while none is measured [s]."""
    save_s: float = 0.0
    """Time of a save to the store; 0 while none is measured [s]."""
    copy_s: float = 0.0
    """Time to copy the state to the memory of nodes that stay; 0 while none is measured [s]."""

    def copied_by(self, lost_s: float, reserve_s: float, now: float) -> float:
        """Return when the copy of a group that is asked to leave ``now`` must be safe in memory, so that there is still time
        for a save to the store before ``lost_s``; ``lost_s`` itself if there is no time for both, because a save takes
        longer than a copy [s]."""
        by_s = lost_s - max(reserve_s, _MARGIN * self.save_s)
        return by_s if now + _STEPS_TO_LEAVE * self.step_s + _MARGIN * self.copy_s <= by_s else lost_s

    def leaving_s(self, reserve_s: float, durable: bool) -> float:
        """Return how long before a node's loss its group must be asked to leave: the steps until it leaves, and the time to
        bring its state to safety. ``durable``: to the store. ``reserve_s`` is the least for the latter [s]."""
        copy_s = self.copy_s or self.save_s  # memory is at least as fast as a store
        safe_s = _SAVES * self.save_s if durable else _MARGIN * copy_s
        return _STEPS_TO_LEAVE * self.step_s + max(reserve_s, safe_s)


class PolicyState(NamedTuple):
    """State from one decision to the next."""

    usable: frozenset[tuple[str, int]] = frozenset()
    """Usable nodes and their places, since ``since_s``."""
    since_s: float = -math.inf
    lacking_s: float | None = None
    """Since when there is too little capacity to train; None while there is enough."""
    held: frozenset[str] = frozenset()
    """Nodes of the last group; empty before the first."""
    room_s: float | None = None
    """Since when there are ready nodes to grow to; None while there are none."""
    begin_s: float | None = None
    """When the first decision was made."""
    losses: int = 0
    """Number of times that nodes were lost, or their loss was announced."""

    def loss_s(self, bounds: Bounds, now: float) -> float:
        """Return the estimated mean time to the next loss [s]."""
        observed_s = 0.0 if self.begin_s is None else now - self.begin_s
        return mean_time_to_loss(bounds.expected_loss_s, observed_s, self.losses)


class Stay(NamedTuple):
    """Change nothing: continue to train, or to wait for capacity."""

    reason: str
    until_s: float = math.inf
    """When to decide again even if nothing has changed [s]."""
    save: bool = False
    """Whether the newest state must come to the store meanwhile: it may be in memory only."""


class Start(NamedTuple):
    """Start a group; no group is running."""

    workers: int
    nodes: tuple[str, ...]
    """Node of each worker."""
    reason: str


class Leave(NamedTuple):
    """Ask the group to bring its state to safety after the current step, so that another can start."""

    reason: str
    durable: bool = False
    """Whether the state must go to the store: no node stays to keep it in memory."""
    by_s: float = math.inf
    """When a copy in memory must be safe; if it is not, the state goes to the store, too [s]."""


class GiveUp(NamedTuple):
    """End the run: it has waited for capacity long enough."""

    reason: str


class Replace(NamedTuple):
    """End the group: it has lost workers and cannot continue."""

    reason: str


Decision = Stay | Start | Leave | Replace | GiveUp


def decide(
    bounds: Bounds,
    nodes: Sequence[Node],
    group: WorkerGroup | None,
    prospects: RestartForecast,
    memory: PolicyState,
    now: float,
) -> tuple[Decision, PolicyState]:
    """Decide who trains; no other place does. ``nodes``: the live ones; ``group``: None if no group trains; ``memory``:
    the state that the last decision returned. Returns the decision and the new state."""
    usable = _usable(nodes)
    here = frozenset([(node.id, node.places) for node in usable])
    if here != memory.usable:
        gone = {name for name, _ in memory.usable} - {node.id for node in nodes if node.leaves_at is None}
        begin_s = now if memory.begin_s is None else memory.begin_s
        memory = memory._replace(usable=here, since_s=now, begin_s=begin_s, losses=memory.losses + bool(gone))
    room = _room(bounds, usable)
    if group is None:
        return _without_group(bounds, nodes, usable, room, memory, now)
    grows = room.ready > len(group.nodes)
    room_s = (now if memory.room_s is None else memory.room_s) if grows else None
    memory = memory._replace(held=frozenset(group.nodes), lacking_s=None, room_s=room_s)
    return _with_group(bounds, nodes, group, room, prospects, memory, now), memory


def following(bounds: Bounds, nodes: Sequence[Node], memory: PolicyState) -> tuple[str, ...]:
    """Return the nodes of the next group if all were ready: one entry per worker."""
    usable = _usable(nodes)
    return _choose(_room(bounds, usable).size, usable, memory.held)


class _Room(NamedTuple):
    """Capacity: the number of workers that fit."""

    size: int
    ready: int
    """With the processes that are ready."""


def _room(bounds: Bounds, usable: Sequence[Node]) -> _Room:
    places, standing = sum([node.places for node in usable]), sum([node.standing for node in usable])
    return _Room(bounds.feasible(places), bounds.feasible(standing))


def _usable(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.leaves_at is None and not node.problem and node.places > 0]


def _without_group(
    bounds: Bounds, nodes: Sequence[Node], usable: Sequence[Node], room: _Room, memory: PolicyState, now: float
) -> tuple[Decision, PolicyState]:
    size = room.size
    if bounds.paused_by:
        return Stay(f"paused by {bounds.paused_by}, and holds no workers", save=True), memory._replace(lacking_s=None)
    if not size:
        lacking_s = now if memory.lacking_s is None else memory.lacking_s
        memory, lack = memory._replace(lacking_s=lacking_s), _lack(bounds, nodes, usable)
        if now - lacking_s >= bounds.wait_s:
            return GiveUp(f"waited for {bounds.wait_s:g} s, as elastic.wait says; {lack}"), memory
        leaving = any(node.leaves_at is not None for node in nodes)
        return Stay(lack, save=leaving or now - lacking_s >= bounds.settle_s), memory
    memory = memory._replace(lacking_s=None)
    begins = not memory.held and not bounds.shares  # if runs share, the allocation is settled: nothing to wait for
    if size < bounds.feasible(bounds.max_workers) and begins and not _quiet(bounds, memory, now):
        return Stay(f"room for {size} of {bounds.max_workers} workers; more nodes may be joining"), memory
    if memory.held and bounds.grow != "never" and room.ready >= _ENOUGH * size:
        size, usable = room.ready, [node._replace(places=node.standing) for node in usable]
    chosen = _choose(size, usable, memory.held)
    reason = f"{size} of {bounds.max_workers} workers on {_count(len(set(chosen)), 'node')}"
    return Start(size, chosen, reason), memory


def _with_group(
    bounds: Bounds,
    nodes: Sequence[Node],
    group: WorkerGroup,
    room: _Room,
    prospects: RestartForecast,
    memory: PolicyState,
    now: float,
) -> Decision:
    alive = {node.id: node for node in nodes}
    workers, mine = len(group.nodes), dict.fromkeys(group.nodes)
    if lost := [name for name in mine if name not in alive]:
        return Replace(f"lost nodes: {_names(lost)}")
    if bounds.paused_by:
        return Leave(f"paused by {bounds.paused_by}", durable=True)
    if leaving := [alive[name] for name in mine if alive[name].leaves_at is not None]:
        first = min(node.leaves_at for node in leaving if node.leaves_at is not None)
        what = f"notice: {_names([node.id for node in leaving])} will be taken away in {max(0.0, first - now):.0f} s"
        by_s = first - prospects.leaving_s(bounds.reserve_s, durable=not room.size)
        if now < by_s and (why := _not_yet(bounds, room, memory, by_s, now)):
            return why._replace(reason=f"{what}; {why.reason}")
        return Leave(what, durable=not room.size, by_s=prospects.copied_by(first, bounds.reserve_s, now))
    if bad := [alive[name] for name in mine if alive[name].problem]:
        reason = "; ".join(f"{node.id[:8]} {node.problem}" for node in bad)
        return Leave(reason) if room.size else Stay(f"{reason}; there is nowhere else to go")
    if workers > bounds.max_workers:
        if not room.size:
            return Stay(f"{bounds.max_workers} workers are too few for a step; {workers} train")
        return Leave(f"resize from {workers} to {bounds.max_workers} workers")
    owed = sum(max(0, number - alive[name].places) for name, number in Counter(group.nodes).items())
    if bounds.shares and owed:
        return Leave(f"{_count(owed, 'worker')} for other runs", durable=not room.size)
    return _growth(bounds, workers, room, prospects, memory, now)


def _not_yet(bounds: Bounds, room: _Room, memory: PolicyState, by_s: float, now: float) -> Stay | None:
    """Return why not to leave yet nodes that must be left by ``by_s``; else None."""
    loss_s = memory.loss_s(bounds, now)
    if not room.size:
        return Stay("too few nodes would stay to train on, so it trains until then", by_s, save=True)
    if not _quiet(bounds, memory, now):
        return Stay("others may follow", by_s)
    if by_s - now > _LIKELY * loss_s:
        often = f"others may follow, a loss comes every {loss_s:.0f} s: one restart for all"
        return Stay(often, by_s - _LIKELY * loss_s)
    if room.ready < room.size:
        return Stay("the processes on others are getting ready", by_s)
    return None


def _quiet(bounds: Bounds, memory: PolicyState, now: float) -> bool:
    return now - memory.since_s >= bounds.settle_s


def _growth(
    bounds: Bounds, workers: int, room: _Room, prospects: RestartForecast, memory: PolicyState, now: float
) -> Stay | Leave:
    if room.size <= workers:
        return Stay(f"{workers} workers train")
    more = f"room for {room.size} workers instead of {workers}"
    if not _quiet(bounds, memory, now):
        return Stay(f"{more}; more nodes may be joining")
    until_s = math.inf if memory.room_s is None else memory.room_s + _GATHER_S
    if room.ready < room.size and now < until_s:
        return Stay(f"{more}; their processes are getting ready", until_s)
    size, loss_s = room.ready, memory.loss_s(bounds, now)
    if bounds.grow == "never":
        return Stay(f"room for {size} workers instead of {workers}, elastic.grow is 'never'")
    lasts_s = min(loss_s, prospects.left_s)
    if bounds.grow != "always" and size * (lasts_s - prospects.restart_s) <= workers * lasts_s:
        return Stay(
            f"{size} workers instead of {workers} would not pay: a restart takes {prospects.restart_s:.0f} s, the gain "
            f"lasts {lasts_s:.0f} s"
        )
    return Leave(f"grow from {workers} to {size} workers")


def _choose(size: int, usable: Sequence[Node], held: Collection[str]) -> tuple[str, ...]:
    """Return a node for each of ``size`` workers: first nodes with ready processes, then nodes of the last group, then
    the largest, so that the nodes are few."""
    ranked = sorted(usable, key=lambda node: (not node.standing, node.id not in held, -node.places, node.id))
    return tuple([node.id for node in ranked for _ in range(node.places)][:size])


def _lack(bounds: Bounds, nodes: Sequence[Node], usable: Sequence[Node]) -> str:
    places = sum(node.places for node in usable)
    left_out = [f"{node.id[:8]} {node.problem}" for node in nodes if node.problem]
    leaving = [node.id for node in nodes if node.leaves_at is not None]
    least = f"elastic.min_workers is {bounds.min_workers}"
    if bounds.fits > bounds.min_workers:
        least = f"a step needs the memory of {bounds.fits}"
    reasons = [f"room for {places} workers, {least}"]
    reasons += [f"leaving: {_names(leaving)}"] if leaving else []
    reasons += [f"excluded: {', '.join(left_out)}"] if left_out else []
    return "waiting for capacity: " + "; ".join(reasons)


def _names(ids: Collection[str]) -> str:
    return ", ".join(name[:8] for name in ids)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
