"""Ray Train's hooks to start, watch, resize and end a worker group, and what we do in each. The policies, which decide, are in
``scaling_policy.py`` and ``failure_policy.py``.

    Ray calls, in this order                            we do
    -----------------------------------------------------------------------------------------------------------
    TorchTrainer.fit
      ._initialize_and_run_controller                   run the controller in the caller's thread, with our policies
    ScalingPolicy.make_decision_for_non_running_...     wait for nodes that answer, then start a group (``scaling_policy.py``)
    TrainController._execute_resize_decision            as Ray; a resize to 0 ends the group and its processes
      ._start_worker_group                              poll large groups less often
        WorkerGroup._start                              as Ray; if the group fails to form, free its processes
          ._create_placement_group                      reserve nothing: each process holds its own resources
          ._create_workers                              take ready processes on the planned nodes
    ScalingPolicy.make_decision_for_running_...         ask the group to leave, or replace it (``scaling_policy.py``)
    TrainController._poll_workers                       poll all workers, sooner if the group may have ended
      WorkerGroup.poll_status                           wait a moment for the answers; read the rest at the next poll
    FailurePolicy.make_decision                         decide whether to start another group (``failure_policy.py``)
    WorkerGroup.shutdown                                release the processes; they stay for the next group

    group of 3 --a node is lost--> two processes left --> group of 2 in the same processes: nothing is started, nothing imported

Ray's own group kills its processes and starts new ones, which takes longer than the rest of a restart. Here only a process
that does not leave its group in time, because a collective hangs, is killed and replaced. Processes are also killed if their
group cannot form, because they wait for a worker on a lost node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train import FailureConfig, Result
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.group_sizes import MemoryLimits
from springtide.elastic.policy import Bounds
from springtide.errors import StoppedWaiting
from springtide.faults import fault_point
from springtide.ray._ray_private import (
    CONTROLLER_LOG,
    DatasetsCallback,
    InitializingState,
    PlacementGroupCleanerCallback,
    PlacementGroupHandle,
    RayTrainWorker,
    ResizeDecision,
    RuntimeContext,
    TrainController,
    TrainControllerLoopIterationResult,
    TrainControllerState,
    Worker,
    WorkerGroup,
    WorkerGroupCallback,
    WorkerGroupPollStatus,
    WorkerGroupStartupFailedError,
    WorkerGroupState,
    WorkerGroupStateBuilder,
    replace_runtime_context,
    replace_synchronization_actor,
)
from springtide.ray.cluster.liveness import QUIET_S, Liveness
from springtide.ray.cluster.nodes import silent_nodes
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.train.failure_policy import SpringtideFailurePolicy
from springtide.ray.train.job import TrainJob
from springtide.ray.train.process_pool import PATIENCE_S, Start, StartCancelledError, WorkerProcessPool, last_line
from springtide.ray.train.scaling_policy import PrivateScalingPolicy, SpringtideScalingPolicy
from springtide.ray.train.worker_lender import WorkerLender

_log = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""How long a process that is ready may take to answer [s]."""
_CALLS_PER_S = 500.0
"""Most polls of workers by the controller; more would take much of its thread's time [calls/s]."""
_POLL_S = 0.05
"""How long one poll of a small group waits for its workers' answers; later answers are read at the next poll [s]."""
_SOON_S = 0.05
"""Time between two polls while a worker does not answer, or the group is about to leave [s]."""
_LOOK_S = 0.2
"""Time between two checks of the nodes of a small group while it forms [s]."""
_LOOKS_PER_S = 1000.0
"""Most connections per second to check the nodes of a larger group while it forms; each check of a node opens one connection
[nodes/s]."""


class Reservation(PlacementGroupHandle):
    """A stand-in for Ray's placement group. Each worker process holds its own resources on its node, and keeps them when the
    group changes."""

    placement_group = None

    def ready(self) -> ObjectRef[bool]:
        """Return a Ray reference whose value is available at once."""
        return ray.put(True)

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


