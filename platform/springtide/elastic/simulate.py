"""Simulate a run on a recorded cluster: the policy of real clusters, with a simulated clock.

    trace -> joins, notices, losses --decide()--> groups that train, leave and start -> worker-seconds

Durations that no decision sets (of a restart, of the loss of a node) are given as ``Costs``, measured by a drill.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from springtide.elastic.policy import (
    Bounds,
    Decision,
    Leave,
    Node,
    PolicyState,
    Replace,
    RestartForecast,
    Start,
    Stay,
    WorkerGroup,
    decide,
)
from springtide.elastic.traces import Trace

_SOON_S = 1e-3


class Costs(NamedTuple):
    """Durations and copies that the simulation assumes."""

    step_s: float = 10.0
    """Time of a step, at any number of workers [s]."""
    restart_s: float = 2.5
    """From one group to the next, if the processes are ready [s]."""
    first_start_s: float = 20.0
    """Until the first group trains [s]."""
    warm_up_s: float = 15.0
    """Until the process on a node that joined is ready, while training continues [s]."""
    notice_s: float = 120.0
    """Between a notice and the loss; 0 for no notice [s]."""
    copies: int = 1
    """Copies of each snapshot in memory, on the next nodes in a ring."""
    store_every_s: float = 600.0
    """Save interval of checkpoints in the store, used if the snapshots are lost, too [s]."""


@dataclasses.dataclass
class SimulationResult:
    """Result of a simulated run; times in worker-seconds unless they end in ``_s``."""

    possible: float = 0.0
    """A run without any lost time, always at the size that the nodes allow."""
    productive: float = 0.0
    recomputed: float = 0.0
    restarting: float = 0.0
    waiting_s: float = 0.0
    """Time without enough nodes [s]."""
    restarts: int = 0
    lost_memory: int = 0
    """Number of times that snapshots in memory were lost with their nodes."""

    @property
    def goodput(self) -> float:
        """Productive time over all time that groups held workers, as in the ledger."""
        held = self.productive + self.recomputed + self.restarting
        return self.productive / held if held else 0.0

    @property
    def of_ideal(self) -> float:
        """Productive time over possible time."""
        return self.productive / self.possible if self.possible else 0.0


class Simulation:
    """A simulation of one run on one trace."""

    def __init__(self, trace: Trace, bounds: Bounds, costs: Costs, warm_ups_s: Mapping[str, float]) -> None:
        self._bounds, self._costs, self._warm_ups_s = bounds, costs, warm_ups_s
        self._events = _events(trace, costs.notice_s)
        self._end_s = trace.end_s
        self._now = 0.0
        self._nodes: dict[str, Node] = {}
        self._ready_at: dict[str, float] = {}
        """When the process is ready, for nodes on which it is not yet; in order of joining."""
        self._memory = PolicyState()
        self._group: WorkerGroup | None = None
        self._trains_from = math.inf
        self._unsaved_s = 0.0
        """Training time since the last checkpoint in the store."""
        self._again_s = 0.0
        """Time to train again [worker-seconds]."""
        self.outcome = SimulationResult()

    def run(self) -> SimulationResult:
        """Simulate from the start of the trace to its end."""
        index = 0
        while self._now < self._end_s:
            gone: list[str] = []
            while index < len(self._events) and self._events[index][0] <= self._now:
                _, what, nodes = self._events[index]
                gone += self._change(what, nodes)
                index += 1
            upcoming = self._events[index][0] if index < len(self._events) else self._end_s
            wake = self._act(gone)
            self._pass(min(upcoming, wake, self._end_s))
        return self.outcome

    def _change(self, what: str, nodes: Sequence[str]) -> list[str]:
        for node in nodes:
            if what == "join":
                self._nodes[node] = Node(node, 1, ready=0)
                self._ready_at[node] = self._now + self._warm_ups_s.get(node, self._costs.warm_up_s)
            elif what == "notice":
                if node in self._nodes:
                    self._nodes[node] = self._nodes[node]._replace(leaves_at=self._now + self._costs.notice_s)
            else:
                self._nodes.pop(node, None)
                self._ready_at.pop(node, None)
        return list(nodes) if what == "go" else []

    def _act(self, gone: Sequence[str]) -> float:
        """Decide and carry the decision out. Returns the latest time of the next decision [s]."""
        for node in [node for node, ready_s in self._ready_at.items() if ready_s <= self._now]:
            del self._ready_at[node]
            self._nodes[node] = self._nodes[node]._replace(ready=1)
        decision = self._decide(self._group)
        if isinstance(decision, Replace):
            self._lose(set(gone))
            decision = self._decide(None)
        elif isinstance(decision, Leave) and self._group is not None:
            if (leaves := self._boundary()) > self._now + _SOON_S:
                return leaves
            self._group = None
            decision = self._decide(None)
        if isinstance(decision, Start) and self._group is None:
            self._start(decision)
        return self._next_look(decision)

    def _decide(self, group: WorkerGroup | None) -> Decision:
        prospects = RestartForecast(self._costs.restart_s, self._end_s - self._now, self._costs.step_s)
        nodes = list(self._nodes.values())
        decision, self._memory = decide(self._bounds, nodes, group, prospects, self._memory, self._now)
        return decision

    def _start(self, decision: Start) -> None:
        first = not self._memory.held
        ready = max((self._ready_at.get(node, self._now) for node in decision.nodes), default=self._now)
        begin = self._now if first else ready
        self._trains_from = begin + (self._costs.first_start_s if first else self._costs.restart_s)
        self._group = WorkerGroup(decision.nodes)
        self.outcome.restarts += not first

    def _lose(self, gone: Collection[str]) -> None:
        """End the group at once. It loses the current step and the one before, the snapshot of which is not complete."""
        assert self._group is not None
        trained_s = max(0.0, self._now - self._trains_from)
        step_s = self._costs.step_s
        lost_s = min(trained_s, trained_s % step_s + step_s)
        if not self._copied(gone):
            self.outcome.lost_memory += 1
            lost_s = max(lost_s, min(self._unsaved_s, self._costs.store_every_s))
        self._again_s += lost_s * len(self._group.nodes)
        self._group = None

    def _copied(self, gone: Collection[str]) -> bool:
        """Return whether a copy of each node's snapshot is left."""
        assert self._group is not None
        ring = sorted(set(self._group.nodes))
        keepers = self._costs.copies + 1
        return not any(
            all(ring[(place + one) % len(ring)] in gone for one in range(min(keepers, len(ring))))
            for place in range(len(ring))
        )

    def _boundary(self) -> float:
        """Return when the current step ends [s]."""
        trained_s = self._now - self._trains_from
        if trained_s < 0:
            return self._trains_from
        steps = math.ceil(trained_s / self._costs.step_s - 1e-9)
        return self._trains_from + steps * self._costs.step_s

    def _next_look(self, decision: Decision) -> float:
        """Return when a decision can change though no node joins or goes [s]."""
        looks = [self._memory.since_s + self._bounds.settle_s, *self._ready_at.values()]
        look_s = min((look for look in looks if look > self._now), default=math.inf)
        if isinstance(decision, Stay):
            look_s = min(look_s, decision.until_s)
        return max(look_s, self._now + _SOON_S)

    def _pass(self, until_s: float) -> None:
        """Advance the clock to ``until_s`` and account for the time."""
        until_s = max(until_s, self._now + _SOON_S)
        passed_s = until_s - self._now
        self.outcome.possible += self._bounds.feasible(len(self._nodes)) * passed_s
        if self._group is None:
            self.outcome.waiting_s += passed_s
        else:
            workers = len(self._group.nodes)
            trained_s = max(0.0, until_s - max(self._now, self._trains_from))
            self.outcome.restarting += (passed_s - trained_s) * workers
            again = min(self._again_s, trained_s * workers)
            self._again_s -= again
            self.outcome.recomputed += again
            self.outcome.productive += trained_s * workers - again
            self._unsaved_s = (self._unsaved_s + trained_s) % self._costs.store_every_s
        self._now = until_s


