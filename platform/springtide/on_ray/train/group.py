"""Ray Train's group of workers, whose processes outlive it. The only file that touches Ray Train's worker groups.

    group of 3 --a node goes--> two processes let go --> group of 2 in the same processes: nothing is started, nothing imported

Ray's own group kills its processes and starts new ones, which takes longer than everything else of a restart together. A
process that does not let go in time (a collective that hangs) is killed, and a new one started, as Ray would.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup, worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.health import Health, unfit
from springtide.on_ray.cluster.nodes import unanswering
from springtide.on_ray.train.worker import let_go, warm_up

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""How long a process may take to let go of its group."""
_START_S = 180.0
"""How long a new process may take to come up."""
_SILENT = f"no worker came up on it in {_START_S:.0f} s"
_AGAIN_S = 30.0
"""How long a node is left out on which a process did not come up; twice as long each time."""


class WorkerProcess(NamedTuple):
    """Of a worker."""

    node: str
    actor: Any
    ready: Any
    """A reference to what it found of its device; it is there when the process is ready."""
    begin_s: float
    """When it was started, or became free."""
    is_new: bool = True
    """Whether it has not been in a group."""


class WorkerProcessPool:
    """Worker processes, of a run or of several one after the other, and which of them no group has now."""

    def __init__(self) -> None:
        self.plan: tuple[str, ...] = ()
        """The node of each worker of the next group."""
        self.job: dict[str, Any] = {}
        """What they are made ready for, as for ``worker.work``."""
        self.start: Any = None
        """Starts a worker's actor on a node, once there was a group."""
        self.closed = False
        """Whether they were ended for good."""
        self._all: list[Any] = []
        self._free: list[WorkerProcess] = []
        self._health: dict[str, Health] = {}
        self.stood: list[tuple[str, float]] = []
        """Nodes on which a new process has come to stand since somebody looked, and how long it took [s]."""
        self._fit: set[Any] = set()
        """What is known of free processes: references to what they found of their device."""
        self._left_out: dict[str, tuple[str, float]] = {}
        self._failures: Counter[str] = Counter()

    def problems(self) -> dict[str, str]:
        """Nodes that are not to be used now, and why."""
        now = time.monotonic()
        return {node: reason for node, (reason, until_s) in self._left_out.items() if now < until_s}

    def warm(self, nodes: Sequence[str], busy: Sequence[str]) -> None:
        """See that each of ``nodes`` has as many processes as it is named, those ``busy`` counted. A node whose process is not
        fit, or does not come up, has a problem from then on."""
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
        """How many processes stand on each node, those ``busy`` counted."""
        done = _done([process.ready for process in self._free], 0.0)
        return Counter(busy) + Counter(process.node for process in self._free if process.ready in done)

    def take(self) -> list[WorkerProcess]:
        """Processes for the plan, one a worker, as soon as they are ready. WorkerGroupStartupFailedError when one does not
        come up, or is not fit: its node has a problem from then on."""
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
        """End free processes on nodes that have fewer than ``places`` for this run now, those ``busy`` counted."""
        room, kept = Counter(places) - Counter(busy), []
        for process in self._free:
            if room[process.node] > 0:
                room[process.node] -= 1
                kept.append(process)
            else:
                ray.kill(process.actor)
        self._free = kept

    def give_back(self, processes: Sequence[WorkerProcess]) -> None:
        """Keep those whose node has no problem."""
        bad, self._free = self.problems(), self._free + list(processes)
        for process in self._free:
            if process.node in bad:
                ray.kill(process.actor)
        self._free = [process for process in self._free if process.node not in bad]

    def _begin(self, node: str) -> WorkerProcess:
        actor = self.start(node)
        self._all.append(actor)
        return WorkerProcess(node, actor, actor.execute.remote(warm_up, self.job), time.monotonic())

    def _examine(self, process: WorkerProcess) -> bool:
        node = process.node
        try:
            self._health[node] = ray.get(process.ready)
        except RayError as error:
            self._failures[node] += 1
            said = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
            self._leave_out(node, f"no worker came up on it: {said[-1][:200]}")
            return False
        reason = unfit(node, self._health)
        if reason:
            self._leave_out(node, reason, for_s=math.inf)
        elif process.is_new:
            self.stood.append((node, time.monotonic() - process.begin_s))
        return not reason

    def ban(self, node: str, reason: str) -> None:
        """Use a node no more for a while, longer each time."""
        self._failures[node] += 1
        self._leave_out(node, reason)

    def _leave_out(self, node: str, reason: str, for_s: float | None = None) -> None:
        if for_s is None:
            for_s = _AGAIN_S * 2 ** self._failures[node]
        self._left_out[node] = reason, time.monotonic() + for_s
        _log.warning("node %s is left out: %s", node, reason)

    def reclaim(self, workers: Sequence[Worker], gone: Collection[str]) -> None:
        """Keep the processes that let go of their group; the others end, those on nodes that are ``gone`` at once."""
        asked = {}
        for worker in workers:
            if worker.metadata.node_id in gone:
                ray.kill(worker.actor)
            else:
                asked[worker.actor.execute.remote(let_go, _PATIENCE_S)] = worker
        done = _done(list(asked), 2 * _PATIENCE_S)
        for answer, worker in asked.items():
            try:
                kept = answer in done and ray.get(answer)
            except RayError:
                kept = False
            if kept:
                node = worker.metadata.node_id
                health = ray.put(self._health[node])
                self._free.append(WorkerProcess(node, worker.actor, health, time.monotonic(), is_new=False))
            else:
                _log.warning("the worker on node %s did not let go and is ended", worker.metadata.node_id)
                ray.kill(worker.actor)

    def drop_unready(self) -> None:
        """A run is over: those that are still getting ready for it are of no use to the next."""
        done = _done([process.ready for process in self._free], 0.0)
        for process in self._free:
            if process.ready not in done:
                ray.kill(process.actor)
        self._free = [process for process in self._free if process.ready in done]

    def end(self) -> None:
        """End those that no group has."""
        for process in self._free:
            ray.kill(process.actor)
        self._free = []

    def close(self) -> None:
        """End all, wait until they are gone, and have no other started."""
        self.closed = True
        for actor in self._all:
            ray.kill(actor)
        for actor in self._all:  # one that still runs could start what is ended next
            with contextlib.suppress(RayError):
                ray.get(actor.get_metadata.remote(), timeout=_PATIENCE_S)


