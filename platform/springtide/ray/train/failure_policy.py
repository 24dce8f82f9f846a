"""Decide which failures of a run are retried. The only file that uses Ray Train's failure policy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping

import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train import FailureConfig

from springtide.distributed import CollectiveError
from springtide.elastic.group_sizes import MemoryLimits
from springtide.elastic.patience import MOST_STORE_FAILURES, store_pause_s
from springtide.errors import DiskFull, LeaseOvertaken, SpringtideError, StoppedWaiting, StoreUnavailable, UnfitNode
from springtide.events import Failed
from springtide.ray._ray_private import (
    DefaultFailurePolicy,
    FailureDecision,
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
)
from springtide.ray.cluster.nodes import leaving, lost, unanswering
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress
from springtide.ray.train.process_pool import StartCancelledError, UnfitNodesError, WorkerProcessPool, last_line
from springtide.storage.errors import FINAL, is_full, may_pass, of_store
from springtide.training.message import PeerFailed

_ANSWER_S = 2.0
_DAY_S = 24 * 3600.0
_NO_ROOM = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "out of memory", "low on memory")
"""Words in errors of torch, numpy and Ray that mean: out of memory."""
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Socket", "Broken pipe", "NCCL")
"""Words in errors of gloo and NCCL that mean: another rank is gone."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


