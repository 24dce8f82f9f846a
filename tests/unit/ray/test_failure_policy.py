"""What becomes of a group that runs out of memory, from queued failures; the cluster is faked, the policies are real."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision

from springtide import config as configs
from springtide.distributed import CollectiveError, CutOff
from springtide.elastic.forecast import RestartForecast
from springtide.elastic.group_sizes import MemoryLimits
from springtide.elastic.policy import Bounds, Leave, Node, Start, Stay, WorkerGroup, decide
from springtide.elastic.policy import PolicyState as Remembered
from springtide.errors import ConfigError, DiskFull, StoreUnavailable, UnfitNode
from springtide.ray._ray_private import WorkerGroupStartupFailedError, WorkerHealthCheckFailedError
from springtide.ray.cluster import nodes
from springtide.ray.train import failure_policy
from springtide.ray.train.failure_policy import SpringtideFailurePolicy, is_echo
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress
from springtide.ray.train.process_pool import StartCancelledError, UnfitNodesError, WorkerProcessPool

RETRY, RAISE = FailureDecision.RETRY, FailureDecision.RAISE


def cuda_says(pid: int, tried_mib: int, free_mib: float) -> WorkerGroupError:
    """As a device of NVIDIA's does; its peers then lose their connections."""
    text = (
        f"CUDA out of memory. Tried to allocate {tried_mib}.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which "
        f"{free_mib} MiB is free. Process {pid} has 78.90 GiB memory in use."
    )
    return WorkerGroupError("", {0: RuntimeError("Connection closed by peer"), 1: torch.OutOfMemoryError(text)})


def reply(value: object) -> SimpleNamespace:
    """As the mailbox's."""
    return SimpleNamespace(get=lambda timeout_s=None: value)


class Failures:
    """A policy, what it posted, and where the run is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int = 1) -> None:
        self.step, self.posted, self.limit = 7, list[Any](), list[int]()
        mailbox: Any = SimpleNamespace(
            progress=lambda: reply(Progress(step=self.step)),
            post=lambda events: reply(self.posted.extend(events)),
            limit_micro_batch=lambda rows: reply(self.limit.append(rows)),
        )
        monkeypatch.setattr(failure_policy, "lost", lambda nodes: set())
        monkeypatch.setattr(failure_policy, "leaving", lambda nodes: set())
        monkeypatch.setattr(failure_policy, "unanswering", lambda nodes: set())
        config = configs.recipes.tiny().override({"train.micro_batch": rows, "parallel.reduction": "fp32"})
        self.limits, self.processes = MemoryLimits(rows), WorkerProcessPool()
        job = TrainJob(config, mailbox)
        self.policy = SpringtideFailurePolicy(FailureConfig(max_failures=3), job, self.processes, self.limits)

    def of(self, workers: int, error: WorkerGroupError | ControllerError) -> FailureDecision:
        self.processes.plan = ("node",) * workers
        return self.policy.make_decision(error)


def test_a_shrink_below_what_fits_waits_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shrink below what fits waits for room and burns no retries."""
    run = Failures(monkeypatch)
    run.limits.trained(6)
    for workers in (2, 3, 4, 5):  # more than max_failures
        assert run.of(workers, cuda_says(1000 + workers, 512, 3.5)) is RETRY
        assert run.limits.least_workers == workers + 1
    assert run.posted[0].reason.endswith("3 or more")
    assert all(one.cause == "out of memory" and one.again for one in run.posted)
    # and the rule of who trains does wait
    bounds = Bounds(1, 8, settle_s=0.0, min_workers_for_memory=run.limits.least_workers)
    waits, memory = decide(bounds, [Node("a", 5)], None, RestartForecast(), Remembered(), 0.0)
    assert isinstance(waits, Stay)
    assert waits.reason == "waiting for capacity: room for 5 workers, a step needs the memory of 6"
    starts, _ = decide(bounds, [Node("a", 5), Node("b", 3)], None, RestartForecast(), memory, 1.0)
    assert isinstance(starts, Start)
    assert starts.workers == 8