class Reservation(PlacementGroupHandle):
    """No placement group: each worker holds its own resources on the node that was chosen for it, and keeps them while the
    group around it changes."""

    placement_group = None

    def ready(self) -> Any:
        """A reference that is ready."""
        return ray.put(True)

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


class _ReleasedReservation(WorkerGroupState):
    """A group that is over; everything it had is kept."""

    def shutdown(self) -> None:
        """Nothing ends."""


class _NoSynchronization:
    """In the place of Ray's class of actors that its workers meet in to report: ours do not, and each would be one more process
    to start."""

    def options(self, **_: Any) -> Self:
        return self

    def remote(self, **_: Any) -> bool:
        return False


worker_group.SynchronizationActor = _NoSynchronization()


class PooledWorkerGroup(WorkerGroup):
    """A group on the nodes of ``processes.plan``."""

    processes: ClassVar[WorkerProcessPool]
    """The run's."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Reservation:
        return Reservation()

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, **_: Any
    ) -> list[Worker]:
        environment = self._get_worker_runtime_env(
            custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
        )
        processes = self.processes
        processes.start = _starter(resources_per_worker, environment)
        asked = {process.actor.get_metadata.remote(): process for process in processes.take()}
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
        """Let go of the workers; their processes stay for the next group."""
        if self.has_started():
            workers = self.get_workers()
            self.processes.reclaim(workers, unanswering({worker.metadata.node_id for worker in workers}))
            # what is left to Ray is to tell its callbacks; there is nobody it could wait for
            before = self.get_worker_group_state()
            self._worker_group_state: Any = _ReleasedReservation(
                before.start_time, before.placement_group_handle, [], before.sync_actor
            )
        super().shutdown()


def _done(refs: list[Any], timeout_s: float) -> set[Any]:
    """Those of ``refs`` that are there in time, with a value or an error."""
    return set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()


def _starter(resources: dict[str, float], environment: Any) -> Any:
    """A function that starts a worker process on a node."""
    others = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU", "memory")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    cls = ray.remote(RayTrainWorker)

    def start(node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return cls.options(runtime_env=environment, scheduling_strategy=there, **options).remote()

    return start


class Controller(TrainController):
    """Ray Train's controller with our groups."""

    def __init__(self, processes: WorkerProcessPool, **named: Any) -> None:
        super().__init__(**named)
        self.worker_group_cls = type("Group", (PooledWorkerGroup,), {"processes": processes})
