"""How many workers, on which nodes, and when to change that.

    what is seen (nodes, the group that trains) + what was remembered + now -> a decision with a reason in words

``on_ray/policy.py`` looks at a cluster and carries decisions out. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from springtide.elastic.save_interval import mean_time_to_loss

_LIKELY = 0.2
"""That another node is lost before this one is: then one restart is for both."""
_ENOUGH = 0.5
"""Of the workers there could be, to start with while the processes of others are still getting ready."""
_GATHER_S = 30.0
"""How long nodes that are ready wait for others that will be soon, to grow once."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a run asked for."""

    min_workers: int
    max_workers: int
    worker_multiple: int = 1
    """Workers come in multiples of this."""
    settle_s: float = 2.0
    """Changes that follow each other faster than this are one change."""
    reserve_s: float = 5.0
    """Before a node goes, what it takes to bring the state to safety when the step is done."""
    grow: Literal["when_it_pays", "always", "never"] = "when_it_pays"
    wait_s: float = math.inf
    """How long to wait for ``min_workers``."""
    expected_loss_s: float = 4 * 3600.0
    """Mean time between losses of nodes, before one is seen [s]."""
    shares: bool = False
    """Whether places on a node that stays may be given to other runs."""
    fits: int = 1
    """Fewest workers whose memory a step fits in, as far as is known."""

    def feasible(self, places: int) -> int:
        """The most workers that ``places`` hold; 0 when they are too few."""
        size = min(places, self.max_workers) // self.worker_multiple * self.worker_multiple
        return size if size >= max(self.min_workers, self.fits) else 0


class Node(NamedTuple):
    """A node that is alive."""

    id: str
    places: int
    """How many workers it holds."""
    leaves_at: float | None = None
    """When it will be taken away, if that was announced [s]."""
    problem: str = ""
    """Why it is not to be used."""
    ready: int | None = None
    """How many workers' processes stand on it; None: as many as it holds."""

    @property
    def standing(self) -> int:
        """Workers that need not wait for their process."""
        return self.places if self.ready is None else min(self.places, self.ready)


class WorkerGroup(NamedTuple):
    """The workers that train."""

    nodes: tuple[str, ...]
    """Of each worker, by rank."""


class RestartForecast(NamedTuple):
    """What a restart would cost, and how long its gain could last."""

    restart_s: float = 10.0
    left_s: float = math.inf
    """Training time that is left at the present size [s]."""
    step_s: float = 0.0
    """A step, after which a group can leave [s]."""


class PolicyState(NamedTuple):
    """What a decision leaves for the next."""

    usable: frozenset[tuple[str, int]] = frozenset()
    """Nodes and their places, when they last changed."""
    since_s: float = -math.inf
    lacking_s: float | None = None
    """Since when there has been too little to train; None while there is enough."""
    held: frozenset[str] = frozenset()
    """Where the last group was; none before the first."""
    room_s: float | None = None
    """Since when there are nodes to grow to that are ready; None while there are none."""
    begin_s: float | None = None
    """When the first decision was made."""
    losses: int = 0
    """Times at which nodes were lost, or announced to be."""

    def loss_s(self, bounds: Bounds, now: float) -> float:
        """Mean time to the next loss, as far as is known [s]."""
        observed_s = 0.0 if self.begin_s is None else now - self.begin_s
        return mean_time_to_loss(bounds.expected_loss_s, observed_s, self.losses)


class Stay(NamedTuple):
    """Go on as it is: training, or waiting for capacity."""

    reason: str
    until_s: float = math.inf
    """When to look again though nothing has changed [s]."""


class Start(NamedTuple):
    """Start a group; none is running."""

    workers: int
    nodes: tuple[str, ...]
    """Of each worker."""
    reason: str


class Leave(NamedTuple):
    """Ask the group to bring its state to safety after the step it is at, so that another can start."""

    reason: str
    durable: bool = False
    """Nobody is left to keep it in memory: it has to go to the store."""