class SpringtideFailurePolicy(DefaultFailurePolicy):
    """Ray's failure policy with our rules. At most ``elastic.max_failures`` failures within a day are retried; lost nodes do
    not count. An error that would recur is not retried: a SpringtideError, or the same error twice at the same step. If a store
    cannot be reached, the run is retried up to ``MOST_STORE_FAILURES`` times at a step, after growing pauses."""

    def __init__(
        self, failures: FailureConfig, job: TrainJob, processes: WorkerProcessPool, limits: MemoryLimits
    ) -> None:
        """``limits``: the run's memory limits, which this policy updates."""
        # -1: no limit in Ray, which counts the failures of the whole run; this policy counts only those of the last day
        super().__init__(dataclasses.replace(failures, max_failures=-1))
        self._most_failures = failures.max_failures
        self._failed_s: list[float] = []
        """When workers failed in the last day, by ``time.monotonic`` [s]."""
        self._processes, self._limits = processes, limits
        self._config, self._mailbox = job.config, job.mailbox
        self._before: tuple[int, str] | None = None
        self._newest_step = 0
        self._starts, self._stores = _Repeats(), _Repeats()
        """Consecutive failures at one step: of groups that did not start, and of groups that could not reach a store."""

    def make_decision(self, training_failed_error: BaseException) -> FailureDecision:
        """Decide what to do about a failure, and record it in the run's journal."""
        if self._processes.closed:
            return FailureDecision.RAISE
        if isinstance(getattr(training_failed_error, "controller_failure", None), StartCancelledError):
            return FailureDecision.RETRY  # retry: the scaling policy's next decision then ends the run as requested
        failures = getattr(training_failed_error, "worker_failures", None)
        nodes = set(self._processes.plan)
        gone, going = _gone(nodes)
        if failures is None or all(map(is_echo, failures.values())):  # a leaving node may be the cause
            gone |= going
        if (ours := fatal(training_failed_error)) is not None:
            if isinstance(ours, StoppedWaiting):
                return FailureDecision.RAISE
            if isinstance(ours, StoreUnavailable):  # retry: the surviving workers still hold the state
                return self._of_store(ours)
            cause, decision = "failed workers" if failures is not None else "given up", FailureDecision.RAISE
            if isinstance(ours, LeaseOvertaken):
                # a save of the hung group's state has claimed a newer lease: resume from that save
                cause, decision = "hung", FailureDecision.RETRY
            elif isinstance(ours, UnfitNode) and ours.node in nodes:
                self._processes.ban(ours.node, str(ours))
                cause, decision = "unfit node", FailureDecision.RETRY
        elif gone:
            cause, decision = "lost nodes", FailureDecision.RETRY
        elif isinstance(getattr(training_failed_error, "controller_failure", None), UnfitNodesError):
            cause, decision = "unfit node", FailureDecision.RETRY
        elif (stores := only_stores(training_failed_error)) is not None:
            return self._of_store(stores)
        elif failures is not None:
            cause, decision = "failed workers", self._of_workers(training_failed_error, failures)
        else:
            cause, decision = "start-up", self._of_start()
        lost_names = ", ".join(sorted(name[:8] for name in gone)) if cause == "lost nodes" else ""
        reason = lost_names or first_line(training_failed_error)
        is_mended = False
        if cause == "failed workers" and any(map(is_out_of_memory, (failures or {}).values())):
            is_mended, remedy = self._with_less(is_over=decision is FailureDecision.RAISE)
            cause, decision = "out of memory", FailureDecision.RETRY if is_mended else decision
            reason += f"; {remedy}"
        if cause in ("failed workers", "out of memory") and not is_mended and not _are_preempted(failures):
            self._failed_s.append(time.monotonic())
        again = decision is FailureDecision.RETRY
        self._mailbox.post([Failed(step=self._step(), cause=cause, reason=reason, again=again)])
        return decision

    def _of_store(self, error: BaseException) -> FailureDecision:
        """Decide whether to retry after a store has failed. Retry after a pause, because a store usually comes back by itself,
        and the step is not at fault. A full disk is not retried."""
        step = self._step()
        failed = self._stores.add(step)
        again = failed <= MOST_STORE_FAILURES and not is_disk_full(error)
        reason = f"{last_line(error)}; "
        if is_disk_full(error):
            reason += "a full disk is not tried again"
        elif again:
            pause_s = store_pause_s(failed)
            self._processes.not_before_s = time.monotonic() + pause_s
            reason += f"tried again in {pause_s:g} s, {failed} of {MOST_STORE_FAILURES} times at this step"
        else:
            reason += f"it was tried again {MOST_STORE_FAILURES} times at this step"
        self._mailbox.post([Failed(step=step, cause="store", reason=reason, again=again)])
        return FailureDecision.RETRY if again else FailureDecision.RAISE

    def _of_workers(self, error: BaseException, failures: Mapping[int, BaseException]) -> FailureDecision:
        # replace numbers before errors are compared: process ids, sizes and addresses differ each time
        own = [
            _NUMBER.sub("#", f"{type(one).__name__}: {one}") for _, one in sorted(failures.items()) if not is_echo(one)
        ]
        if own:
            before, self._before = self._before, (self._step(), own[0])
            if self._before == before:
                return FailureDecision.RAISE
        now = time.monotonic()
        self._failed_s = [at for at in self._failed_s if now - at < _DAY_S]
        if len(self._failed_s) >= self._most_failures and not _are_preempted(failures):
            return FailureDecision.RAISE
        return super().make_decision(error)

    def _with_less(self, is_over: bool) -> tuple[bool, str]:
        """Find a remedy for a group that ran out of memory: halve the micro-batches (rows computed at once); the global batch
        stays the same. If they have only one row already, wait for a larger group, in which each worker has fewer rows; but
        only if a larger group has trained before. Returns True and a description of the remedy, or False and why there is none.
        ``is_over``: whether the run ends without a remedy."""
        lanes, exact = self._config.stream.num_lanes, self._config.parallel.exact
        workers = max(1, len(self._processes.plan))
        most_lanes = 1 if exact else -(-lanes // workers)  # most lanes (parts of a batch) per micro-batch
        before = min(self._limits.rows_at_once(workers), most_lanes * self._config.stream.global_batch // lanes)
        if before >= 2:
            rows = self._limits.halve(workers, before)
            self._mailbox.limit_micro_batch(rows).get()
            return True, f"micro-batches have {rows} rows instead of {before} from now on"
        if self._limits.wait_for_more(workers, is_over):
            least = self._limits.least_workers
            return True, f"a step does not fit {workers} workers: the run waits for {least} or more"
        return False, "a micro-batch has only one row already"

    def _of_start(self) -> FailureDecision:
        """Decide whether to retry a failed start, whatever its error: a port was taken, a peer was late, a worker was killed.
        After two or more failures in a row at the same step, the retry is delayed. If the run has trained before, it is retried
        up to ``MOST_STORE_FAILURES`` times, because a network may be down for minutes. Otherwise ``elastic.max_failures`` is
        the limit."""
        failed = self._starts.add(self._step())
        if failed > 1:
            self._processes.not_before_s = time.monotonic() + store_pause_s(failed - 1)
        most = MOST_STORE_FAILURES if self._limits.has_trained else self._most_failures
        return FailureDecision.RETRY if failed <= most else FailureDecision.RAISE

    def _step(self) -> int:
        with contextlib.suppress(RayError):  # no answer from the mailbox: use the last known step
            self._newest_step = (self._mailbox.progress().get(_ANSWER_S) or Progress()).step
        return self._newest_step


def _are_preempted(failures: Mapping[int, BaseException] | None) -> bool:
    """Return True if a worker is gone because its node was taken away. Failures of other workers are then only consequences."""
    # Ray wraps the error of a dead worker in ``health_check_failure``
    dead = (getattr(one, "health_check_failure", one) for one in (failures or {}).values())
    return any(isinstance(one, RayActorError) and one.preempted for one in dead)


def is_echo(error: BaseException) -> bool:
    """Return True if a worker's failure is only the consequence of another worker's failure."""
    echoes = WorkerHealthCheckFailedError | RayError | dist.DistError | CollectiveError | PeerFailed
    return isinstance(error, echoes) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _ECHOES)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a worker ran out of memory, on its device or its host."""
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in _NO_ROOM)


def first_failure(failures: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """Return the rank that most likely caused the failure, and its error. An error that is not the consequence of another
    worker's failure comes first, then a process that died, then the lowest rank."""

    def place(failure: tuple[int, BaseException]) -> tuple[bool, bool, int]:
        rank, error = failure
        return is_echo(error), not isinstance(error, WorkerHealthCheckFailedError), rank

    return min(failures.items(), key=place)


def first_line(error: BaseException) -> str:
    """Return the first line of the error of the rank that caused the failure, or of ``error`` itself. For a process that died
    it is the last line, in which Ray gives the reason."""
    message = str(getattr(error, "controller_failure", error))
    if failures := getattr(error, "worker_failures", None):
        rank, one = first_failure(failures)
        died = getattr(one, "health_check_failure", None)
        message = f"rank {rank}: {one if died is None else last_line(died)}"
    return next(iter(message.strip().splitlines()), type(error).__name__)[:300]


def fatal(error: BaseException) -> SpringtideError | None:
    """Return the SpringtideError among the workers' failures or the controller's; None if there is none."""
    for failure in _failures(error):
        reason = failure.__cause__ if isinstance(failure, WorkerGroupStartupFailedError) else None
        for candidate in (failure, getattr(failure, "cause", None), reason, getattr(reason, "cause", None)):
            if isinstance(candidate, SpringtideError):  # ``cause``: Ray wraps the original error
                return candidate
    return None


def is_store_error(error: BaseException | None) -> bool:
    """Return True if a store failed or could not be reached, judged by the error's type, or by the package that raised it."""
    # an error of Ray itself is not a store's, although Ray's time-outs are OSErrors too
    rays_own = isinstance(error, RayError) and not isinstance(error, RayTaskError)
    if error is None or rays_own or isinstance(error, FINAL):
        return False
    return may_pass(error) or of_store(error)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a store failed because its disk is full."""
    wrapped = (error, getattr(error, "cause", None), error.__cause__)
    return any(isinstance(one, DiskFull) or is_full(one) for one in wrapped)


def only_stores(error: BaseException) -> BaseException | None:
    """Return the first store error if every failure is a store error or the consequence of another worker's failure; else
    None."""
    found = None
    for failure in _failures(error):
        reason = failure.__cause__ if isinstance(failure, WorkerGroupStartupFailedError) else None
        wrapped = (failure, getattr(failure, "cause", None), reason, getattr(reason, "cause", None))
        if any(is_store_error(one) for one in wrapped) and not is_out_of_memory(failure):
            found = found or failure
        elif not is_echo(failure):
            return None
    return found


def _failures(error: BaseException) -> list[BaseException]:
    """Return the errors of the workers by rank, then the controller's error if there is one."""
    ours = getattr(error, "controller_failure", None)
    return [one for _, one in sorted((getattr(error, "worker_failures", None) or {}).items())] + (
        [ours] if ours else []
    )


def _gone(nodes: set[str]) -> tuple[set[str], set[str]]:
    """Return which of ``nodes`` are lost, and which will be taken away; two empty sets if Ray cannot be queried."""
    with contextlib.suppress(RayError, OSError):
        return lost(nodes) | unanswering(nodes), leaving(nodes)
    return set(), set()


class _Repeats:
    """Counts failures in a row at the same step."""

    def __init__(self) -> None:
        self._step, self._times = -1, 0

    def add(self, step: int) -> int:
        """Count a failure at ``step``. Returns the number of failures in a row at this step, including this one."""
        self._times = self._times + 1 if step == self._step else 1
        self._step = step
        return self._times