def test_the_same_error_in_another_process_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error of another process with other bytes is the same error."""
    run = Failures(monkeypatch)
    assert run.of(4, cuda_says(100, 512, 3.5)) is RETRY
    assert run.of(4, cuda_says(2345, 96, 17.25)) is RAISE
    assert run.posted[1].reason.endswith("one row already")


def test_an_error_at_another_step_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch)
    assert run.of(4, cuda_says(100, 512, 3.5)) is RETRY
    run.step = 8
    assert run.of(4, cuda_says(100, 512, 3.5)) is RETRY


def test_a_size_that_trained_and_fails_twice_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that trained and then fails twice waits rather than ends."""
    run = Failures(monkeypatch)
    run.limits.trained(4)
    run.limits.trained(6)
    assert run.of(4, cuda_says(100, 512, 3.5)) is RETRY
    assert run.limits.least_workers == 1
    assert run.of(4, cuda_says(101, 512, 3.5)) is RETRY
    assert run.limits.least_workers == 5


def test_rows_that_were_too_much_for_few_are_given_to_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch, rows=4)
    assert run.of(2, cuda_says(100, 512, 3.5)) is RETRY
    assert run.limit == [2]
    assert [run.limits.rows_at_once(workers) for workers in (1, 2, 3)] == [2, 2, 4]


@pytest.mark.parametrize(
    "error", [CutOff("rank 0 of 2 was cut off"), CollectiveError("an all-reduce returned garbage")]
)
def test_garbage_is_the_echo_of_anothers_loss_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert is_echo(error)
    run = Failures(monkeypatch)
    for _ in range(3):
        assert run.of(4, WorkerGroupError("", {0: error, 2: error})) is RETRY
    assert run.of(4, WorkerGroupError("", {0: error})) is RAISE  # no more than any other failure


def test_failures_count_for_a_day_and_preemptions_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are counted for a day and those of workers that are preempted never."""
    run, now_s, hour = Failures(monkeypatch), [0.0], 3600.0
    monkeypatch.setattr(failure_policy, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def fails(at_h: float, error: Exception | None = None) -> FailureDecision:
        run.step += 1
        now_s[0] = at_h * hour
        return run.of(4, WorkerGroupError("", {1: error or RuntimeError("CUDA error: an illegal memory access")}))

    gone = WorkerHealthCheckFailedError("a worker is unhealthy", RayActorError(preempted=True))
    assert [fails(24.1 * day) for day in range(20)] == [RETRY] * 20, "a run of three weeks ends for no failure a day"
    assert [fails(500 + at) for at in (5, 13, 21)] == [RETRY] * 3
    assert [fails(521 + at, gone) for at in range(5)] == [RETRY] * 5
    assert fails(500 + 28.9) is RAISE, "the fourth within 24 hours"
    assert fails(900, gone) is RETRY


def test_what_smaller_micro_batches_mend_is_no_failure_of_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch, rows=16)
    for workers in (2, 3, 4, 5):
        run.step += 1
        assert run.of(workers, cuda_says(100, 512, 3.5)) is RETRY
    assert [run.of(4, WorkerGroupError("", {0: ValueError(f"bug {one}")})) for one in "abcd"] == [RETRY] * 3 + [RAISE]


def test_a_trained_run_waits_for_a_network_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has trained waits for a network that is away for minutes."""
    run, now_s = Failures(monkeypatch), 100.0
    monkeypatch.setattr(failure_policy, "time", SimpleNamespace(monotonic=lambda: now_s))
    late = ControllerError(WorkerGroupStartupFailedError("the group did not form"))
    assert [run.of(4, late) for _ in range(4)] == [RETRY] * 3 + [RAISE], "nothing has ever trained: it may be the code"
    run.limits.trained(4)
    run.step, run.processes.not_before_s, pauses = 8, 0.0, []
    for _ in range(30):
        assert run.of(4, late) is RETRY
        pauses.append(max(0.0, run.processes.not_before_s - now_s))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, *[60] * 23], "a single start that fails costs no pause"
    assert run.of(4, late) is RAISE


def test_a_start_that_was_called_off_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch)
    stopped = ControllerError(StartCancelledError("the run was asked to stop while its processes came up"))
    assert [run.of(4, stopped) for _ in range(5)] == [RETRY] * 5
    assert run.posted == []
    assert run.processes.not_before_s == 0.0


