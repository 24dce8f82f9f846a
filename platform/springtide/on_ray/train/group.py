"""Ray Train's worker group, with processes that outlive it. The only file that uses Ray Train's worker groups.

    group of 3 --a node goes--> two processes let go --> group of 2 in the same processes: nothing is started, nothing imported

Ray's own group kills its processes and starts new ones, which takes longer than the rest of a restart. A process that does
not let go of its group in time (a collective hangs) is killed, and a new one started, as Ray would.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.health import Health, unfit
from springtide.on_ray._ray_private import (
    PlacementGroupHandle,
    RayTrainWorker,
    TrainController,
    Worker,
    WorkerGroup,
    WorkerGroupStartupFailedError,
    WorkerGroupState,
    replace_synchronization_actor,
)
from springtide.on_ray.cluster.nodes import unanswering
from springtide.on_ray.train.worker import TrainJob, let_go, warm_up

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""How long a process may take to let go of its group [s]."""
_START_S = 180.0
"""How long a new process may take to come up [s]."""
_SILENT = f"no worker came up on it in {_START_S:.0f} s"
_AGAIN_S = 30.0
"""How long a node is excluded on which a process did not come up; doubles with each failure [s]."""

Start = Callable[[str], ActorHandle]
"""Function that starts a worker's actor on a node."""


class WorkerProcess(NamedTuple):
    """The process of a worker."""

    node: str
    actor: ActorHandle
    ready: ObjectRef[Health]
    """A reference to its device check's result, which is available when the process is ready."""
    begin_s: float
    """When it was started or became free, of ``time.monotonic`` [s]."""
    is_new: bool = True
    """Whether it has never been in a group."""