class _ReleasedReservation(WorkerGroupState):
    """The state of an ended group. Its worker processes are kept."""

    def shutdown(self) -> None:
        """Do nothing, unlike Ray: the worker processes stay for the next group."""


class _NoSynchronization:
    """A stand-in for Ray's actor class that synchronizes reports of workers. Our workers do not report through Ray, and each
    such actor would be one more process to start."""

    def options(self, **_: object) -> Self:
        return self

    def remote(self, **_: object) -> bool:
        return False


class PooledWorkerGroup(WorkerGroup):
    """A worker group in processes of the pool, on the nodes of ``processes.plan``."""

    processes: ClassVar[WorkerProcessPool]
    """The run's process pool."""
    _taken: tuple[Worker, ...] = ()
    """The workers of a group that is forming."""
    _taken_s = 0.0
    _watch: threading.Thread | None = None
    _formation_ended: threading.Event
    """Set when the group's formation has succeeded or failed."""

    def _start(self) -> None:
        """Start the group. If it fails to form, for whatever reason, free its processes and raise
        WorkerGroupStartupFailedError, so that Ray starts another group. Processes that do not leave the group in time are
        killed, because they wait for a lost process."""
        self._formation_ended = threading.Event()
        try:
            try:
                self._start_impl(WorkerGroupStateBuilder())
            finally:
                self._formation_ended.set()
                if self._watch is not None:
                    self._watch.join()  # a late kill might hit a process of the next group
            self.processes.setup_times.add(time.monotonic() - self._taken_s, len(self._taken))
        except Exception as error:
            self._clear_state()
            gone = silent_nodes({worker.metadata.node_id for worker in self._taken})
            self.processes.reclaim(self._taken, gone, PATIENCE_S)
            if isinstance(error, WorkerGroupStartupFailedError):
                raise
            raise WorkerGroupStartupFailedError(f"the group did not form: {last_line(error)}") from error

    def _create_placement_group(self, scaling_config: object, worker_group_context: object) -> Reservation:
        return Reservation()

    def _create_workers(
        self, num_workers: int, placement_group: object, resources_per_worker: dict[str, float], **_: object
    ) -> list[Worker]:
        environment = self._get_worker_runtime_env(
            custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
        )
        processes = self.processes
        fault_point("take", "before")
        taken = processes.take(_starter(resources_per_worker, environment))
        fault_point("take", "after")
        asked = {process.actor.get_metadata.remote(): process for process in taken}
        done = set(ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)[0])
        workers, lost = [], list[str]()
        for answer, process in asked.items():
            try:
                if answer in done:
                    workers.append(Worker(process.actor, ray.get(answer), resources_per_worker))
                    continue
                processes.exclude(process.node, f"its worker does not answer in {_ANSWER_S:g} s")
            except RayError:  # do not exclude the node: perhaps only its process is lost
                pass
            lost.append(process.node)
            processes.discard(process)
        if lost:
            kept = {worker.actor for worker in workers}
            processes.give_back([process for process in taken if process.actor in kept])
            names = ", ".join(node[:8] for node in lost)
            raise WorkerGroupStartupFailedError(f"a worker was lost before it began, on node {names}")
        assigned: list[Worker] = WorkerGroup._assign_worker_ranks(workers)
        self._taken, self._taken_s = tuple(assigned), time.monotonic()
        self._watch = threading.Thread(target=self._end_stuck, name="springtide-forming", daemon=True)
        self._watch.start()
        return assigned

    def _end_stuck(self) -> None:
        """While the group forms, kill the workers for which all others would wait: workers on a lost node, which Ray notices
        much later, and workers whose process is gone. If forming takes far longer than before, one worker hangs: then kill all
        workers."""
        where, liveness = {worker.actor: worker.metadata.node_id for worker in self._taken}, Liveness()
        nodes = {worker.metadata.node_id for worker in self._taken}
        until_s = self._taken_s + self.processes.setup_times.limit_s(len(self._taken))
        pause_s = max(_LOOK_S, len(nodes) / _LOOKS_PER_S)
        while not self._formation_ended.wait(pause_s):
            is_late = time.monotonic() > until_s
            gone = nodes if is_late else silent_nodes(nodes)
            stopped = liveness.gone(where) if time.monotonic() - self._taken_s > QUIET_S else set()
            if is_late:
                _log.warning("the group of %d workers did not form in time and is ended", len(self._taken))
            for worker in self._taken:
                if worker.metadata.node_id in gone or worker.actor in stopped:
                    ray.kill(worker.actor)
            if stopped and not gone:
                _log.warning(
                    "%d workers do not answer (process or host stopped); a new group forms without them", len(stopped)
                )
            if gone or stopped:
                return

    @property
    def is_silent(self) -> bool:
        """Whether a worker has not answered the last poll yet, and so may be lost."""
        return bool(self._world_rank_to_ongoing_poll)

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Poll the workers, but do not wait for a worker that does not answer, because its node may be lost. Other workers then
        report errors, because their collective has failed."""
        short_s = _POLL_S + len(self.get_workers()) / _CALLS_PER_S
        return super().poll_status(short_s if timeout is None else min(timeout, short_s))

    def shutdown(self) -> None:
        """Release the workers; their processes stay for the next group."""
        if self.has_started():
            workers = self.get_workers()
            fault_point("shutdown", "before")
            self.processes.reclaim(workers, silent_nodes({worker.metadata.node_id for worker in workers}))
            fault_point("shutdown", "after")
            # give Ray a state without workers: it then only calls its callbacks, and waits for no worker
            before = self.get_worker_group_state()
            self._worker_group_state: WorkerGroupState = _ReleasedReservation(
                before.start_time, before.placement_group_handle, [], before.sync_actor
            )
        super().shutdown()


def _starter(resources: dict[str, float], environment: Mapping[str, object]) -> Start:
    """Return a function that starts a worker process with these resources on a given node, under a given name."""
    others = {kind: amount for kind, amount in resources.items() if kind not in ("CPU", "GPU", "memory")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    cls = ray.remote(RayTrainWorker)

    def start(node: str, name: str) -> ActorHandle:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return cls.options(name=name, runtime_env=environment, scheduling_strategy=there, **options).remote()

    return start


class _BeforeRendezvous(WorkerGroupCallback):
    """Reports a fault point, at which tests inject failures. Ray counts the group as started at this point, but its workers
    have not formed a process group yet."""

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        """Report a fault point. Ray calls this before all other callbacks."""
        fault_point("rendezvous", "before")


class Controller(TrainController):
    """Ray Train's controller with our worker groups (``PooledWorkerGroup``)."""

    _health_check_interval_s: float
    """Ray's interval between two polls of the workers [s]."""

    def __init__(self, pool: WorkerProcessPool, *, callbacks: Sequence[object], **named: object) -> None:
        replace_synchronization_actor(_NoSynchronization())
        super().__init__(callbacks=[_BeforeRendezvous(), *callbacks], **named)
        self._shortest_look_s = self._usual_look_s = self._health_check_interval_s

        class Group(PooledWorkerGroup):
            processes = pool

        self.worker_group_cls = Group

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        """Poll the workers, and set the interval to the next poll. It is short while a worker is silent or the group was asked
        to leave."""
        group, policy = self._worker_group, self._scaling_policy
        is_soon = (group is not None and group.is_silent) or policy.is_leaving
        self._health_check_interval_s = min(_SOON_S, self._usual_look_s) if is_soon else self._usual_look_s
        return await super()._poll_workers()

    def _execute_resize_decision(self, decision: ResizeDecision) -> TrainControllerLoopIterationResult:
        """Resize the group. A resize to 0 workers, which Ray does not support, ends the group and all free processes. Ray then
        asks the scaling policy for the next decision."""
        if decision.num_workers:
            return super()._execute_resize_decision(decision)
        if self._worker_group is not None:
            self._shutdown_worker_group()
        self.worker_group_cls.processes.end()
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=self._state, next_state=InitializingState()
        )

    def _make_and_handle_scaling_decision_for_non_running_worker_group(
        self, controller_state: TrainControllerState
    ) -> TrainControllerLoopIterationResult:
        """End a failed group before the next decision, because only then is it known which of its processes are ready. The next
        group can use them, and need not wait for a new process in place of a lost one."""
        if self._worker_group is not None:
            self._shutdown_worker_group()
        return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)

    def _start_worker_group(self, num_workers: int, resources_per_worker: dict[str, float]) -> None:
        """Start a group, and poll it less often if it is large: each poll costs a call to every worker, from one thread."""
        self._usual_look_s = max(self._shortest_look_s, num_workers / _CALLS_PER_S)
        super()._start_worker_group(num_workers, resources_per_worker)