@pytest.mark.parametrize(("hours", "decision"), [(2.0, RAISE), (0.5, RETRY)])
def test_a_leaving_node_is_no_failure_but_a_bug_is(
    monkeypatch: pytest.MonkeyPatch, hours: float, decision: FailureDecision
) -> None:
    """What a node that goes leaves behind is no failure but a bug on it is."""
    run, looks = Failures(monkeypatch), nodes.leaving
    monkeypatch.setattr(failure_policy, "leaving", looks)
    leaves_ms = int((time.time() + hours * 3600) * 1000)
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: {"node": leaves_ms})
    bug = WorkerGroupError("", {0: ValueError("a bug")})
    assert run.of(2, bug) is RETRY
    assert run.of(2, bug) is RAISE
    echo = WorkerGroupError("", {0: RuntimeError("Connection closed by peer")})
    assert [run.of(2, echo) for _ in range(8)][-1] is decision


def test_a_group_that_is_too_small_leaves_for_one_that_fits() -> None:
    """A group that is too small by what was learnt leaves only for one that fits."""
    bounds, going = Bounds(1, 8, settle_s=0.0, min_workers_for_memory=4), Node("b", 4, leaves_at=1.0)
    decision, _ = decide(
        bounds, [Node("a", 3), going], WorkerGroup(("a", "b", "b", "b")), RestartForecast(), Remembered(), 0.5
    )
    assert isinstance(decision, Leave)
    assert decision.durable  # nobody follows yet: the state goes to the store


def test_a_node_that_reads_other_bytes_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that reads other bytes than its peers is left out and the run goes on."""
    run = Failures(monkeypatch)
    run.processes.plan = ("good", "bad")
    said = UnfitNode("rank 1 on node bad reads a file otherwise than a second reader", "bad")
    for _ in range(5):  # more than max_failures: the node is at fault, not the run
        assert run.policy.make_decision(WorkerGroupError("", {0: said, 1: said})) is RETRY
    assert list(run.processes.problems()) == ["bad"]
    assert run.posted[0].cause == "unfit node"
    assert "second reader" in run.posted[0].reason
    elsewhere = UnfitNode("a node that nobody knows", "")
    assert run.policy.make_decision(WorkerGroupError("", {0: elsewhere})) is RAISE


class EndpointConnectionError(Exception):
    """As botocore's, which is not an OSError."""

    __module__ = "botocore.exceptions"


AWAY = OSError("runs/a/checkpoints: Could not connect to the endpoint URL")


@pytest.mark.parametrize(
    "error",
    [
        WorkerGroupError("", {0: AWAY, 1: RuntimeError("Connection closed by peer")}),
        WorkerGroupError("", {0: EndpointConnectionError("Could not connect to the endpoint URL")}),
        WorkerGroupError("", {0: RayTaskError("read", "trace", AWAY).as_instanceof_cause()}),
        ControllerError(AWAY),
        WorkerGroupError("", {0: StoreUnavailable(f"4 saves failed, the last with: {AWAY}"), 1: CutOff("rank 1")}),
    ],
)
def test_a_store_that_is_away_is_not_a_repeated_error(
    monkeypatch: pytest.MonkeyPatch, error: WorkerGroupError | ControllerError
) -> None:
    """A store that is away is waited for and is not the same error at the same step."""
    run, now_s = Failures(monkeypatch), 100.0
    monkeypatch.setattr(failure_policy, "time", SimpleNamespace(monotonic=lambda: now_s))
    pauses = []
    for _ in range(30):  # more than max_failures
        assert run.of(2, error) is RETRY
        pauses.append(run.processes.not_before_s - now_s)
    assert pauses == [1, 2, 4, 8, 16, 32, *[60] * 24]
    assert run.of(2, error) is RAISE
    assert {one.cause for one in run.posted} == {"store"}
    assert run.posted[0].reason.endswith("in 1 s, 1 of 30 times at this step")
    run.step += 1  # it came back, and a step was done
    assert run.of(2, error) is RETRY