class GiveUp(NamedTuple):
    """Waited for long enough."""

    reason: str


class Replace(NamedTuple):
    """The group has lost workers and cannot go on: end it."""

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
    """The one rule of who trains. ``nodes`` are those alive, ``group`` is None when nobody trains."""
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
    """Where the next group would be, were all its nodes ready: a node for each worker."""
    usable = _usable(nodes)
    return _choose(_room(bounds, usable).size, usable, memory.held)


class _Room(NamedTuple):
    """How many workers fit."""

    size: int
    ready: int
    """On the nodes whose processes stand."""


def _room(bounds: Bounds, usable: Sequence[Node]) -> _Room:
    places, standing = sum([node.places for node in usable]), sum([node.standing for node in usable])
    return _Room(bounds.feasible(places), bounds.feasible(standing))


def _usable(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.leaves_at is None and not node.problem and node.places > 0]


def _without_group(
    bounds: Bounds, nodes: Sequence[Node], usable: Sequence[Node], room: _Room, memory: PolicyState, now: float
) -> tuple[Decision, PolicyState]:
    size = room.size
    if not size:
        lacking_s = now if memory.lacking_s is None else memory.lacking_s
        memory, lack = memory._replace(lacking_s=lacking_s), _lack(bounds, nodes, usable)
        if now - lacking_s >= bounds.wait_s:
            return GiveUp(f"waited for {bounds.wait_s:g} s, as elastic.wait says; {lack}"), memory
        return Stay(lack), memory
    memory = memory._replace(lacking_s=None)
    begins = not memory.held and not bounds.shares  # where others share, what there is was dealt out already
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
    if leaving := [alive[name] for name in mine if alive[name].leaves_at is not None]:
        first = min(node.leaves_at for node in leaving if node.leaves_at is not None)
        what = f"notice: {_names([node.id for node in leaving])} will be taken away in {max(0.0, first - now):.0f} s"
        by_s = first - bounds.reserve_s - prospects.step_s
        if now < by_s and (why := _not_yet(bounds, room, memory, by_s, now)):
            return why._replace(reason=f"{what}; {why.reason}")
        return Leave(what, durable=not room.size)
    if bad := [alive[name] for name in mine if alive[name].problem]:
        reason = "; ".join(f"{node.id[:8]} {node.problem}" for node in bad)
        return Leave(reason) if room.size else Stay(f"{reason}; there is nowhere else to go")
    owed = sum(max(0, number - alive[name].places) for name, number in Counter(group.nodes).items())
    if bounds.shares and owed:
        return Leave(f"{_count(owed, 'worker')} for other runs", durable=not room.size)
    return _growth(bounds, workers, room, prospects, memory, now)


def _not_yet(bounds: Bounds, room: _Room, memory: PolicyState, by_s: float, now: float) -> Stay | None:
    """Why not to leave nodes that go before ``by_s``."""
    loss_s = memory.loss_s(bounds, now)
    if not room.size:
        return Stay("too little is left to go on with, so it trains until then", by_s)
    if not _quiet(bounds, memory, now):
        return Stay("others may follow", by_s)
    if by_s - now > _LIKELY * loss_s:
        often = f"others may follow, one comes every {loss_s:.0f} s: one restart for all"
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
            f"{size} workers instead of {workers} would not pay: a restart takes {prospects.restart_s:.0f} s, and lasts "
            f"{lasts_s:.0f} s"
        )
    return Leave(f"grow from {workers} to {size} workers")


def _choose(size: int, usable: Sequence[Node], held: Collection[str]) -> tuple[str, ...]:
    """A node for each of ``size`` workers: those that have processes already, then the fewest."""
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
    reasons += [f"left out: {', '.join(left_out)}"] if left_out else []
    return "waiting for capacity: " + "; ".join(reasons)


def _names(ids: Collection[str]) -> str:
    return ", ".join(name[:8] for name in ids)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
