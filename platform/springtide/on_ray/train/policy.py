"""Execute the decisions of ``elastic/policy.py`` inside Ray Train's controller, and decide which failures are retried. The
only file that uses Ray Train's policies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import ray
import torch.distributed as dist
from ray.exceptions import RayError
from ray.train import FailureConfig, Result, ScalingConfig
from ray.train.torch import TorchTrainer

from springtide.dist import CollectiveError
from springtide.elastic import Interrupt
from springtide.elastic.limits import MemoryLimits
from springtide.elastic.policy import (
    Bounds,
    Decision,
    GiveUp,
    Leave,
    Node,
    PolicyState,
    Replace,
    Start,
    WorkerGroup,
    decide,
    following,
)
from springtide.errors import SpringtideError, StoppedWaiting, TrainingFailed, UnfitNode
from springtide.events import Decided, Failed, Ready, Stopped
from springtide.on_ray._ray_private import (
    DatasetsCallback,
    DefaultFailurePolicy,
    ElasticScalingPolicy,
    FailureDecision,
    NoopDecision,
    PlacementGroupCleanerCallback,
    ScalingDecision,
    Worker,
    WorkerGroupState,
    WorkerHealthCheckFailedError,
)
from springtide.on_ray.cluster.nodes import lost, observed, unanswering
from springtide.on_ray.cluster.notices import PreemptionWatchers
from springtide.on_ray.train.actor_context import run_as_actor
from springtide.on_ray.train.group import Controller, WorkerProcessPool
from springtide.on_ray.train.hang import diagnose
from springtide.on_ray.train.mailbox import Progress
from springtide.on_ray.train.worker import TrainJob
from springtide.on_ray.train.worker_lender import WorkerLender

_ANSWER_S = 2.0
_LOOK_S = 0.5
_MOST_HANGS = 3
"""Hangs at one step after which training fails."""
_NO_ROOM = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "out of memory", "low on memory")
"""Messages of torch, numpy and Ray when memory runs out."""
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Socket", "Broken pipe", "NCCL")
"""Messages of gloo and NCCL when a peer is gone."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


