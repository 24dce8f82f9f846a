"""Simulate a run on a trace (a record of which nodes existed when), with the policy of real runs and a simulated clock.

    trace -> joins, notices, losses, hangs --decide()--> groups that train, leave and start -> worker-seconds

``Costs`` has the durations that do not depend on a decision, such as the time of a restart. A drill, a local run with real
faults, can measure them. When nodes are lost, training returns at once to the newest state that survives on devices, in node
memory or in storage. Work after that state counts as lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from springtide.elastic.copies import place, replicas_lost
from springtide.elastic.forecast import STEPS_TO_LEAVE, RestartForecast
from springtide.elastic.group_sizes import evenness, most_lanes
from springtide.elastic.node_table import Node, NodeTable
from springtide.elastic.policy import (
    Bounds,
    Decision,
    Leave,
    PolicyState,
    Replace,
    Start,
    Stay,
    WorkerGroup,
    decide,
)
from springtide.elastic.traces import Trace

SOON_S = 1e-3
"""Smallest advance of the simulated clock [s]."""


class Costs(NamedTuple):
    """Durations, and numbers of copies of the state, that the simulation assumes."""

    step_s: float = 10.0
    """Time of a step [s]. If batches are divided into lanes (fixed shares), the largest group takes this time; smaller groups
    take longer."""
    restart_s: float = 2.5
    """Time from the end of a group to the first step of the next group, if the next group's processes are ready [s]."""
    first_start_s: float = 20.0
    """Time until the first group trains [s]."""
    warm_up_s: float = 15.0
    """Time from the join of a node until its worker process is ready; training continues meanwhile [s]."""
    notice_s: float = 120.0
    """Time between the notice that a node will be lost and the loss; 0: nodes are lost without a notice [s]."""
    copies: int = 1
    """Number of copies of each in-memory snapshot on other nodes, placed by ``copies.place``."""
    store_every_s: float = 600.0
    """Time between two checkpoints in storage [s]. A checkpoint is used when the in-memory snapshots are lost."""
    save_s: float = 0.0
    """Training time that a checkpoint in storage costs [s]."""
    leave_steps: int = STEPS_TO_LEAVE
    """Number of steps that a group completes after the request to save and end, including the step in which it arrives."""
    copy_s: float = 0.5
    """Time to copy the state to other nodes' memory after the last step of a group that must end; part of ``restart_s`` [s]."""
    replica_shards: int = 0
    """Workers that together hold one copy of the state on their devices: 1 for DDP, the number of shards for HSDP. While a
    complete copy survives, a lost node costs only the current step. 0: copies on devices are not used."""
    hang_s: float = 300.0
    """Time until a hang is detected [s]."""


@dataclasses.dataclass
class SimulationResult:
    """Result of a simulated run; times in worker-seconds unless they end in ``_s``."""

    possible: float = 0.0
    """Worker time of an ideal run, which loses no time and always has the largest group that the nodes allow."""
    productive: float = 0.0
    recomputed: float = 0.0
    """Work that was lost and must be computed again, including steps that a loss interrupted."""
    restarting: float = 0.0
    waiting_s: float = 0.0
    """Time without a worker group, because there were too few nodes [s]."""
    restarts: int = 0
    lost_memory: int = 0
    """Number of times that in-memory snapshots were lost with the nodes that held them."""
    uneven: float = 0.0
    """Time within steps in which workers waited for workers that have one more lane (fixed share of a batch)."""
    saving: float = 0.0
    hanging: float = 0.0
    """Time from hangs until they were detected."""

    @property
    def goodput(self) -> float:
        """Productive time over all time that groups held workers. Waiting within a step counts as productive here, as in the
        accounts of real runs (``tracking/ledger.py``)."""
        steps = self.productive + self.uneven
        held = steps + self.recomputed + self.restarting + self.saving + self.hanging
        return steps / held if held else 0.0

    @property
    def of_ideal(self) -> float:
        """Productive time as a share of the time of a run that loses no time (``possible``)."""
        return self.productive / self.possible if self.possible else 0.0


