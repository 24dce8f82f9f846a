"""The pool of a run's worker processes, which outlive its worker groups. It tracks which processes are free, and which nodes
are excluded and for how long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from springtide.elastic.copies import LiveShard, newest_holders
from springtide.elastic.health import Health, HealthTable
from springtide.elastic.patience import StartTimes, ban_s
from springtide.elastic.policy import Node
from springtide.ray._ray_private import Worker, WorkerGroupStartupFailedError
from springtide.ray.cluster.liveness import QUIET_S, Liveness, answers
from springtide.ray.cluster.nodes import silent_nodes
from springtide.ray.loading import load_worker
from springtide.ray.names import name_of
from springtide.ray.train.job import TrainJob
from springtide.ray.train.worker import let_go, settle, warm_up

_log = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""How long a process may take to leave its worker group [s]."""
START_S = 600.0
"""Most time for a new process to become ready [s]. It is long because eight processes of a node may load torch over a network,
and then compile."""
_MEET_S = 180.0
"""Most time for ready processes to form a group [s]."""
_LEAST_START_S = 20.0
"""Lower bound of the time limits for starting a process and for forming a group, however fast earlier ones were [s]. A node may
have to load Python and torch first."""
_ALONE_S = 20.0
"""Once enough processes for a group are ready, wait this long for more, counted from the newest ready process [s]."""
_SETTLE_S = 30.0
"""After a group is lost, a process may take this long to store its shard of the state on its node [s]."""
_LOOK_S = 1.0
"""Time between two checks of starting processes [s]."""
_MEASURE_S = 5.0
"""How long a second measurement of a node's network may take [s]."""

Start = Callable[[str, str], ActorHandle]
"""Function that starts a worker's actor; takes the node and the actor's name."""


class UnfitNodesError(WorkerGroupStartupFailedError):
    """A group cannot start: a device or network check failed on a node, or the workers of some nodes did not come up although
    others did. The next group starts without the failed nodes."""


class StartCancelledError(WorkerGroupStartupFailedError):
    """The run was asked to stop while the processes of a group came up."""


class WorkerProcess(NamedTuple):
    """A worker process of the pool."""

    node: str
    actor: ActorHandle
    ready: ObjectRef[Health]
    """Reference to the result of the process's checks (``warm_up``). The process is ready once this result is available."""
    begin_s: float
    """When it was started or became free, by ``time.monotonic`` [s]."""
    is_new: bool = True
    """Whether it has never been in a group."""


