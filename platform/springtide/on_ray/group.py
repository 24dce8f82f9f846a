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
from collections.abc import Collection, Sequence
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import ShuttingDownState
from ray.train.v2._internal.execution.worker_group import WorkerGroup, worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.health import Health, unfit
from springtide.on_ray.nodes import unanswering
from springtide.on_ray.worker import let_go, warm_up

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""How long a process may take to let go of its group."""
_START_S = 180.0
"""How long a new process may take to come up."""
_AGAIN_S = 30.0
"""How long a node is left out on which a process did not come up; twice as long each time."""


class Processes:
    """The worker processes of a run that no group has now, by node; in the controller's process, of which a run has one."""

    def __init__(self) -> None:
        self.plan: tuple[str, ...] = ()
        """The node of each worker of the next group."""
        self.job: dict[str, Any] = {}
        """What they are made ready for, as for ``worker.work``."""
        self.start: Any = None
        """Starts a worker process on a node, once there was a group."""
        self._idle: dict[str, list[Worker]] = {}
        self._warming: dict[str, list[tuple[Any, Any]]] = {}
        self._health: dict[str, Health] = {}
        self._left_out: dict[str, tuple[str, float]] = {}
        self._failures: Counter[str] = Counter()

    def problems(self) -> dict[str, str]:
        """Nodes that are not to be used now, and why."""
        now = time.monotonic()
        return {node: reason for node, (reason, until_s) in self._left_out.items() if now < until_s}

    def prepare(self, nodes: Sequence[str], busy: Sequence[str]) -> bool:
        """Whether each of ``nodes`` has as many processes as it is named, those ``busy`` counted, and all are ready; starts
        what is lacking. A node whose process is not fit has a problem from then on."""
        have = Counter(busy) + Counter({node: len(idle) for node, idle in self._idle.items()})
        lacking = Counter(nodes) - have
        for node, number in lacking.items():
            actors = self._warming.setdefault(node, [])
            actors += [self._begin(node) for _ in range(number - len(actors))]
        waited = [ready for node in lacking for _, ready in self._warming[node]]
        done = set(ray.wait(waited, num_returns=len(waited), timeout=0)[0]) if waited else set()
        fit = [self._examine(node, ready) for node in lacking for _, ready in self._warming[node] if ready in done]
        for node in self.problems().keys() & self._warming.keys():
            for actor, _ in self._warming.pop(node):
                ray.kill(actor)
        return len(fit) == len(waited) and all(fit)

    def take(self) -> list[Any]:
        """Ready actors for the plan, one a worker; processes of other nodes end. WorkerGroupStartupFailedError when one does
        not come up, or is not fit: its node has a problem from then on."""
        actors, awaited = [], {}
        for node, number in Counter(self.plan).items():
            here = [(worker.actor, None) for worker in self._idle.pop(node, [])] + self._warming.pop(node, [])
            for actor, _ in here[number:]:
                ray.kill(actor)
            here = here[:number] + [self._begin(node) for _ in range(number - len(here))]
            actors += [actor for actor, _ in here]
            awaited.update({ready: node for _, ready in here if ready is not None})
        self.end()
        done = set(ray.wait(list(awaited), num_returns=len(awaited), timeout=_START_S)[0]) if awaited else set()
        late = {node for ready, node in awaited.items() if ready not in done}
        for node in late:
            self._leave_out(node, f"no worker came up on it in {_START_S:.0f} s")
        fit = [self._examine(node, ready) for ready, node in awaited.items() if ready in done]
        if late or not all(fit):
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError("; ".join(f"{n[:8]}: {why}" for n, why in self.problems().items()))
        return actors

    def _begin(self, node: str) -> tuple[Any, Any]:
        actor = self.start(node)
        return actor, actor.execute.remote(warm_up, self.job)

    def _examine(self, node: str, ready: Any) -> bool:
        try:
            self._health[node] = ray.get(ready)
        except RayError as error:
            self._failures[node] += 1
            said = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
            self._leave_out(node, f"no worker came up on it: {said[-1][:200]}")
            return False
        reason = unfit(node, self._health)
        if reason:
            self._leave_out(node, reason, for_s=math.inf)
        return not reason

    def _leave_out(self, node: str, reason: str, for_s: float | None = None) -> None:
        if for_s is None:
            for_s = _AGAIN_S * 2 ** self._failures[node]
        self._left_out[node] = reason, time.monotonic() + for_s
        _log.warning("node %s is left out: %s", node, reason)

    def keep(self, workers: Sequence[Worker], gone: Collection[str]) -> None:
        """Keep the processes that let go of their group; the others end, those on nodes that are ``gone`` at once."""
        asked = {}
        for worker in workers:
            if worker.metadata.node_id in gone:
                ray.kill(worker.actor)
            else:
                asked[worker.actor.execute.remote(let_go, _PATIENCE_S)] = worker
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=2 * _PATIENCE_S) if asked else ([], [])
        for answer in done + late:
            worker = asked[answer]
            try:
                kept = answer in done and ray.get(answer)
            except RayError:
                kept = False
            if kept:
                self._idle.setdefault(worker.metadata.node_id, []).append(worker)
            else:
                _log.warning("the worker on node %s did not let go and is ended", worker.metadata.node_id)
                ray.kill(worker.actor)

    def end(self) -> None:
        """End them all."""
        for worker in (worker for idle in self._idle.values() for worker in idle):
            ray.kill(worker.actor)
        for actor, _ in (pair for warming in self._warming.values() for pair in warming):
            ray.kill(actor)
        self._idle, self._warming = {}, {}