class _Work(NamedTuple):
    """Work done up to some moment, such as a snapshot or a checkpoint [worker-seconds]."""

    productive: float = 0.0
    uneven: float = 0.0


class Simulation:
    """A simulation of one run on one trace (a record of which nodes existed when)."""

    def __init__(self, trace: Trace, bounds: Bounds, costs: Costs, warm_ups_s: Mapping[str, float]) -> None:
        self._bounds, self._costs, self._warm_ups_s = bounds, costs, warm_ups_s
        self._events, self._domains, self._end_s = timeline(trace, costs.notice_s), trace.domains, trace.end_s
        self._now, self._next = 0.0, 0
        """The simulated time [s], and the index of the next event in ``_events``."""
        self._nodes = NodeTable()
        self._ready_at: dict[str, float] = {}
        """Node whose worker process is not ready yet -> when the process will be ready, in order of joining [s]."""
        self._memory = PolicyState()
        self._group: WorkerGroup | None = None
        self._trains_from = math.inf
        self._leaves_s = self._hung_until_s = math.inf
        """When the group ends as requested, and when its hang is detected [s]. Each is infinite while there is no request or no
        hang."""
        self._step_s, self._even, self._trains = costs.step_s, 1.0, 1.0
        """The group's step time, including its share of the time of saves [s]; the mean share of a step in which a worker
        computes and does not wait; the share of the step time that is not spent on saves."""
        self._begun = self._stored = _Work()
        """Work done when the group began, and work done at the newest checkpoint."""
        self._since_save_s = self._next_save_s = 0.0
        """Training time from the newest checkpoint to the group's start, negative if the checkpoint was saved after the start;
        and training time from the group's start to the next checkpoint [s]."""
        self.outcome = SimulationResult()

    def run(self) -> SimulationResult:
        """Simulate from the start of the trace to its end."""
        while self._now < self._end_s:
            gone: list[str] = []
            while self._next < len(self._events) and self._events[self._next][0] <= self._now:
                _, what, nodes = self._events[self._next]
                gone += self._change(what, nodes)
                self._next += 1
            wake = min(self._act(gone), self._look())
            upcoming = self._events[self._next][0] if self._next < len(self._events) else self._end_s
            self._pass(min(upcoming, wake, self._end_s))
        return self.outcome

    def _look(self) -> float:
        """Return when to check again whether the run meets its deadline [s]. Infinite here, because only a subclass has a
        deadline."""
        return math.inf

    @property
    def _left_s(self) -> float:
        """Training time that is left until the end of the trace [s]."""
        return self._end_s - self._now

    def _change(self, what: str, nodes: Sequence[str]) -> list[str]:
        if what == "hang" and self._group is not None and self._trained_s > 0:
            self._go_back(self._whole_steps_s())
            self._hung_until_s = self._now + self._costs.hang_s
        for node in nodes:
            if what == "join":
                self._nodes.set(Node(node, 1, ready=0))
                self._ready_at[node] = self._now + self._warm_ups_s.get(node, self._costs.warm_up_s)
            elif what == "notice":
                if here := self._nodes.by_id.get(node):
                    self._nodes.set(here._replace(leaves_at=self._now + self._costs.notice_s))
            else:
                self._nodes.remove(node)
                self._ready_at.pop(node, None)
        return list(nodes) if what == "go" else []

    def _act(self, gone: Sequence[str]) -> float:
        """Decide about the worker group and carry the decision out. Return when to decide again at the latest [s]."""
        for node in [node for node, ready_s in self._ready_at.items() if ready_s <= self._now]:
            del self._ready_at[node]
            self._nodes.set(self._nodes.by_id[node]._replace(ready=None))
        decision = self._decide(self._group)
        if isinstance(decision, Replace):
            self._lose(set(gone))
            decision = self._decide(None)
        elif self._hung_until_s <= self._now + SOON_S:
            self._end_group()
            decision = self._decide(None)
        elif isinstance(decision, Leave) or self._leaves_s < math.inf:
            self._leaves_s = min(self._leaves_s, self._asked_leaves_s())
            if self._leaves_s > self._now + SOON_S:
                return min(self._leaves_s, self._hung_until_s)
            self._leave(isinstance(decision, Leave) and decision.durable)
            decision = self._decide(None)
        if isinstance(decision, Start) and self._group is None:
            self._start(decision)
        return min(self._next_look(decision), self._hung_until_s)

    def _decide(self, group: WorkerGroup | None) -> Decision:
        costs = self._costs
        prospects = RestartForecast(
            costs.restart_s, self._left_s, self._step_s, copy_s=costs.copy_s, leave_steps=costs.leave_steps
        )
        decision, self._memory = decide(self._bounds, self._nodes, group, prospects, self._memory, self._now)
        return decision

    def _start(self, decision: Start) -> None:
        bounds, costs, workers = self._bounds, self._costs, decision.workers
        first = not self._memory.held
        late = self._ready_at.keys() & set(decision.nodes)
        ready = max([self._now, *(self._ready_at[node] for node in late)])
        begin = self._now if first else ready
        self._trains_from = begin + (costs.first_start_s if first else costs.restart_s)
        self._group = WorkerGroup(decision.nodes)
        self._trains = costs.store_every_s / (costs.store_every_s + costs.save_s)
        self._even = evenness(bounds.lanes, workers)
        longer = (
            most_lanes(bounds.lanes, workers) / most_lanes(bounds.lanes, bounds.max_workers) if bounds.lanes else 1.0
        )
        self._step_s = costs.step_s * longer / self._trains
        self._begun = self._work
        self._next_save_s = self._whole_s(max(0.0, costs.store_every_s - self._since_save_s))
        self.outcome.restarts += not first

    @property
    def _work(self) -> _Work:
        return _Work(self.outcome.productive, self.outcome.uneven)

    @property
    def _trained_s(self) -> float:
        return max(0.0, self._now - self._trains_from)

    def _whole_steps_s(self) -> float:
        """Return the training time of the steps that the group has completed [s]."""
        return math.floor(self._trained_s / self._step_s + 1e-9) * self._step_s

    def _whole_s(self, time_s: float) -> float:
        """Return ``time_s`` rounded up to whole steps, at least one step [s]."""
        return max(1, math.ceil(time_s / self._step_s - 1e-9)) * self._step_s

    def _lose(self, gone: Collection[str]) -> None:
        """End the group at once, because nodes are lost. If surviving devices hold its whole state, only the current step is
        lost. If only in-memory snapshots hold the state, the step before is lost as well, because its snapshot is not complete.
        Else all work since the newest checkpoint is lost."""
        assert self._group is not None
        shards, nodes = self._costs.replica_shards, self._group.nodes
        if shards and not replicas_lost(nodes, gone, shards):
            self._go_back(self._whole_steps_s())
        elif not self._memory_lost(nodes, gone):
            self._go_back(max(0.0, self._whole_steps_s() - self._step_s))
        else:
            self.outcome.lost_memory += 1
            self._return_to(self._stored)
            self._since_save_s, self._begun, self._trains_from = 0.0, self._stored, math.inf
        self._end_group()

    def _memory_lost(self, nodes: Collection[str], gone: Collection[str]) -> bool:
        """Return True if some node is lost together with all nodes that hold copies of its in-memory snapshots."""
        copies, lost = self._costs.copies, {*nodes} & {*gone}
        if len(lost) <= min(copies, len({*nodes}) - 1):  # a snapshot is on `copies` + 1 nodes: one survives
            return False
        holders = place(nodes, self._domains, copies)
        return any(lost.issuperset(holders[node]) for node in lost)

    def _go_back(self, kept_s: float) -> None:
        """Return to the state after the group's first ``kept_s`` of training [s], and count all later work as lost."""
        kept_s = max(kept_s, -self._since_save_s)  # use the checkpoint if it is newer than that state
        self._return_to(self._after(kept_s))
        self._since_save_s += kept_s
        self._begun, self._trains_from = self._work, math.inf

    def _after(self, trained_s: float) -> _Work:
        assert self._group is not None
        work = trained_s * self._trains * len(self._group.nodes)
        return _Work(self._begun.productive + work * self._even, self._begun.uneven + work * (1 - self._even))

    def _return_to(self, work: _Work) -> None:
        lost = sum(self._work) - sum(work)
        self.outcome.recomputed += lost
        self.outcome.productive, self.outcome.uneven = work

    def _leave(self, durable: bool) -> None:
        """End the group between two steps, as requested. ``durable``: its state is saved as a checkpoint. Else the state is
        copied to other nodes' memory; if a node goes away before the copy is done, this counts as a loss."""
        assert self._group is not None
        safe_s = self._now + self._costs.copy_s
        early = {node.id for node in self._nodes.leaving.values() if (node.leaves_at or math.inf) < safe_s}
        early.intersection_update(self._group.nodes)
        if early and not durable:
            self._lose(early)
            return
        if durable:
            self._stored, self._since_save_s = self._work, -self._trained_s
        self._end_group()

    def _end_group(self) -> None:
        self._since_save_s += self._trained_s
        self._group, self._leaves_s, self._hung_until_s = None, math.inf, math.inf

    def _asked_leaves_s(self) -> float:
        """Return when the group ends if it is asked to leave now [s]."""
        step_s, trained_s = self._step_s, self._now - self._trains_from
        if trained_s <= 0:
            return self._trains_from + (self._costs.leave_steps - 1) * step_s
        steps = math.ceil(trained_s / step_s - 1e-9) + self._costs.leave_steps - 1
        return self._trains_from + steps * step_s

    def _next_look(self, decision: Decision) -> float:
        """Return the next time at which the decision can change although no node joins or leaves [s]."""
        looks = [self._memory.since_s + self._bounds.settle_s, *self._ready_at.values()]
        look_s = min((look for look in looks if look > self._now), default=math.inf)
        if isinstance(decision, Stay):
            look_s = min(look_s, decision.until_s)
        return max(look_s, self._now + SOON_S)

    def _pass(self, until_s: float) -> None:
        """Advance the clock to ``until_s`` and account for the time."""
        until_s = max(until_s, self._now + SOON_S)
        passed_s = until_s - self._now
        self.outcome.possible += self._bounds.feasible(len(self._nodes.by_id)) * passed_s
        if self._group is None:
            self.outcome.waiting_s += passed_s
        else:
            workers = len(self._group.nodes)
            trained_s = max(0.0, until_s - max(self._now, self._trains_from))
            idle = (passed_s - trained_s) * workers
            if self._hung_until_s < math.inf:
                self.outcome.hanging += idle
            else:
                self.outcome.restarting += idle
            work = trained_s * self._trains * workers
            self.outcome.productive += work * self._even
            self.outcome.uneven += work * (1 - self._even)
            self.outcome.saving += trained_s * (1 - self._trains) * workers
        self._now = until_s
        if self._group is not None and self._trained_s >= self._next_save_s:
            self._save()

    def _save(self) -> None:
        """Record the work done at the newest checkpoint that the group has saved by now."""
        every_s = self._whole_s(self._costs.store_every_s)
        saved_s = self._next_save_s + (self._trained_s - self._next_save_s) // every_s * every_s
        self._stored, self._since_save_s = self._after(saved_s), -saved_s
        self._next_save_s = saved_s + every_s


