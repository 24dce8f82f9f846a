"""Ray Train's group of workers, whose processes outlive it. The only file that touches Ray Train's worker groups.

    group of 3 --a node goes--> two processes let go --> group of 2 in the same processes: nothing is started, nothing imported

Ray's own group kills its processes and starts new ones, which takes longer than everything else of a restart together. A
process that does not let go in time (a collective that hangs) is killed, and a new one started, as Ray would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import ShuttingDownState
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.on_ray.nodes import unanswering
from springtide.on_ray.worker import let_go, warm_up

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""How long a process may take to let go of its group."""
_START_S = 60.0


class Processes:
    """The worker processes of a run that no group has now, by node; in the controller's process, of which a run has one."""

    def __init__(self) -> None:
        self.plan: tuple[str, ...] = ()
        """The node of each worker of the next group."""
        self.start: Any = None
        """Starts a worker process on a node, once there was a group."""
        self._idle: dict[str, list[Worker]] = {}
        self._warming: dict[str, list[tuple[Any, Any]]] = {}

    def prepare(self, nodes: Sequence[str], busy: Sequence[str], job: dict[str, Any]) -> bool:
        """Whether each of ``nodes`` has as many processes as it is named, those ``busy`` counted; starts what is lacking, ready
        for ``job``."""
        have = Counter(busy) + Counter({node: len(idle) for node, idle in self._idle.items()})
        lacking = Counter(nodes) - have
        for node, number in lacking.items():
            actors = self._warming.setdefault(node, [])
            while len(actors) < number:
                actor = self.start(node)
                actors.append((actor, actor.execute.remote(warm_up, job)))
        awaited = [ready for node in lacking for _, ready in self._warming[node]]
        return len(ray.wait(awaited, num_returns=len(awaited), timeout=0)[0]) == len(awaited) if awaited else True

    def take(self) -> list[Any]:
        """Actors for the plan, one a worker; processes of other nodes end."""
        actors = []
        for node, number in Counter(self.plan).items():
            here = [worker.actor for worker in self._idle.pop(node, [])]
            here += [actor for actor, _ in self._warming.pop(node, [])]
            for actor in here[number:]:
                ray.kill(actor)
            actors += here[:number] + [self.start(node) for _ in range(number - len(here))]
        self.end()
        return actors

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
            asked = [actor.get_metadata.remote() for actor in actors]
            workers = [
                Worker(actor, found, resources_per_worker)
                for actor, found in zip(actors, ray.get(asked, timeout=_START_S), strict=True)
            ]
        except (RayError, GetTimeoutError) as error:
            for actor in actors:
                ray.kill(actor)
            if isinstance(error, GetTimeoutError):
                raise WorkerGroupStartupTimeoutError(num_workers=num_workers) from error
            raise WorkerGroupStartupFailedError(f"a worker did not start: {error}") from error
        assigned: list[Worker] = WorkerGroup._assign_worker_ranks(workers)
        return assigned

    def shutdown(self) -> None:
        """Let go of the workers; their processes stay for the next group."""
        if self.has_started():
            workers = self.get_workers()
            PROCESSES.keep(workers, unanswering({worker.metadata.node_id for worker in workers}))
            # what is left to Ray is to tell its callbacks; there is nobody it could wait for
            self._worker_group_state: Any = dataclasses.replace(self.get_worker_group_state(), workers=[])
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

    def _shutdown_worker_group(self) -> None:
        super()._shutdown_worker_group()
        if isinstance(self.get_state(), ShuttingDownState):
            PROCESSES.end()

    async def abort(self) -> None:
        """End every process of the run."""
        with contextlib.suppress(Exception):
            PROCESSES.end()
        await super().abort()