class SpringtideScalingPolicy(ElasticScalingPolicy):
    """Ray's elastic policy, which requests capacity, with our decisions."""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        bounds: Bounds,
        job: TrainJob,
        watches: PreemptionWatchers | None,
        workers: WorkerLender,
        limits: MemoryLimits,
    ) -> None:
        """``watches``: the watchers on the nodes, if any; ``limits``: those that the run's ``SpringtideFailurePolicy`` adds
        to."""
        super().__init__(scaling_config)
        self._processes, self._share = workers.processes, workers.share
        self._asked_for, self._job, self._mailbox = bounds, job, job.mailbox
        self._limits, self._began_at = limits, 0
        self._watches = watches
        self._memory = PolicyState()
        self._reported = ""
        """The last reported reason of a decision, without its numbers."""
        self._asked = False
        self._alive: set[str] = set()
        self._mine: dict[str, dict[str, float]] = {}
        self._looked_s = float("-inf")
        self._leaving = 0
        self._hangs: Counter[int] = Counter()

    @property
    def _bounds(self) -> Bounds:
        return dataclasses.replace(self._asked_for, fits=self._limits.least_workers)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start a group if there is room, else wait. Raises StoppedWaiting when asked to stop, TrainingFailed when
        the wait is over."""
        self._maybe_send_resource_request()
        self._asked = False
        progress = self._progress()
        if progress.stop:
            reason = "asked to, while no group trained; it can be resumed from its newest checkpoint"
            ended = Stopped(step=progress.step, status="stopped", reason=reason)
            self._mailbox.post([ended]).get()
            raise StoppedWaiting(reason)
        return self._start(progress)

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: object
    ) -> ScalingDecision:
        """Ask the group to leave when it should, and start the next one when it has left."""
        self._maybe_send_resource_request()
        progress = self._progress()
        busy = tuple(worker.metadata.node_id for worker in worker_group_state.workers)
        if progress.step != self._began_at:
            self._limits.trained(len(busy))
        if progress.left:
            return self._start(progress, busy, probe=False)
        if progress.silent_s > progress.longest_s:
            return self._end_hung(worker_group_state.workers, progress)
        decision = self._decide(self._nodes(busy, warm=True), WorkerGroup(busy), progress)
        if isinstance(decision, Replace):
            return self._start(progress, busy)
        if isinstance(decision, Leave) and not self._asked:
            self._mailbox.ask(Interrupt.EVACUATE if decision.durable else Interrupt.LEAVE)
            self._asked = True
        return NoopDecision()

    def _start(self, progress: Progress, busy: tuple[str, ...] = (), probe: bool = True) -> ScalingDecision:
        """Start a group if there is room. ``busy``: nodes of the group that ends; ``probe``: first check that nodes answer."""
        nodes = self._nodes(busy)
        if probe:
            silent = unanswering({node.id for node in nodes})
            nodes = [node for node in nodes if node.id not in silent]
        decision = self._decide(nodes, None, progress)
        if isinstance(decision, GiveUp):
            raise TrainingFailed(f"{decision.reason}; resume with --resume")
        if not isinstance(decision, Start):
            return NoopDecision()
        self._processes.prepare(decision.nodes, self._job)
        self._mailbox.limit_micro_batch(self._limits.rows_at_once(decision.workers))
        self._mailbox.reset_for_new_group()
        self._asked, self._began_at = False, progress.step
        return self._get_resize_decision(decision.workers)

    def _end_hung(self, workers: Sequence[Worker], progress: Progress) -> ScalingDecision:
        """Replace a group that sends no events any more; first write down what its ranks are doing."""
        found, silent = diagnose(workers, self._job.folder, progress.step)
        for worker in silent:  # it would not react to ``let_go``
            ray.kill(worker.actor)
        reason = f"no event for {progress.silent_s:.0f} s, {found}"
        self._hangs[progress.step] += 1
        again = self._hangs[progress.step] < _MOST_HANGS
        self._mailbox.post([Failed(step=progress.step, cause="hung", reason=reason, again=again)])
        if not again:
            raise TrainingFailed(f"training hung {_MOST_HANGS} times after step {progress.step}: {reason}")
        dead = {id(worker) for worker in silent}
        return self._start(progress, tuple(worker.metadata.node_id for worker in workers if id(worker) not in dead))

    def _decide(self, nodes: list[Node], group: WorkerGroup | None, progress: Progress) -> Decision:
        decision, self._memory = decide(self._bounds, nodes, group, progress.prospects, self._memory, time.monotonic())
        for node, took_s in self._processes.newly_ready():
            self._mailbox.post([Ready(step=progress.step, node=node, took_s=round(took_s, 3))])
        self._report(decision, progress.step)
        return decision

    def _nodes(self, busy: tuple[str, ...] = (), warm: bool = False) -> list[Node]:
        """Return the nodes as observed. ``warm``: start processes where the next group would be and none are."""
        problems = self._processes.problems()
        seen = observed(self._reserved(), self.scaling_config._resources_per_worker_not_none)
        nodes = [node._replace(problem=problems.get(node.id, "")) for node in seen]
        if self._share is not None:
            self._processes.trim({node.id: node.places for node in nodes}, busy)
        if self._watches is not None:
            self._watches.cover({node.id for node in nodes if node.places})
        self._ask_for_what_leaves(nodes)
        if warm:
            self._processes.warm(following(self._bounds, nodes, self._memory), busy)
        ready = self._processes.ready(busy)
        return [node._replace(ready=ready[node.id]) for node in nodes]

    def _progress(self) -> Progress:
        with contextlib.suppress(RayError):  # the mailbox is slow, or ends with its driver
            return self._mailbox.progress().get(_ANSWER_S) or Progress()
        return Progress()

    def _reserved(self) -> dict[str, dict[str, float]]:
        """Return node -> resources of this run. Ray looks for new nodes every 20 s; changed nodes make it look at once."""
        now = time.monotonic()
        if self._share is not None:
            with contextlib.suppress(RayError):
                self._mine = self._share.mine(_ANSWER_S)
        elif now - self._looked_s >= _LOOK_S:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            asked = self._autoscaling_coordinator.get_reserved_resources.remote(
                self._requester_id, alive != self._alive
            )
            self._looked_s = now
            with contextlib.suppress(RayError):
                self._mine = ray.get(asked, timeout=_ANSWER_S)
                self._alive = alive
        return self._mine

    def _get_num_workers_for_resource_request(self) -> int:
        """Add what leaving nodes hold: it is requested again before they are gone."""
        return self.scaling_config.max_workers + self._leaving

    def _ask_for_what_leaves(self, nodes: list[Node]) -> None:
        leaving = sum(node.places for node in nodes if node.leaves_at is not None)
        if leaving != self._leaving:
            self._leaving = leaving
            self._send_resource_request()

    def _report(self, decision: Decision, step: int) -> None:
        words = re.sub(r"\d+", "", decision.reason)
        if words != self._reported:
            self._reported = words
            self._mailbox.post([Decided(step=step, decision=type(decision).__name__.lower(), reason=decision.reason)])


class SpringtideFailurePolicy(DefaultFailurePolicy):
    """Ray's policy, but lost nodes do not count as failures, and an error that would recur is not retried: one of ours, or
    the same one at the same step."""

    def __init__(
        self, failures: FailureConfig, job: TrainJob, processes: WorkerProcessPool, limits: MemoryLimits
    ) -> None:
        """``limits``: those of the run, which this policy adds to."""
        super().__init__(failures)
        self._processes, self._limits = processes, limits
        self._config, self._mailbox = job.config, job.mailbox
        self._before: tuple[int, str] | None = None
        self._starts, self._starts_at = 0, -1
        """Consecutive groups that failed to start, and at which step."""

    def make_decision(self, training_failed_error: BaseException) -> FailureDecision:
        """Decide what to do about a failure, and record it in the run's journal."""
        if self._processes.closed:
            return FailureDecision.RAISE
        failures = getattr(training_failed_error, "worker_failures", None)
        nodes = set(self._processes.plan)
        gone = lost(nodes) | unanswering(nodes)
        if (ours := fatal(training_failed_error)) is not None:
            if isinstance(ours, StoppedWaiting):
                return FailureDecision.RAISE
            cause, decision = "failed workers" if failures is not None else "given up", FailureDecision.RAISE
            if isinstance(ours, UnfitNode) and ours.node in nodes:
                self._processes.ban(ours.node, str(ours))
                cause, decision = "unfit node", FailureDecision.RETRY
        elif gone:
            cause, decision = "lost nodes", FailureDecision.RETRY
        elif failures is not None:
            cause, decision = "failed workers", self._of_workers(training_failed_error, failures)
        else:
            cause, decision = "start-up", self._of_start(training_failed_error)
        lost_names = ", ".join(sorted(name[:8] for name in gone)) if cause == "lost nodes" else ""
        reason = lost_names or first_line(training_failed_error)
        if cause == "failed workers" and any(map(is_out_of_memory, (failures or {}).values())):
            cause, (decision, remedy) = "out of memory", self._with_less(decision)
            reason += f"; {remedy}"
        again = decision is FailureDecision.RETRY
        self._mailbox.post([Failed(step=self._step(), cause=cause, reason=reason, again=again)])
        return decision

    def _of_workers(self, error: BaseException, failures: Mapping[int, BaseException]) -> FailureDecision:
        # process ids, bytes and addresses differ each time; the rest of a message does not
        own = [
            _NUMBER.sub("#", f"{type(one).__name__}: {one}") for _, one in sorted(failures.items()) if not is_echo(one)
        ]
        if own:
            before, self._before = self._before, (self._step(), own[0])
            if self._before == before:
                return FailureDecision.RAISE
        return super().make_decision(error)

    def _with_less(self, decision: FailureDecision) -> tuple[FailureDecision, str]:
        """Retry with smaller micro-batches of the same global batch, if possible: fewer workers with more rows each ran out of
        memory. Else wait for a larger group, if one has trained. Returns the decision and a description of what changes."""
        lanes, exact = self._config.stream.num_lanes, self._config.parallel.exact
        workers = max(1, len(self._processes.plan))
        most_lanes = 1 if exact else -(-lanes // workers)  # in one micro-batch
        before = min(self._limits.rows_at_once(workers), most_lanes * self._config.stream.global_batch // lanes)
        if before >= 2:
            rows = self._limits.halve(workers, before)
            self._mailbox.limit_micro_batch(rows).get()
            return FailureDecision.RETRY, f"micro-batches have {rows} rows instead of {before} from now on"
        if self._limits.wait_for_more(workers, is_over=decision is FailureDecision.RAISE):
            least = self._limits.least_workers
            return FailureDecision.RETRY, f"a step does not fit {workers} workers: the run waits for {least} or more"
        return decision, "a micro-batch has only one row already"

    def _of_start(self, error: BaseException) -> FailureDecision:
        step = self._step()
        self._starts = self._starts + 1 if self._starts_at == step else 1
        self._starts_at = step
        if self._starts > self.failure_config.max_failures:
            return FailureDecision.RAISE
        return super().make_decision(error)

    def _step(self) -> int:
        with contextlib.suppress(RayError):  # the mailbox ends with its driver
            return (self._mailbox.progress().get(_ANSWER_S) or Progress()).step
        return 0


def is_echo(error: BaseException) -> bool:
    """Return whether a worker's failure is only the consequence of another worker's death."""
    return isinstance(error, WorkerHealthCheckFailedError | RayError | dist.DistError | CollectiveError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _ECHOES)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a worker ran out of memory, on its device or its host."""
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in _NO_ROOM)


def first_line(error: BaseException) -> str:
    """Return the first line of the first failed rank's error, or of the error itself."""
    failures = getattr(error, "worker_failures", None) or {}
    message = next(
        (f"rank {rank}: {one}" for rank, one in sorted(failures.items())),
        str(getattr(error, "controller_failure", error)),
    )
    return next(iter(message.strip().splitlines()), type(error).__name__)[:300]


def fatal(error: BaseException) -> SpringtideError | None:
    """Return our own error among the workers' failures or the controller's, None if there is none."""
    failures = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None)]
    for failure in failures:
        for candidate in (failure, getattr(failure, "cause", None)):  # Ray wraps what an actor's call raised
            if isinstance(candidate, SpringtideError):
                return candidate
    return None


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
        arguments["scaling_policy"] = SpringtideScalingPolicy(
            self.scaling_config, self._bounds, self._job, self._watches, self._workers, limits
        )
        # unused without placement groups and Ray Train datasets, and each would cost a process
        unused = PlacementGroupCleanerCallback | DatasetsCallback
        used = [one for one in callbacks if not isinstance(one, unused)]
        # not in its own actor, as in Ray: that is a process that takes four core-seconds to start
        with run_as_actor(self._job.mailbox.actor):
            controller = Controller(self._workers.processes, callbacks=used, **arguments)
            asyncio.run(controller.run())
        return controller.get_result()