class SpringtideTrainer(TorchTrainer):
    """TorchTrainer with our policies and worker groups; its controller runs in the thread that calls ``fit``."""

    def __init__(
        self,
        function: Callable[[], None],
        *,
        job: TrainJob,
        bounds: Bounds,
        watches: PreemptionWatchers | None,
        workers: WorkerLender,
        **named: object,
    ) -> None:
        super().__init__(function, **named)
        self._bounds, self._watches, self._job, self._workers = bounds, watches, job, workers

    def _initialize_and_run_controller(self, *, callbacks: list[object], **arguments: object) -> Result:
        failures = self.run_config.failure_config or FailureConfig()
        limits = MemoryLimits(self._job.config.train.rows_at_once, self._bounds.worker_multiple)
        arguments["failure_policy"] = SpringtideFailurePolicy(failures, self._job, self._workers.processes, limits)
        policy = PrivateScalingPolicy if self._workers.is_alone else SpringtideScalingPolicy
        arguments["scaling_policy"] = policy(
            self.scaling_config, self._bounds, self._job, self._watches, self._workers, limits
        )
        # drop callbacks that we do not need (no placement groups, no Ray Train datasets), because each would cost a process
        unused = PlacementGroupCleanerCallback | DatasetsCallback
        used = [one for one in callbacks if not isinstance(one, unused)]
        # run the controller in this thread: Ray would run it in an actor, a process that takes four core-seconds to start
        with run_as_actor(self._job.mailbox.actor), contextlib.ExitStack() as stack:
            if self._watches is not None:
                stack.callback(self._watches.end)
            log, quiet = logging.getLogger(CONTROLLER_LOG), _WithoutStops()
            log.addFilter(quiet)
            stack.callback(log.removeFilter, quiet)
            controller = Controller(self._workers.processes, callbacks=used, **arguments)
            asyncio.run(controller.run())
        return controller.get_result()


class _WithoutStops(logging.Filter):
    """Drops the stack trace that Ray's controller logs when a run is asked to stop: the run itself logs that in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], StoppedWaiting | StartCancelledError))


# Run code in a thread of the driver, although Ray expects it to run in an actor. The only file that uses Ray's process context.

_ACTING = threading.local()


class _Context(RuntimeContext):
    """This process's runtime context. In a thread under ``run_as_actor`` it reports the given actor as the current one."""

    def get_actor_id(self) -> str | None:
        actor = getattr(_ACTING, "actor", None)
        return actor._actor_id.hex() if actor is not None else super().get_actor_id()

    @property
    def current_actor(self) -> ActorHandle:
        actor = getattr(_ACTING, "actor", None)
        return actor if actor is not None else super().current_actor


@contextlib.contextmanager
def run_as_actor(actor: ActorHandle) -> Iterator[None]:
    """Make Ray report ``actor`` as the current actor of this thread in the block. The actor must stay alive until the block
    ends."""
    before = ray.get_runtime_context()
    if not isinstance(before, _Context):
        replace_runtime_context(_Context(before.worker))
    _ACTING.actor = actor
    try:
        yield
    finally:
        _ACTING.actor = None