PROCESSES = Processes()


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


class _Over(WorkerGroupState):
    """A group that is over; everything it had is kept."""

    def shutdown(self) -> None:
        """Nothing ends."""


class _OneSyncActor:
    """In the place of Ray's class of actors that its workers meet in: one for all groups. To start its process takes two
    seconds of a core, in the middle of a restart."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._actor: Any = None

    def options(self, **options: Any) -> Self:
        self._options = options
        return self

    def remote(self, **arguments: Any) -> Any:
        if self._actor is None:
            self._actor = SynchronizationActor.options(**self._options).remote(**arguments)
        else:
            self._actor.reset.remote()
        return self._actor


class Group(WorkerGroup):
    """A group on the nodes of ``PROCESSES.plan``."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Reservation:
        return Reservation()

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, **_: Any
    ) -> list[Worker]:
        environment = self._get_worker_runtime_env(
            custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
        )
        PROCESSES.start = _starter(resources_per_worker, environment)
        actors = PROCESSES.take()
        try:
            metadata = ray.get([actor.get_metadata.remote() for actor in actors], timeout=_START_S)
        except (RayError, GetTimeoutError) as error:
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError(f"a worker was lost before it began: {error}") from error
        workers = [Worker(actor, found, resources_per_worker) for actor, found in zip(actors, metadata, strict=True)]
        assigned: list[Worker] = WorkerGroup._assign_worker_ranks(workers)
        return assigned

    def shutdown(self) -> None:
        """Let go of the workers; their processes stay for the next group."""
        if self.has_started():
            workers = self.get_workers()
            PROCESSES.keep(workers, unanswering({worker.metadata.node_id for worker in workers}))
            # what is left to Ray is to tell its callbacks; there is nobody it could wait for
            before = self.get_worker_group_state()
            self._worker_group_state: Any = _Over(
                before.start_time, before.placement_group_handle, [], before.sync_actor
            )
        super().shutdown()


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

    worker_group_cls = Group

    def __init__(self, *arguments: Any, **named: Any) -> None:
        worker_group.SynchronizationActor = _OneSyncActor()
        super().__init__(*arguments, **named)

    def _shutdown_worker_group(self) -> None:
        super()._shutdown_worker_group()
        if isinstance(self.get_state(), ShuttingDownState):
            PROCESSES.end()

    async def abort(self) -> None:
        """End every process of the run."""
        with contextlib.suppress(Exception):
            PROCESSES.end()
        await super().abort()