def simulate(
    trace: Trace, bounds: Bounds, costs: Costs, warm_ups_s: Mapping[str, float] = MappingProxyType({})
) -> SimulationResult:
    """Simulate a run of endless work from the start of ``trace`` to its end, with one worker per node. ``warm_ups_s``:
    of the nodes for which it was measured."""
    return Simulation(trace, bounds, costs, warm_ups_s).run()


def checkpoint_restart(trace: Trace, bounds: Bounds, every_s: float, restart_s: float) -> SimulationResult:
    """Simulate the same with checkpoints only, which cost nothing here: one every ``every_s``; restart on all nodes at
    every loss, and at the next checkpoint if there are more nodes."""
    outcome, now, here = SimulationResult(), 0.0, frozenset[str]()
    group, trains_from = frozenset[str](), math.inf
    for time_s, what, nodes in [*_events(trace, 0.0), (trace.end_s, "end", ())]:
        while now < time_s:
            grows = bool(group) and len(group) < bounds.feasible(len(here))
            saved = trains_from + every_s * (math.floor(max(0.0, now - trains_from) / every_s + 1e-9) + 1)
            until = min(time_s, saved) if grows else time_s
            trained_s = max(0.0, until - max(now, trains_from))
            outcome.possible += bounds.feasible(len(here)) * (until - now)
            outcome.productive += trained_s * len(group)
            outcome.restarting += (until - now - trained_s) * len(group)
            outcome.waiting_s += (until - now) * (not group)
            now = until
            if grows and now == saved:
                group, trains_from = _largest(bounds, here), now + restart_s
                outcome.restarts += 1
        here = here | {*nodes} if what == "join" else here - {*nodes}
        if not group <= here or not group:
            lost = max(0.0, now - trains_from) % every_s * len(group) if group else 0.0
            outcome.productive -= lost
            outcome.recomputed += lost
            outcome.restarts += bool(group)
            group = _largest(bounds, here)
            trains_from = now + restart_s if group else math.inf
    return outcome


def _largest(bounds: Bounds, here: Collection[str]) -> frozenset[str]:
    return frozenset(sorted(here)[: bounds.feasible(len(here))])


def _events(trace: Trace, notice_s: float) -> list[tuple[float, str, tuple[str, ...]]]:
    """Return joins, notices and losses in order of time; at equal times a loss comes before a join."""
    found: list[tuple[float, str, tuple[str, ...]]] = []
    for change in trace.changes:
        if change.gone:
            found.append((change.time_s, "go", change.gone))
            if notice_s:
                found.append((max(0.0, change.time_s - notice_s), "notice", change.gone))
        if change.joined:
            found.append((change.time_s, "join", change.joined))
    order = {"go": 0, "join": 1, "notice": 2}
    return sorted(found, key=lambda event: (event[0], order[event[1]]))
