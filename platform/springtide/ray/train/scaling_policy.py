"""Execute the decisions of ``elastic/policy.py`` inside Ray Train's controller. The only file that uses Ray Train's scaling
policy; ``ray_adapter.py`` has the table of what Ray calls when, ``failure_policy.py`` decides which failures are retried."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.train import ScalingConfig

from springtide.elastic import GroupRequest
from springtide.elastic.group_sizes import MemoryLimits
from springtide.elastic.node_table import within_nodes
from springtide.elastic.patience import MOST_STORE_FAILURES, look_pause_s, store_pause_s
from springtide.elastic.policy import (
    Bounds,
    Decision,
    GiveUp,
    Leave,
    Node,
    PolicyState,
    Replace,
    Start,
    Stay,
    WorkerGroup,
    decide,
    following,
    used_for_hours,
)
from springtide.errors import StoppedWaiting, TrainingFailed, TrainingInterrupted
from springtide.events import Decided, Failed, Ready, Stopped
from springtide.ray._ray_private import (
    ElasticScalingPolicy,
    NoopDecision,
    ScalingDecision,
    Worker,
    WorkerGroupState,
)
from springtide.ray.cluster.nodes import NodeDeadlines, live, observed, unanswering
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.train.hang import MOST_HANGS, MOST_SILENT, Watch, diagnose
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress, WorkerLimit
from springtide.ray.train.on_demand import OnDemandNodes
from springtide.ray.train.snapshot_saver import SnapshotSaver
from springtide.ray.train.worker_lender import WorkerLender

_ANSWER_S = 2.0
_LOOK_S = 0.5
_MOMENT_S = 1e-3
"""Nodes count as settled when none has come or gone for ``settle_s``. The next poll comes this much after that moment, so that
it surely finds them settled [s]."""
_ORDER = (None, GroupRequest.SAVE, GroupRequest.LEAVE, GroupRequest.EVACUATE)
"""Requests to a worker group, weakest first: none; write a checkpoint and go on (SAVE); end with a copy of the state in memory
(LEAVE); end with a checkpoint (EVACUATE). A request is replaced only by a stronger one."""
_SOONER_S = 1.0
"""A LEAVE deadline is sent to the group again only if it moved earlier by more than this [s]."""
_log = logging.getLogger(__name__)


class SpringtideScalingPolicy(ElasticScalingPolicy):
    """Ray's elastic scaling policy, with the decisions of ``elastic/policy.py``. Only the requests for capacity are left to
    Ray's code."""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        bounds: Bounds,
        job: TrainJob,
        watches: PreemptionWatchers | None,
        workers: WorkerLender,
        limits: MemoryLimits,
    ) -> None:
        """``watches``: the preemption watchers on the nodes; None if notices are off. ``limits``: the run's memory limits,
        which its ``SpringtideFailurePolicy`` updates."""
        super().__init__(scaling_config)
        self._processes, self._share = workers.processes, workers.share
        self._on_demand: OnDemandNodes | None = None
        if job.config.elastic.deadline.is_set and workers.share is None:
            self._on_demand = OnDemandNodes(job, scaling_config, bounds, workers.processes)
            self.scaling_config = self._on_demand.labelled(scaling_config)
        self._asked_for, self._job, self._mailbox = bounds, job, job.mailbox
        self._cells = bounds.worker_multiple, bounds.min_workers
        self._limits, self._began_at = limits, 0
        self._runs = False
        """Whether the mailbox was informed that the processes of the newest group run."""
        self._watches = watches
        self._memory = PolicyState()
        self._reported = ""
        """Reason of the last reported decision, with its digits removed. A new reason that differs only in numbers is not
        reported again."""
        self._asked: GroupRequest | None = None
        """The newest request that this policy has sent to the training group; None if there is none."""
        self._asked_by_s = math.inf
        """Deadline sent with ``_asked``: when the group must have a safe copy of its state in memory, by ``time.monotonic``
        [s]."""
        self._told_of: set[str] = set()
        """The nodes that were leaving at the last check. Each further leaving node triggers a COPY request (copy the state to
        nodes that stay)."""
        self._alive, self._mine = set[str](), dict[str, dict[str, float]]()
        self._others = ""
        """From the last query of the pool or queue that shares out workers: what this run waits for, or which runs get its
        workers."""
        self._looked_s = float("-inf")
        self._leaving = 0
        self._deadlines = NodeDeadlines(lambda: self._mailbox.notices().get(_ANSWER_S) or {})
        self._hangs: Counter[tuple[int, bool]] = Counter()
        """(step of the hang, True if a process did not answer in it) -> number of such hangs."""
        self._hung: frozenset[int] | None = None
        """Ranks of the hung group that do not answer; None if the group does not hang."""
        self._watch = Watch()
        self._silent: set[str] = set()
        """Nodes that Ray lists as alive but that do not answer."""
        self._probed_s = float("-inf")
        self._failed_looks = 0
        self._limit, self._holds, self._newest = WorkerLimit(), True, Progress()
        """``_limit``: the newest worker limit set by commands. ``_holds``: whether a resource request is open in Ray.
        ``_newest``: the last known progress."""
        self._saver = SnapshotSaver(job)
        self._processes.is_cancelled = self._is_stopped_meanwhile

    @property
    def _bounds(self) -> Bounds:
        asked, limit = self._asked_for, self._limit
        most = min(asked.max_workers, limit.workers or asked.max_workers)
        least, by, others = self._limits.least_workers, limit.paused_by, self._others
        return dataclasses.replace(asked, min_workers_for_memory=least, max_workers=most, paused_by=by, others=others)

    @property
    def is_leaving(self) -> bool:
        """Whether the group that trains was asked to leave."""
        return self._asked in (GroupRequest.LEAVE, GroupRequest.EVACUATE)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start a group if there is room, else wait a moment. Raises StoppedWaiting when asked to stop, and RunExists when
        another driver has claimed the run. Raises TrainingInterrupted when the run has waited for nodes as long as
        ``elastic.wait`` allows, or its state cannot be saved."""
        begin_s = time.thread_time()
        try:
            decision = self._look()
            self._failed_looks = 0
        except (RayError, OSError) as error:
            # retry here, because Ray does not retry a controller's error while no group trains
            self._unseen(error)
            if self._failed_looks > MOST_STORE_FAILURES:
                raise
            self._processes.wait(store_pause_s(self._failed_looks))
            return NoopDecision()
        if isinstance(decision, NoopDecision):
            self._wait(look_pause_s(time.thread_time() - begin_s))
        return decision

    def _look(self) -> ScalingDecision:
        if self._processes.closed:
            raise StoppedWaiting("its driver has ended")
        self._asked = None
        progress = self._progress()
        self._ask_for_capacity()
        if progress.stop:
            self._end_waiting(progress)
        if time.monotonic() < self._processes.not_before_s:
            return NoopDecision()
        return self._start(progress)

    def _end_waiting(self, progress: Progress) -> NoReturn:
        """Stop the run on request while no group trains. A state that is in memory only is saved to the store first."""
        if problem := self._saver.finish(lambda: self._processes.closed):
            raise TrainingInterrupted(
                f"asked to stop while no group trained, and step {progress.step}, in memory only, cannot be saved: "
                f"{problem}; the nodes hold it for a minute: repair the store and --resume"
            )
        reason = "asked to, while no group trained; it can be resumed from its newest checkpoint"
        self._mailbox.post([Stopped(step=progress.step, status="stopped", reason=reason)]).get()
        raise StoppedWaiting(reason)

    def _unseen(self, error: Exception) -> None:
        """Count a failed query of the cluster's nodes; log only the first of consecutive failures."""
        self._failed_looks += 1
        if self._failed_looks == 1:
            _log.warning("cannot query Ray for nodes, retrying: %s", error)

    def _wait(self, pause_s: float) -> None:
        """Wait until the next poll of the cluster. Returns early in three cases: a process is ready; no node has come or gone
        for ``settle_s``; the run is to stop."""
        now = time.monotonic()
        settled_s = self._memory.since_s + self._bounds.settle_s + _MOMENT_S
        until_s = min(now + pause_s, settled_s if now < settled_s else math.inf)
        while (left_s := until_s - time.monotonic()) > 0:
            if self._processes.wait(min(left_s, _LOOK_S)) or (left_s > _LOOK_S and self._progress().stop):
                return

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: object
    ) -> ScalingDecision:
        """Ask the training group to leave when the policy decides so. Start the next group once the training group has left,
        hangs or has lost workers."""
        self._ask_for_capacity()
        busy = tuple(worker.metadata.node_id for worker in worker_group_state.workers)
        if not self._runs:
            self._runs = True
            # wait for the reply: from then on ``_progress`` reports how long the group is silent
            self._mailbox.group_runs(len(busy)).wait()
        progress = self._progress()
        if progress.step != self._began_at:
            self._limits.trained(len(busy))
        if progress.left:
            return self._start_or_stop(progress, busy, probe=False)
        workers = worker_group_state.workers
        if progress.silent_s > progress.longest_s or self._is_stalled(workers, progress):
            return self._end_hung(workers, progress)
        if self._hung is not None:  # the group trains again: a save that began during the hang is outdated
            self._saver.cancel()
        self._hung = None
        try:
            nodes = self._nodes(busy, warm=True)
            self._failed_looks = 0
        except (RayError, OSError) as error:  # the nodes are unknown; the group keeps training
            self._unseen(error)
            return NoopDecision()
        self._ask_for_copies(nodes)
        decision = self._decide(nodes, WorkerGroup(busy), progress)
        self._report(decision, progress.step)
        if isinstance(decision, Replace):
            return self._start(progress, busy)
        self._ask(decision)
        return NoopDecision()

    def _ask_for_copies(self, nodes: Sequence[Node]) -> None:
        """Send the group a COPY request as soon as a node is announced to leave, long before the group has to leave. On COPY
        the group copies its snapshots (the state in memory) from leaving nodes to nodes that stay, and places no more copies on
        leaving nodes."""
        leaving = {node.id for node in nodes if node.leaves_at is not None}
        if leaving - self._told_of and self._job.keeps_snapshots:
            self._mailbox.ask(GroupRequest.COPY)
        self._told_of = leaving

    def _ask(self, decision: Decision) -> None:
        """Send the group the request that a decision implies, if it is stronger or more urgent than the last one. LEAVE (end
        with a copy of the state in memory) becomes EVACUATE (end with a checkpoint) when no node is left to hold a copy in
        memory."""
        wanted = None
        if isinstance(decision, Leave):
            wanted = GroupRequest.EVACUATE if decision.durable else GroupRequest.LEAVE
        elif isinstance(decision, Stay) and decision.save:
            wanted = GroupRequest.SAVE
        elif self._asked is GroupRequest.SAVE:  # no save is wanted now; a later notice may request one again
            self._asked = None
        by_s = decision.by_s if isinstance(decision, Leave) else math.inf
        sooner = wanted is self._asked and by_s < self._asked_by_s - _SOONER_S
        if wanted is not None and (sooner or _ORDER.index(wanted) > _ORDER.index(self._asked)):
            self._mailbox.ask(wanted, by_s - time.monotonic())
            self._asked, self._asked_by_s = wanted, by_s

    def _start_or_stop(self, progress: Progress, busy: tuple[str, ...], probe: bool = True) -> ScalingDecision:
        """When a group ends, start the next group. If the run is to stop and no group can start, stop the run here and raise
        StoppedWaiting, because no group will come to receive the stop request."""
        decision = self._start(progress, busy, probe)
        if progress.stop and isinstance(decision, NoopDecision):
            self._end_waiting(progress)
        return decision

    def _start(self, progress: Progress, busy: tuple[str, ...] = (), probe: bool = True) -> ScalingDecision:
        """Start a group if there is room. ``busy``: node of each worker of the ending group. ``probe``: leave out nodes that do
        not answer a connection. Raises RunExists if another driver has claimed the run."""
        if self._saver.refused is not None:  # fail now: a new group would be refused, too, after a wait
            raise self._saver.refused
        nodes = self._nodes(busy)
        if probe and time.monotonic() - self._probed_s >= _LOOK_S:
            self._silent = self._unanswering(self._silent & {node.id for node in nodes})
        decision = self._decide(nodes, None, progress, self._silent if probe else ())
        while probe and isinstance(decision, Start) and (silent := self._unanswering(set(decision.nodes))):
            self._silent |= silent
            decision = self._decide(nodes, None, progress, self._silent)
        # a paused run gives its workers back and saves its state to the store first; only then is the pause reported
        if self._limit.paused_by:
            self._processes.end()
            self._saver.begin()
            if busy or not self._saver.is_safe:
                return self._get_resize_decision(0) if busy else NoopDecision()
        self._report(decision, progress.step)
        if isinstance(decision, GiveUp):
            self._saver.finish(lambda: self._processes.closed)
            raise TrainingInterrupted(f"{decision.reason}; resume with --resume")
        if not isinstance(decision, Start):
            if isinstance(decision, Stay) and decision.save:
                self._saver.begin()
            gives_back = busy and progress.left and self._share is not None  # other runs wait for this group's workers
            return self._get_resize_decision(0) if gives_back else NoopDecision()
        self._saver.cancel()
        self._processes.prepare(decision.nodes, self._job, lambda workers: self._bounds.feasible(workers) > 0)
        self._mailbox.limit_micro_batch(self._limits.rows_at_once(decision.workers))
        # wait for the reply: until then ``_progress`` may report ``left`` of the old group, and this policy would replace the
        # new group
        self._mailbox.reset_for_new_group().wait()
        self._asked, self._began_at, self._hung, self._runs = None, progress.step, None, False
        self._told_of, self._watch = set(), Watch()
        return self._get_resize_decision(decision.workers)

    def _unanswering(self, names: set[str]) -> set[str]:
        self._probed_s = time.monotonic()
        return unanswering(names, speaks=True)

    def _is_stalled(self, workers: Sequence[Worker], progress: Progress) -> bool:
        """Return True if a rank's process is gone, or a group that has trained a step is stuck: it waits for some ranks, or all
        ranks wait in a collective. This check finds a hang before the time limit ``elastic.hang`` is over."""
        if self._watch.lacks(workers, progress):
            return True
        if progress.step == self._began_at or not self._watch.is_due(progress):
            return False
        return self._hung is not None or self._watch.stalled(workers, progress)

    def _end_hung(self, workers: Sequence[Worker], progress: Progress) -> ScalingDecision:
        """Replace a hung group. Its ranks' stacks are written to the run's folder first."""
        if self._hung is None:  # diagnose a group once: it still exists while the next group waits for room
            found, silent = diagnose(workers, self._job.folder, progress.step, self._watch.silent)
            # kill a process that does not answer, because it would not react to ``let_go``
            for worker in silent:
                ray.kill(worker.actor)
            self._hung = frozenset(rank for rank, worker in enumerate(workers) if worker in silent)
            why = f"{self._watch.why}; " if self._watch.why else ""
            reason = f"no event for {progress.silent_s:.0f} s, {why}{found}"
            self._hangs[progress.step, bool(silent)] += 1
            times, most = self._hangs[progress.step, bool(silent)], MOST_SILENT if silent else MOST_HANGS
            self._mailbox.post([Failed(step=progress.step, cause="hung", reason=reason, again=times < most)])
            if times >= most:
                raise TrainingFailed(f"training hung {times} times after step {progress.step}: {reason}")
        busy = tuple(worker.metadata.node_id for rank, worker in enumerate(workers) if rank not in self._hung)
        return self._start_or_stop(progress, busy)

    def _decide(
        self, nodes: list[Node], group: WorkerGroup | None, progress: Progress, silent: Collection[str] = ()
    ) -> Decision:
        """Return the policy's decision, made without the nodes in ``silent``. Also post an event for each process that has
        become ready since the last call."""
        seen = [node for node in nodes if node.id not in silent] if silent else nodes
        decision, self._memory = decide(self._bounds, seen, group, progress.prospects, self._memory, time.monotonic())
        for node, took_s in self._processes.newly_ready():
            self._mailbox.post([Ready(step=progress.step, node=node, took_s=round(took_s, 3))])
        return decision

    def _nodes(self, busy: tuple[str, ...] = (), warm: bool = False) -> list[Node]:
        """Return the cluster's nodes, each with its places (how many workers this run may have there). ``busy``: node of each
        worker of the current group. ``warm``: also start processes on nodes where the next group would have more workers, so
        that they are ready in time."""
        table = live()
        reserved = self._reserved(table, busy)
        seen = observed(table, reserved, self.scaling_config._resources_per_worker_not_none, self._deadlines)
        seen = used_for_hours(seen, self._processes.held(busy), time.monotonic())
        self._processes.observe(seen)
        problems = self._processes.problems()
        nodes = [node._replace(problem=problems.get(node.id, "")) for node in seen]
        if self._on_demand is not None:
            is_saved = not busy and self._saver.is_safe
            nodes = self._on_demand.look(nodes, table, busy, self._bounds, self._newest, is_saved)
        nodes = within_nodes(nodes, *self._cells)
        if self._share is not None:
            self._processes.trim({node.id: node.places for node in nodes}, busy)
        if self._watches is not None:
            self._watches.cover({node.id for node in nodes if node.places or node.id in busy})
        self._ask_for_what_leaves(nodes)
        if warm:
            self._processes.warm(following(self._bounds, nodes, self._memory), busy)
        ready = self._processes.ready(busy)
        return within_nodes([node._replace(ready=ready[node.id]) for node in nodes], *self._cells)

    def _progress(self) -> Progress:
        with contextlib.suppress(RayError):  # no answer from the mailbox: use the last known progress
            found = self._mailbox.progress().get(_ANSWER_S) or Progress(limit=self._limit)
            self._reported = self._reported if found.limit == self._limit else ""
            self._limit, self._newest = found.limit, found
            return found
        # the next poll reads ``left`` and ``silent_s`` again: until then the group counts as training
        return dataclasses.replace(self._newest, left=False, silent_s=0.0)

    def _is_stopped_meanwhile(self) -> bool:
        """Renew the resource request while worker processes start, because Ray calls no policy meanwhile. Returns True if the
        run is to stop."""
        self._ask_for_capacity()
        return self._progress().stop

    def _ask_for_capacity(self) -> None:
        """Renew the run's resource request in Ray; withdraw it while the run is paused."""
        held, self._holds = self._holds, not self._limit.paused_by
        if self._holds:
            _ = self._maybe_send_resource_request() if held else self._send_resource_request()
        elif held:
            self._cancel_resource_request()

    def _reserved(self, table: Sequence[dict[str, Any]], busy: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return node -> resources that this run may use there. ``busy``: node of each worker of the current group. Ray's
        coordinator looks for new nodes every 20 s, or at once if the nodes in ``table`` have changed."""
        now, alive = time.monotonic(), {node["NodeID"] for node in table}
        if self._share is not None:
            with contextlib.suppress(RayError):
                most = 0 if self._limit.paused_by else self._bounds.max_workers
                self._mine, self._others = self._share.mine(_ANSWER_S, self._processes.held(busy), most)
        elif now - self._looked_s >= _LOOK_S:
            asked = self._autoscaling_coordinator.get_reserved_resources.remote(
                self._requester_id, alive != self._alive
            )
            self._looked_s = now
            with contextlib.suppress(RayError):
                self._mine = ray.get(asked, timeout=_ANSWER_S)
                self._alive = alive
        return self._mine

    def _get_num_workers_for_resource_request(self) -> int:
        """Return the number of workers to request: the most that the run uses, plus those on leaving nodes, so that their
        replacements are requested early."""
        number = self._bounds.max_workers + self._leaving
        return number if self._on_demand is None else self._on_demand.requested(number)

    def _ask_for_what_leaves(self, nodes: list[Node]) -> None:
        leaving = sum(node.places for node in nodes if node.leaves_at is not None)
        if leaving != self._leaving or (self._on_demand is not None and self._on_demand.has_changed()):
            self._leaving = leaving
            if self._holds:
                self._send_resource_request()

    def _report(self, decision: Decision, step: int) -> None:
        words = re.sub(r"\d+", "", decision.reason)
        if words != self._reported:
            self._reported = words
            self._mailbox.post([Decided(step=step, decision=type(decision).__name__.lower(), reason=decision.reason)])


class PrivateScalingPolicy(SpringtideScalingPolicy):
    """The scaling policy on a private cluster. Its only run owns all nodes, and no autoscaler could add any. So nothing is
    requested, and Ray's coordinator actor, which takes core-seconds to start, is not used."""

    def _send_resource_request(self) -> None:
        """Request nothing."""

    def _maybe_send_resource_request(self) -> None:
        """Request nothing."""

    def _cancel_resource_request(self) -> None:
        """Do nothing, because nothing was requested."""

    def _reserved(self, table: Sequence[dict[str, Any]], busy: Sequence[str]) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in table}