class WorkerProcessPool:
    """The worker processes of one run, or of several in turn, and which of them are free: in no group."""

    def __init__(self) -> None:
        self.plan: tuple[str, ...] = ()
        """The node of each worker of the next group."""
        self.closed = False
        """Whether all processes were ended for good."""
        self._job: TrainJob | None = None
        """The job that they are prepared for."""
        self._start: Start | None = None
        """How the newest group starts actors; None before the first."""
        self._all: list[ActorHandle] = []
        self._free: list[WorkerProcess] = []
        self._health: dict[str, Health] = {}
        self._newly_ready: list[tuple[str, float]] = []
        self._fit: set[ObjectRef] = set()
        """The ``ready`` references of free processes that were checked and are fit."""
        self._left_out: dict[str, tuple[str, float]] = {}
        self._failures: Counter[str] = Counter()

    def prepare(self, plan: tuple[str, ...], job: TrainJob) -> None:
        """Prepare the next group: the node of each of its workers, and what they train."""
        self.plan, self._job = plan, job

    def newly_ready(self) -> list[tuple[str, float]]:
        """Return the nodes on which a new process became ready since the last call, and how long it took [s]."""
        found, self._newly_ready = self._newly_ready, []
        return found

    def problems(self) -> dict[str, str]:
        """Return the nodes that must not be used now, and why."""
        now = time.monotonic()
        return {node: reason for node, (reason, until_s) in self._left_out.items() if now < until_s}

    def warm(self, nodes: Sequence[str], busy: Sequence[str]) -> None:
        """Start processes until each node has one per occurrence in ``nodes``; those of ``busy`` count. A node with a process
        that is unfit or does not come up has a problem from then on."""
        have = Counter(busy) + Counter(process.node for process in self._free)
        self._free += [self._begin(node) for node in (Counter(nodes) - have).elements()]
        done = _done([process.ready for process in self._free], 0.0)
        self._fit &= done
        for process in self._free:
            if process.ready not in done:
                if time.monotonic() - process.begin_s > _START_S:
                    self._leave_out(process.node, _SILENT)
            elif process.ready not in self._fit and self._examine(process):
                self._fit.add(process.ready)
        self.give_back([])

    def ready(self, busy: Sequence[str]) -> Counter[str]:
        """Return the number of ready processes on each node; those of ``busy`` count."""
        done = _done([process.ready for process in self._free], 0.0)
        return Counter(busy) + Counter(process.node for process in self._free if process.ready in done)

    def take(self, start: Start) -> list[WorkerProcess]:
        """Return processes for the plan, one per worker, as soon as they are ready; ``start`` starts those that lack, and later
        ones. Raises WorkerGroupStartupFailedError if one does not come up or is unfit: its node has a problem from then
        on."""
        self._start = start
        taken: list[WorkerProcess] = []
        for node, number in Counter(self.plan).items():
            here = [process for process in self._free if process.node == node][:number]
            taken += here + [self._begin(node) for _ in range(number - len(here))]
        refs = [process.ready for process in taken]
        self._free = [process for process in self._free if process.ready not in refs]
        done = _done(refs, _START_S)
        for process in taken:
            if process.ready not in done:
                self._leave_out(process.node, _SILENT)
        fit = [process.ready in done and self._examine(process) for process in taken]
        if not all(fit):
            self.give_back(taken)
            raise WorkerGroupStartupFailedError("; ".join(f"{n[:8]}: {why}" for n, why in self.problems().items()))
        return taken

    def trim(self, places: Mapping[str, int], busy: Sequence[str]) -> None:
        """End free processes beyond the ``places`` that this run has on each node now; those of ``busy`` count."""
        room, kept = Counter(places) - Counter(busy), []
        for process in self._free:
            if room[process.node] > 0:
                room[process.node] -= 1
                kept.append(process)
            else:
                ray.kill(process.actor)
        self._free = kept

    def give_back(self, processes: Sequence[WorkerProcess]) -> None:
        """Make ``processes`` free again; end all free ones on nodes with a problem."""
        bad, self._free = self.problems(), self._free + list(processes)
        for process in self._free:
            if process.node in bad:
                ray.kill(process.actor)
        self._free = [process for process in self._free if process.node not in bad]

    def _begin(self, node: str) -> WorkerProcess:
        assert self._start is not None, "processes are started from the first group on"
        actor = self._start(node)
        self._all.append(actor)
        return WorkerProcess(node, actor, actor.execute.remote(warm_up, self._job), time.monotonic())

    def _examine(self, process: WorkerProcess) -> bool:
        node = process.node
        try:
            self._health[node] = ray.get(process.ready)
        except RayError as error:
            self._failures[node] += 1
            lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
            self._leave_out(node, f"no worker came up on it: {lines[-1][:200]}")
            return False
        reason = unfit(node, self._health)
        if reason:
            self._leave_out(node, reason, for_s=math.inf)
        elif process.is_new:
            self._newly_ready.append((node, time.monotonic() - process.begin_s))
        return not reason

    def ban(self, node: str, reason: str) -> None:
        """Exclude a node for a while, longer each time."""
        self._failures[node] += 1
        self._leave_out(node, reason)

    def _leave_out(self, node: str, reason: str, for_s: float | None = None) -> None:
        if for_s is None:
            for_s = _AGAIN_S * 2 ** self._failures[node]
        self._left_out[node] = reason, time.monotonic() + for_s
        _log.warning("node %s is excluded: %s", node, reason)

    def reclaim(self, workers: Sequence[Worker], gone: Collection[str]) -> None:
        """Keep the processes that let go of their group; end the others, those on ``gone`` nodes at once."""
        asked = {}
        for worker in workers:
            if worker.metadata.node_id in gone:
                ray.kill(worker.actor)
            else:
                asked[worker.actor.execute.remote(let_go, _PATIENCE_S)] = worker
        done = _done(list(asked), 2 * _PATIENCE_S)
        for answer, worker in asked.items():
            try:
                kept, why = answer in done and ray.get(answer), "did not let go of its group and is ended"
            except RayError:
                kept, why = False, "is lost"
            if kept:
                node = worker.metadata.node_id
                health = ray.put(self._health[node])
                self._free.append(WorkerProcess(node, worker.actor, health, time.monotonic(), is_new=False))
            else:
                _log.warning("the worker on node %s %s", worker.metadata.node_id[:8], why)
                ray.kill(worker.actor)

    def drop_unready(self) -> None:
        """End free processes that are not ready: they prepare for a run that is over, which is useless to the next."""
        done = _done([process.ready for process in self._free], 0.0)
        for process in self._free:
            if process.ready not in done:
                ray.kill(process.actor)
        self._free = [process for process in self._free if process.ready in done]

    def end(self) -> None:
        """End the free processes."""
        for process in self._free:
            ray.kill(process.actor)
        self._free = []

    def close(self) -> None:
        """End all processes for good, and wait until they are gone."""
        self.closed = True
        for actor in self._all:
            ray.kill(actor)
        for actor in self._all:  # one that still runs could restart what is ended next
            with contextlib.suppress(RayError):
                ray.get(actor.get_metadata.remote(), timeout=_PATIENCE_S)


