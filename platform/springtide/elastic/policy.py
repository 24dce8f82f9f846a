"""How many workers, on which nodes, and when to change that.

    what is seen (nodes, the group that trains) + what was remembered + now -> a decision with a reason in words

``on_ray/policy.py`` looks at a cluster and carries decisions out. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a run asked for."""

    min_workers: int
    max_workers: int
    cell: int = 1
    """Workers come in multiples of this."""
    settle_s: float = 2.0
    """Changes that follow each other faster than this are one change."""
    reserve_s: float = 5.0
    """Before a node goes, what it takes to bring the state to safety."""
    grow: Literal["when_it_pays", "always", "never"] = "when_it_pays"
    wait_s: float = math.inf
    """How long to wait for ``min_workers``."""

    def feasible(self, places: int) -> int:
        """The most workers that ``places`` hold; 0 when they are too few."""
        size = min(places, self.max_workers) // self.cell * self.cell
        return size if size >= self.min_workers else 0


class Node(NamedTuple):
    """A node that is alive."""

    id: str
    places: int
    """How many workers it holds."""
    leaves_at: float | None = None
    """When it will be taken away, if that was announced [s]."""
    problem: str = ""
    """Why it is not to be used."""


class Group(NamedTuple):
    """The workers that train."""

    nodes: tuple[str, ...]
    """Of each worker, by rank."""


class Prospects(NamedTuple):
    """What a restart would cost, and how long its gain would last."""

    restart_s: float = 10.0
    loss_s: float = 3600.0
    """Mean time to the next loss of a worker [s]."""
    left_s: float = math.inf
    """Training time that is left at the present size [s]."""


class Memory(NamedTuple):
    """What a decision leaves for the next."""

    usable: frozenset[tuple[str, int]] = frozenset()
    """Nodes and their places, when they last changed."""
    since_s: float = -math.inf
    lacking_s: float | None = None
    """Since when there has been too little to train; None while there is enough."""
    held: frozenset[str] = frozenset()
    """Where the last group was; none before the first."""


class Stay(NamedTuple):
    """Go on as it is: training, or waiting for capacity."""

    reason: str


class Start(NamedTuple):
    """Start a group; none is running."""

    workers: int
    nodes: tuple[str, ...]
    """Of each worker."""
    reason: str


class Leave(NamedTuple):
    """Ask the group to bring its state to safety after the step it is at, so that another can start."""

    reason: str
    by_s: float = math.inf
    """When that has to begin; earlier is better, once there is somewhere to go on [s]."""
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
    bounds: Bounds, nodes: Sequence[Node], group: Group | None, prospects: Prospects, memory: Memory, now: float
) -> tuple[Decision, Memory]:
    """The one rule of who trains. ``nodes`` are those alive, ``group`` is None when nobody trains."""
    usable = [node for node in nodes if node.leaves_at is None and not node.problem and node.places > 0]
    here = frozenset((node.id, node.places) for node in usable)
    if here != memory.usable:
        memory = memory._replace(usable=here, since_s=now)
    quiet = now - memory.since_s >= bounds.settle_s
    size = bounds.feasible(sum(node.places for node in usable))
    if group is None:
        return _without_group(bounds, nodes, usable, size, quiet, memory, now)
    memory = memory._replace(held=frozenset(group.nodes), lacking_s=None)
    return _with_group(bounds, nodes, group, size, quiet, prospects, now), memory


def _without_group(
    bounds: Bounds, nodes: Sequence[Node], usable: Sequence[Node], size: int, quiet: bool, memory: Memory, now: float
) -> tuple[Decision, Memory]:
    if not size:
        lacking_s = now if memory.lacking_s is None else memory.lacking_s
        memory, lack = memory._replace(lacking_s=lacking_s), _lack(bounds, nodes, usable)
        if now - lacking_s >= bounds.wait_s:
            return GiveUp(f"waited for {bounds.wait_s:g} s, as elastic.wait says; {lack}"), memory
        return Stay(lack), memory
    memory = memory._replace(lacking_s=None)
    if size < bounds.feasible(bounds.max_workers) and not quiet and not memory.held:
        return Stay(f"room for {size} of {bounds.max_workers} workers; more nodes may be joining"), memory
    chosen = _choose(size, usable, memory.held)
    reason = f"{size} of {bounds.max_workers} workers on {_count(len(set(chosen)), 'node')}"
    return Start(size, chosen, reason), memory


def _with_group(
    bounds: Bounds, nodes: Sequence[Node], group: Group, size: int, quiet: bool, prospects: Prospects, now: float
) -> Decision:
    alive = {node.id: node for node in nodes}
    workers, mine = len(group.nodes), dict.fromkeys(group.nodes)
    if lost := [name for name in mine if name not in alive]:
        return Replace(f"lost {_names(lost)}")
    if leaving := [alive[name] for name in mine if alive[name].leaves_at is not None]:
        first = min(node.leaves_at for node in leaving if node.leaves_at is not None)
        what = f"notice: {_names([node.id for node in leaving])} will be taken away in {max(0.0, first - now):.0f} s"
        by_s = first - bounds.reserve_s
        if not size and now < by_s:
            return Stay(f"{what}; too little is left to go on with, so it trains until then")
        if not quiet and now < by_s:
            return Stay(f"{what}; others may follow")
        return Leave(what, by_s, durable=not size)
    if bad := [alive[name] for name in mine if alive[name].problem]:
        reason = "; ".join(f"{node.id[:8]} {node.problem}" for node in bad)
        return Leave(reason) if size else Stay(f"{reason}; there is nowhere else to go")
    if size <= workers:
        return Stay(f"{workers} workers train")
    if not quiet:
        return Stay(f"room for {size} workers instead of {workers}; more nodes may be joining")
    return _growth(bounds, workers, size, prospects)


def _growth(bounds: Bounds, workers: int, size: int, prospects: Prospects) -> Decision:
    if bounds.grow == "never":
        return Stay(f"room for {size} workers instead of {workers}, elastic.grow is 'never'")
    lasts_s = min(prospects.loss_s, prospects.left_s)
    if bounds.grow != "always" and size * (lasts_s - prospects.restart_s) <= workers * lasts_s:
        return Stay(
            f"{size} workers instead of {workers} would not pay: a restart takes {prospects.restart_s:.0f} s, and lasts "
            f"{lasts_s:.0f} s"
        )
    return Leave(f"grow from {workers} to {size} workers")


def _choose(size: int, usable: Sequence[Node], held: Collection[str]) -> tuple[str, ...]:
    """A node for each of ``size`` workers: those that have processes already, then the fewest."""
    ranked = sorted(usable, key=lambda node: (node.id not in held, -node.places, node.id))
    return tuple([node.id for node in ranked for _ in range(node.places)][:size])


def _lack(bounds: Bounds, nodes: Sequence[Node], usable: Sequence[Node]) -> str:
    places = sum(node.places for node in usable)
    left_out = [f"{node.id[:8]} {node.problem}" for node in nodes if node.problem]
    leaving = [node.id for node in nodes if node.leaves_at is not None]
    reasons = [f"room for {places} workers, elastic.min_workers is {bounds.min_workers}"]
    reasons += [f"leaving: {_names(leaving)}"] if leaving else []
    reasons += [f"left out: {', '.join(left_out)}"] if left_out else []
    return "waiting for capacity: " + "; ".join(reasons)


def _names(ids: Collection[str]) -> str:
    return ", ".join(name[:8] for name in ids)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