FULL = OSError(errno.ENOSPC, "No space left on device: runs/a needs 9 bytes")


@pytest.mark.parametrize(
    "error",
    [
        WorkerGroupError("", {0: FULL, 1: RuntimeError("Connection closed by peer")}),
        WorkerGroupError("", {0: RayTaskError("write", "trace", FULL).as_instanceof_cause()}),
        ControllerError(FULL),
        WorkerGroupError("", {0: DiskFull(f"step 3 is not saved: rank 0: {FULL}"), 1: CutOff("rank 1")}),
    ],
)
def test_a_full_disk_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: WorkerGroupError | ControllerError
) -> None:
    """It does not empty itself; thirty tries took 25 minutes."""
    run = Failures(monkeypatch)
    assert run.of(2, error) is RAISE
    assert (run.posted[0].cause, run.posted[0].again) == ("store", False)
    assert run.posted[0].reason.endswith("needs 9 bytes; a full disk is not tried again")


@pytest.mark.parametrize("error", [FileNotFoundError("train.parquet"), ValueError("a bug")])
def test_an_error_that_no_store_mends_ends_the_run_twice(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error that no store mends still ends the run at the second time."""
    run = Failures(monkeypatch)
    failures = WorkerGroupError("", {0: AWAY, 1: error})
    assert run.of(2, failures) is RETRY
    assert run.of(2, failures) is RAISE
    assert run.posted[0].cause == "failed workers"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The server socket has failed to listen: EADDRINUSE"),
        RayTaskError("_setup_torch_process_group", "DistStoreError: timed out", RuntimeError("timed out")),
        WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize."),
        KeyError("NodeManagerPort"),
        GetTimeoutError("a worker does not answer"),
    ],
)
def test_a_start_that_fails_is_tried_again_whatever_its_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = Failures(monkeypatch)
    assert [run.of(2, ControllerError(error)) for _ in range(4)] == [RETRY, RETRY, RETRY, RAISE]
    assert {one.cause for one in run.posted} == {"start-up"}
    run.step = 8
    assert run.of(2, ControllerError(error)) is RETRY


def test_an_error_of_ours_at_the_start_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Failures(monkeypatch).of(2, ControllerError(ConfigError("stream.global_batch"))) is RAISE


def test_a_node_found_unfit_before_it_trains_costs_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch)
    slow = ControllerError(UnfitNodesError("slow: its device multiplies at 30% of the others' speed"))
    assert [run.of(2, slow) for _ in range(6)] == [RETRY] * 6  # it is left out longer each time
    assert {one.cause for one in run.posted} == {"unfit node"}


def test_a_driver_that_cannot_look_takes_no_node_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Failures(monkeypatch)

    def short(nodes: object) -> set[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(failure_policy, "unanswering", short)
    assert run.of(2, WorkerGroupError("", {0: ValueError("a bug")})) is RETRY
    assert run.posted[0].cause == "failed workers"


DEATH = (
    "The actor died unexpectedly before finishing this task.\n\tpid: 7\nThe actor is dead because its worker process has "
    "died. Worker exit detail: it was killed by the OOM killer"
)
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.4]:41724")
DIED = WorkerHealthCheckFailedError(
    "A worker health check failed.\nWorker info: rank 3", RayActorError(error_msg=DEATH)
)


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        (
            {0: CLOSED, 3: DIED},
            "rank 3: The actor is dead because its worker process has died. Worker exit detail: it was k",
        ),
        ({0: CLOSED, 2: DIED, 3: ValueError("expected 3 pieces\nfound 2")}, "rank 3: expected 3 pieces"),
        ({1: CLOSED, 3: CLOSED}, "rank 1: [gloo/"),
        ({1: ValueError("a bug"), 3: ValueError("a bug, too")}, "rank 1: a bug"),
    ],
)
def test_a_failure_is_told_by_the_rank_that_the_others_lost(
    monkeypatch: pytest.MonkeyPatch, failures: dict[int, Exception], told: str
) -> None:
    run = Failures(monkeypatch)
    run.of(4, WorkerGroupError("", failures))
    assert run.posted[0].reason.startswith(told)