def simulate(
    trace: Trace, bounds: Bounds, costs: Costs, warm_ups_s: Mapping[str, float] = MappingProxyType({})
) -> SimulationResult:
    """Simulate a run that trains from the start of ``trace`` to its end, with one worker per node. ``warm_ups_s``: node -> time
    until its worker process is ready, for nodes where this time was measured [s]."""
    return Simulation(trace, bounds, costs, warm_ups_s).run()


def timeline(trace: Trace, notice_s: float) -> list[tuple[float, str, tuple[str, ...]]]:
    """Return the events of ``trace`` as (time [s], kind, nodes), sorted by time. Kinds are join, notice, go (a loss) and hang.
    At equal times a loss comes before a join."""
    found: list[tuple[float, str, tuple[str, ...]]] = [(time_s, "hang", ()) for time_s in trace.hangs_s]
    for change in trace.changes:
        if change.gone:
            found.append((change.time_s, "go", change.gone))
            if notice_s:
                found.append((max(0.0, change.time_s - notice_s), "notice", change.gone))
        if change.joined:
            found.append((change.time_s, "join", change.joined))
    order = {"go": 0, "join": 1, "notice": 2, "hang": 3}
    return sorted(found, key=lambda event: (event[0], order[event[1]]))


# Simulate training without in-memory snapshots, for comparison: a loss costs all work since the last checkpoint, and a restart.