class Reservation(PlacementGroupHandle):
    """A stand-in for the placement group: each worker holds its own resources on its chosen node, and keeps them while the
    group around it changes."""

    placement_group = None

    def ready(self) -> ObjectRef[bool]:
        """Return a reference that is ready."""
        return ray.put(True)

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


class _ReleasedReservation(WorkerGroupState):
    """The state of an ended group; all that it had is kept."""

    def shutdown(self) -> None:
        """Do nothing: its processes stay."""


class _NoSynchronization:
    """A stand-in for Ray's actor class in which workers synchronize to report: ours do not, and each actor is one more
    process to start."""

    def options(self, **_: object) -> Self:
        return self

    def remote(self, **_: object) -> bool:
        return False


class PooledWorkerGroup(WorkerGroup):
    """A worker group on the nodes of ``processes.plan``."""

    processes: ClassVar[WorkerProcessPool]
    """The processes of the run."""

    def _create_placement_group(self, scaling_config: object, worker_group_context: object) -> Reservation:
        return Reservation()

    def _create_workers(
        self, num_workers: int, placement_group: object, resources_per_worker: dict[str, float], **_: object
    ) -> list[Worker]:
        environment = self._get_worker_runtime_env(
            custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
        )
        processes = self.processes
        taken = processes.take(_starter(resources_per_worker, environment))
        asked = {process.actor.get_metadata.remote(): process for process in taken}
        done, workers, lost = _done(list(asked), _START_S), [], set()
        for answer, process in asked.items():
            try:
                found = ray.get(answer, timeout=None if answer in done else 0)
                workers.append(Worker(process.actor, found, resources_per_worker))
            except RayError:
                lost.add(answer)
                ray.kill(process.actor)
        if lost:
            processes.give_back([process for answer, process in asked.items() if answer not in lost])
            where = ", ".join(asked[answer].node[:8] for answer in lost)
            raise WorkerGroupStartupFailedError(f"a worker was lost before it began, on node {where}")
        assigned: list[Worker] = WorkerGroup._assign_worker_ranks(workers)
        return assigned

    def shutdown(self) -> None:
        """Release the workers; their processes stay for the next group."""
        if self.has_started():
            workers = self.get_workers()
            self.processes.reclaim(workers, unanswering({worker.metadata.node_id for worker in workers}))
            # Ray only calls its callbacks now; it has no workers left to wait for
            before = self.get_worker_group_state()
            self._worker_group_state: WorkerGroupState = _ReleasedReservation(
                before.start_time, before.placement_group_handle, [], before.sync_actor
            )
        super().shutdown()


def _done(refs: list[ObjectRef], timeout_s: float) -> set[ObjectRef]:
    """Return those of ``refs`` that are available in time, with a value or an error."""
    return set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()


def _starter(resources: dict[str, float], environment: Mapping[str, object]) -> Start:
    """Return a function that starts a worker process on a node."""
    others = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU", "memory")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    cls = ray.remote(RayTrainWorker)

    def start(node: str) -> ActorHandle:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return cls.options(runtime_env=environment, scheduling_strategy=there, **options).remote()

    return start


class Controller(TrainController):
    """Ray Train's controller with our worker groups."""

    def __init__(self, pool: WorkerProcessPool, **named: object) -> None:
        replace_synchronization_actor(_NoSynchronization())
        super().__init__(**named)

        class Group(PooledWorkerGroup):
            processes = pool

        self.worker_group_cls = Group