class WorkerProcessPool:
    """The worker processes of one run, or of several runs in turn. It knows which processes are free (in no worker group)."""

    def __init__(self) -> None:
        self.owner = "springtide"
        """Owner of the processes; their names begin with it (``names.owner_of``)."""
        self.plan: tuple[str, ...] = ()
        """The node of each worker of the next group."""
        self.not_before_s = 0.0
        """The next group may not start before this time, by ``time.monotonic`` [s]. There is a pause after a store or the start
        of a group has failed."""
        self.setup_times = StartTimes(_LEAST_START_S, _MEET_S)
        """How long ready processes have taken to form a group, in earlier starts."""
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Returns True to stop waiting for starting processes. Called about once a second during the wait."""
        self._start_times = StartTimes(_LEAST_START_S, START_S)
        """How long new processes have taken to become ready, in earlier starts."""
        self._closed = threading.Event()
        self._job: TrainJob | None = None
        """The job that new processes prepare for."""
        self._was_taken = False
        """Whether ``take`` has ever returned processes for a group."""
        self._start: Start | None = None
        """The newest group's function to start an actor; None before the first group."""
        self._all: set[ActorHandle] = set()
        """All actors that the pool has started and not ended."""
        self._free: list[WorkerProcess] = []
        self._health: dict[str, Health] = {}
        self._measured: dict[str, ActorHandle] = {}
        """Node -> the one process on it that measures the node's network speed."""
        self._remarks: set[str] = set()
        self._leaving: set[str] = set()
        self._newly_ready: list[tuple[str, float]] = []
        self._fit: set[ObjectRef] = set()
        """The ``ready`` references of free processes that have passed their checks."""
        self._slow: set[ObjectRef] = set()
        """The ``ready`` references of processes that take longer to start than others. Until a process is ready, groups start
        without its node."""
        self._can_start: Callable[[int], bool] = lambda workers: False
        """Returns True if a group of this many workers can train."""
        self._left_out: dict[str, tuple[str, float]] = {}
        self._failures: Counter[str] = Counter()

    @property
    def closed(self) -> bool:
        """Whether all processes were ended for good."""
        return self._closed.is_set()

    def prepare(
        self, plan: tuple[str, ...], job: TrainJob, can_start: Callable[[int], bool] = lambda workers: False
    ) -> None:
        """Prepare the next group. ``plan``: node of each worker. ``job``: what the group trains. ``can_start``: returns True if
        a smaller group of this many workers could also train."""
        self.plan, self._job, self._can_start = plan, job, can_start

    def newly_ready(self) -> list[tuple[str, float]]:
        """Return the nodes on which a new process became ready since the last call, and how long each process took [s]."""
        found, self._newly_ready = self._newly_ready, []
        return found

    def observe(self, nodes: Sequence[Node]) -> None:
        """Update the pool to the cluster's current ``nodes``, and forget nodes that are gone. The measured speed of a new node
        is compared only with that of live nodes that stay."""
        alive = {node.id for node in nodes}
        self._leaving = {node.id for node in nodes if node.leaves_at is not None}
        tables: tuple[dict[str, Any], ...] = (self._health, self._measured, self._failures, self._left_out)
        for known in tables:
            for node in known.keys() - alive:
                del known[node]
        self._keep([process for process in self._free if process.node in alive])

    def problems(self) -> dict[str, str]:
        """Return the nodes that must not be used now, and why."""
        now = time.monotonic()
        slow = [process for process in self._free if process.ready in self._slow]
        done = _done([process.ready for process in slow], 0.0)
        self._slow &= {process.ready for process in slow} - done
        found = {one.node: "its worker takes longer to start than others" for one in slow if one.ready not in done}
        return found | self._excluded(now)

    def _excluded(self, now: float) -> dict[str, str]:
        return {node: reason for node, (reason, until_s) in self._left_out.items() if now < until_s}

    def warm(self, nodes: Sequence[str], busy: Sequence[str]) -> None:
        """Start missing processes: a node that occurs twice in ``nodes`` gets two in all. Processes of the current group, on
        the nodes ``busy``, are included. If a process fails a check or does not become ready, its node is excluded for a
        while."""
        have = Counter(busy) + Counter(process.node for process in self._free)
        self._free += [self._begin(node) for node in (Counter(nodes) - have).elements()]
        done = _done([process.ready for process in self._free], 0.0)
        self._fit &= done
        for process in self._free:
            # no group waits for free processes, so a node that must load torch first may take up to START_S
            if process.ready not in done and time.monotonic() - process.begin_s > START_S:
                self.exclude(process.node, _never_came_up(process))
        came_up = [process for process in self._free if process.ready in done and process.ready not in self._fit]
        fit = {ready for ready, is_fit in self._check(came_up).items() if is_fit}
        self._fit |= fit
        for process in came_up:
            if process.is_new and process.ready in fit:
                self._start_times.add(time.monotonic() - process.begin_s)
        self.give_back([])

    def ready(self, busy: Sequence[str]) -> Counter[str]:
        """Return the number of ready processes on each node, including those of the current group (``busy``)."""
        done = _done([process.ready for process in self._free], 0.0)
        return Counter(busy) + Counter(process.node for process in self._free if process.ready in done)

    def held(self, busy: Sequence[str]) -> Counter[str]:
        """Return the number of processes on each node: ready, starting, and those of the current group (``busy``)."""
        return Counter(busy) + Counter(process.node for process in self._free)

    def take(self, start: Start) -> list[WorkerProcess]:
        """Return one process per worker of the plan, as soon as all are ready. ``start`` is called for missing processes, and
        later by ``warm``. If a process is gone or far slower than the others, this group does not start, and the next group
        leaves out that process's node. Raises StartCancelledError if ``is_cancelled`` returns True,
        WorkerGroupStartupFailedError if no process came up. Raises UnfitNodesError if some processes came up, but others did
        not or failed a check."""
        self._start = start
        taken: list[WorkerProcess] = []
        lacking, left = Counter(self.plan), list[WorkerProcess]()
        free: dict[str, list[WorkerProcess]] = {node: [] for node in lacking}
        for process in self._free:
            is_wanted = lacking[process.node] > 0
            lacking[process.node] -= is_wanted
            (free[process.node] if is_wanted else left).append(process)
        for node, here in free.items():
            taken += here + [self._begin(node) for _ in range(lacking[node])]
        self._free = left
        done, gone = self._await(taken)
        if len(done) < len(taken) and self.is_cancelled():
            self.give_back(taken)
            raise StartCancelledError("the run was asked to stop while its processes came up")
        for process in taken:
            if process.ready in done:
                continue
            if process.ready in gone:
                # leave the node out briefly, and count no failure: a stopped process or host may resume at any time
                why = "its worker does not answer: its process or its host is stopped"
                self._left_out[process.node] = why, time.monotonic() + ban_s(0)
                _log.warning("node %s is left out for %.0f s: %s", process.node[:8], ban_s(0), why)
            elif self._can_start(len(done)) and not self._is_late(process):
                self._slow.add(process.ready)
            else:
                self.exclude(process.node, _never_came_up(process))
        found = self._check([process for process in taken if process.ready in done - self._fit])
        if len(done) < len(taken) or not all(found.values()):
            self.give_back(taken)
            came_up = done - {ready for ready, is_fit in found.items() if is_fit is None}
            error = UnfitNodesError if came_up else WorkerGroupStartupFailedError
            raise error("; ".join(f"{n[:8]}: {why}" for n, why in self.problems().items()))
        self._was_taken = True
        return taken

    def trim(self, places: Mapping[str, int], busy: Sequence[str]) -> None:
        """End surplus free processes, so that this run has at most ``places[node]`` processes on each node. Processes of the
        current group, on the nodes ``busy``, are included."""
        room, kept = Counter(places) - Counter(busy), []
        for process in self._free:
            if room[process.node] > 0:
                room[process.node] -= 1
                kept.append(process)
        self._keep(kept)

    def give_back(self, processes: Sequence[WorkerProcess]) -> None:
        """Make ``processes`` free again; end all free processes on excluded nodes."""
        bad = self._excluded(time.monotonic())
        self._free += processes
        self._keep([process for process in self._free if process.node not in bad])

    def wait(self, timeout_s: float) -> bool:
        """Wait until a free process becomes ready, or all processes are ended for good. Returns False after ``timeout_s``."""
        refs = [process.ready for process in self._free]
        done = _done(refs, 0.0)
        if starting := [ref for ref in refs if ref not in done]:
            return bool(_done(starting, timeout_s, at_least=1))
        return self._closed.wait(timeout_s)

    def _begin(self, node: str) -> WorkerProcess:
        assert self._start is not None, "processes are started from the first group on"
        if self.closed:
            raise WorkerGroupStartupFailedError("the run's driver has ended all processes")
        actor = self._start(node, name_of(self.owner, "worker"))
        self._all.add(actor)
        if self.closed:  # another thread has closed the pool, and may have missed this actor
            self._end(actor)
            raise WorkerGroupStartupFailedError("the run's driver has ended all processes")
        # measure the network once per node, and again if the process that was to measure it has ended
        measure_network = self._measured.get(node) not in self._all
        if measure_network:
            self._measured[node] = actor
        actor.execute.remote(load_worker)  # load modules first: unpickling the job would import them more slowly
        ready = actor.execute.remote(warm_up, self._job, measure_network, not self._was_taken)
        return WorkerProcess(node, actor, ready, time.monotonic())

    def _await(self, processes: Sequence[WorkerProcess]) -> tuple[set[ObjectRef], set[ObjectRef]]:
        """Wait for the processes to become ready. Returns early in three cases: every process that is not ready is gone; those
        that are not ready have taken far longer than earlier starts of this run; enough processes for a group have been ready
        for a while. Returns the ``ready`` references that are available, and the ``ready`` references of processes that are
        gone."""
        done, gone, liveness = _done([process.ready for process in processes], 0.0), set[ObjectRef](), Liveness()
        begin_s = newest_s = time.monotonic()
        while waiting := {process.ready: process for process in processes if process.ready not in done}:
            left_s = self._start_times.limit_s() + max(one.begin_s for one in waiting.values()) - time.monotonic()
            if self._can_start(len(done)):
                left_s = min(left_s, newest_s + _ALONE_S - time.monotonic())
            # wait for a quarter of the processes at a time: the cost of a call grows with the number of references
            newly = _done(list(waiting), max(0.0, min(left_s, _LOOK_S)), at_least=-(-len(waiting) // 4))
            if time.monotonic() - begin_s > QUIET_S:
                found = liveness.gone({one.actor: one.node for ref, one in waiting.items() if ref not in newly})
                gone = {ref for ref, one in waiting.items() if one.actor in found}
            is_over = not newly and (left_s <= _LOOK_S or len(gone) == len(waiting))
            if is_over or self.is_cancelled():
                break
            for ref in newly:
                self._start_times.add(time.monotonic() - waiting[ref].begin_s)
                newest_s = time.monotonic()
            done |= newly
        return done, gone - done

    def _is_late(self, process: WorkerProcess) -> bool:
        """Return True if a process has taken longer than the time limit, which is computed from earlier starts of this run."""
        return time.monotonic() - process.begin_s > self._start_times.limit_s()

    def _check(self, processes: Sequence[WorkerProcess]) -> dict[ObjectRef, bool | None]:
        """Return the ``ready`` reference of each process -> the result of ``_is_fit``. Only for processes that are ready or
        have ended."""
        known = HealthTable({node: one for node, one in self._health.items() if node not in self._leaving})
        return {process.ready: self._is_fit(process, known) for process in processes}

    def _is_fit(self, process: WorkerProcess, known: HealthTable) -> bool | None:
        """Return True if a process, which is ready or has ended, may train; False if a check failed on its node; None if the
        process did not come up. Unless the result is True, the node is excluded."""
        node = process.node
        try:
            health = ray.get(process.ready)
        except RayError as error:
            self.exclude(node, f"no worker came up on it: {last_line(error)}", is_process_lost=True)
            return None
        before = self._health.get(node)
        if before is not None and not health.network_bytes_per_s:  # another process measured the node's network
            health = health._replace(network_bytes_per_s=before.network_bytes_per_s)
        reason = known.unfit(node, health)
        # if only the node's network is too slow, measure it again: other processes may have used it during the first
        # measurement
        if reason and not known.unfit(node, health._replace(network_bytes_per_s=0.0)):
            health = health._replace(network_bytes_per_s=max(health.network_bytes_per_s, self._network(process)))
            reason = known.unfit(node, health)
        self._health[node] = health
        if node not in self._leaving:
            known.add(node, health)
        if health.remark and health.remark not in self._remarks:
            self._remarks.add(health.remark)
            _log.warning("node %s: %s", node[:8], health.remark)
        if reason:
            self.ban(node, reason)
        elif process.is_new:
            self._newly_ready.append((node, time.monotonic() - process.begin_s))
        return not reason

    def _network(self, process: WorkerProcess) -> float:
        """Measure the network speed of a process's node again, while no other node is measured; 0 if that fails [bytes/s]."""
        assert self._job is not None, "processes are prepared for a job"
        with contextlib.suppress(RayError):
            # on any error of Ray, also a time-out, the speed is 0
            speed: float = ray.get(process.actor.execute.remote(self._job.mailbox.fetch_speed), timeout=_MEASURE_S)
            return speed
        return 0.0

    def exclude(self, node: str, reason: str, is_process_lost: bool = False) -> None:
        """Exclude a node whose process fails, hangs or is lost, for a time that grows with each failure. Logged as INFO instead
        of WARNING if the node itself may be lost: Ray notices a lost node later than the end of its processes."""
        is_silent = bool(silent_nodes([node]))
        if is_silent or (is_process_lost and not self._failures[node]):
            self._failures[node] += 1
            for_s = ban_s(self._failures[node] - 1)
            self._left_out[node] = "does not answer" if is_silent else reason, time.monotonic() + for_s
            _log.info("node %s %s; it may be used again in %.0f s", node[:8], self._left_out[node][0], for_s)
        else:
            self.ban(node, reason)

    def discard(self, process: WorkerProcess) -> None:
        """End a process that is not free."""
        self._end(process.actor)

    def ban(self, node: str, reason: str) -> None:
        """Exclude a node for a while, longer each time."""
        self._failures[node] += 1
        for_s = ban_s(self._failures[node])
        self._left_out[node] = reason, time.monotonic() + for_s
        _log.warning("node %s is excluded for %.0f s: %s", node, for_s, reason)

    def reclaim(self, workers: Sequence[Worker], gone: Collection[str], wait_s: float = 2 * PATIENCE_S) -> None:
        """Take back the processes of an ended group; ``workers`` are ordered by rank. Processes that leave the group within
        ``wait_s`` [s] become free; other processes are killed. Processes on ``gone`` nodes are killed at once. If the surviving
        processes together have a whole copy of the training state, they first store it on their nodes."""
        survivors = [rank for rank, worker in enumerate(workers) if worker.metadata.node_id not in gone]
        for worker in workers:
            if worker.metadata.node_id in gone:
                self._end(worker.actor)
        stay = [workers[rank] for rank in survivors]
        asked = [(worker, worker.actor.execute.remote(let_go, PATIENCE_S, survivors)) for worker in stay]
        for worker, outcome in _settled(_outcomes(asked, wait_s)):
            node = worker.metadata.node_id
            if outcome is True:
                health = ray.put(self._health.get(node, Health(0.0, 0.0)))
                self._free.append(WorkerProcess(node, worker.actor, health, time.monotonic(), is_new=False))
            else:
                _log.warning("the worker on node %s %s", node[:8], outcome)
                self._end(worker.actor)

    def drop_unready(self) -> None:
        """End free processes that are not ready, because they still prepare for a run that is over."""
        done = _done([process.ready for process in self._free], 0.0)
        self._keep([process for process in self._free if process.ready in done])

    def end(self) -> None:
        """End the free processes."""
        self._keep([])

    def close(self) -> None:
        """End all processes for good, and wait until they are gone."""
        self._closed.set()
        actors = list(self._all)
        for actor in actors:
            self._end(actor)
        # wait until they have ended: a process that still runs could restart actors that the caller ends next
        _done([actor.get_metadata.remote() for actor in actors], PATIENCE_S)

    def _keep(self, processes: list[WorkerProcess]) -> None:
        """End the free processes that are not among ``processes``."""
        kept = {process.ready for process in processes}
        for process in self._free:
            if process.ready not in kept:
                self._end(process.actor)
        self._free = processes

    def _end(self, actor: ActorHandle) -> None:
        self._all.discard(actor)
        ray.kill(actor)


Outcome = LiveShard | str | Literal[True]
"""Result of a request to leave a group: True if the process has left it, or the reason why it has not. A process that still has
its shard of the training state returns the shard instead."""


def _outcomes(asked: Sequence[tuple[Worker, ObjectRef]], wait_s: float) -> list[tuple[Worker, Outcome]]:
    """Return each worker with its answer to a request: to leave its group, or to store its shard of the state. Workers whose
    process is gone are not waited for."""
    done = answers({answer: (worker.actor, worker.metadata.node_id) for worker, answer in asked}, wait_s)
    found: list[tuple[Worker, Outcome]] = []
    for worker, answer in asked:
        try:
            outcome = answer in done and ray.get(answer)
            found.append((worker, outcome or "did not let go of its group and is ended"))
        except RayError:
            found.append((worker, "is lost"))
    return found


def _settled(outcomes: Sequence[tuple[Worker, Outcome]]) -> list[tuple[Worker, Outcome]]:
    """Send a last request to the workers that still have a shard of the state. Workers that together hold the newest whole
    state must store their shards; all others must drop them. Returns each worker with its final outcome."""
    offers = [(worker, offer) for worker, offer in outcomes if isinstance(offer, LiveShard)]
    ranks = newest_holders([offer for _, offer in offers])
    part = set(ranks)
    asked = [
        (worker, worker.actor.execute.remote(settle, ranks if offer.rank in part else ())) for worker, offer in offers
    ]
    others = [(worker, outcome) for worker, outcome in outcomes if not isinstance(outcome, LiveShard)]
    return others + _outcomes(asked, _SETTLE_S)


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message. For an error from another process, it is the last line of the original
    error."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:200]


def _never_came_up(process: WorkerProcess) -> str:
    return f"no worker came up on it in {time.monotonic() - process.begin_s:.0f} s"


def _done(refs: list[ObjectRef], timeout_s: float, at_least: int | None = None) -> set[ObjectRef]:
    """Return those of ``refs`` that have a value or an error within ``timeout_s`` [s]. Returns as soon as all of them have one,
    or ``at_least`` this many."""
    return set(ray.wait(refs, num_returns=at_least or len(refs), timeout=timeout_s)[0]) if refs else set()