CADENCES_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Save intervals that ``tuned_checkpoint_restart`` tries, to choose the best [s]."""


class TunedBaseline(NamedTuple):
    """Training with checkpoints only, at the save interval that is best for one trace."""

    every_s: float
    result: SimulationResult


def checkpoint_restart(
    trace: Trace, bounds: Bounds, every_s: float, restart_s: float, save_s: float = 0.0
) -> SimulationResult:
    """Simulate training with checkpoints only: a save every ``every_s``, which costs ``save_s`` of training time [s]. When a
    node of the group is lost, training restarts on all nodes that exist. After nodes have joined, it restarts at the next
    checkpoint. New processes start at no cost."""
    outcome, now, here = SimulationResult(), 0.0, frozenset[str]()
    group, trains_from, trains = frozenset[str](), math.inf, every_s / (every_s + save_s)
    events = [event for event in timeline(trace, 0.0) if event[1] != "hang"]
    for time_s, what, nodes in [*events, (trace.end_s, "end", ())]:
        workers, even = len(group), evenness(bounds.lanes, len(group)) if group else 1.0
        while now < time_s:
            grows = bool(group) and len(group) < bounds.feasible(len(here))
            saved = trains_from + every_s * (math.floor(max(0.0, now - trains_from) / every_s + 1e-9) + 1)
            until = min(time_s, saved) if grows else time_s
            trained_s = max(0.0, until - max(now, trains_from))
            outcome.possible += bounds.feasible(len(here)) * (until - now)
            outcome.productive += trained_s * trains * even * workers
            outcome.uneven += trained_s * trains * (1 - even) * workers
            outcome.saving += trained_s * (1 - trains) * workers
            outcome.restarting += (until - now - trained_s) * workers
            outcome.waiting_s += (until - now) * (not group)
            now = until
            if grows and now == saved:
                group, trains_from = _largest(bounds, here), now + restart_s
                workers, even = len(group), evenness(bounds.lanes, len(group))
                outcome.restarts += 1
        here = here | {*nodes} if what == "join" else here - {*nodes}
        if not group <= here or not group:
            lost = max(0.0, now - trains_from) % every_s * trains * workers if group else 0.0
            outcome.productive -= lost * even
            outcome.uneven -= lost * (1 - even)
            outcome.recomputed += lost
            outcome.restarts += bool(group)
            group = _largest(bounds, here)
            trains_from = now + restart_s if group else math.inf
    return outcome


def tuned_checkpoint_restart(trace: Trace, bounds: Bounds, restart_s: float, save_s: float) -> TunedBaseline:
    """Simulate training with checkpoints only, at the save interval of ``CADENCES_S`` that is best in hindsight for
    ``trace``."""
    found = [
        TunedBaseline(every_s, checkpoint_restart(trace, bounds, every_s, restart_s, save_s)) for every_s in CADENCES_S
    ]
    return max(found, key=lambda one: one.result.productive)


def _largest(bounds: Bounds, here: Collection[str]) -> frozenset[str]:
    return frozenset(sorted(here)[: bounds.feasible(len(here))])
