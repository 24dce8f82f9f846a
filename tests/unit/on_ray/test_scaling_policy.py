"""What is looked at while no group trains, how often, and on which nodes the next one starts. The cluster and the clock are
faked, the policies are real."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RaySystemError
from ray.train import ScalingConfig

from springtide import config as configs
from springtide.elastic import Interrupt
from springtide.elastic.allocation import WorkerShare
from springtide.elastic.limits import MemoryLimits
from springtide.elastic.policy import Bounds, Leave, RestartForecast, Stay
from springtide.errors import StoppedWaiting, TrainingFailed, TrainingInterrupted
from springtide.events import Decided, Failed
from springtide.on_ray._ray_private import NoopDecision
from springtide.on_ray.cluster import nodes
from springtide.on_ray.train import hang, policy
from springtide.on_ray.train.mailbox import Progress
from springtide.on_ray.train.policy import SpringtideScalingPolicy
from springtide.on_ray.train.process_pool import WorkerProcessPool
from springtide.on_ray.train.worker import TrainJob
from springtide.on_ray.train.worker_lender import WorkerLender


class Run:
    """A run on a faked cluster of nodes with one place each, and its policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bounds: Bounds, names: list[str], look_s: float = 0.0) -> None:
        """``look_s``: processor time that a look takes."""
        self.names, self.silent, self.away = names, set[str](), False
        self.now_s, self.cpu_s = 1000.0, 0.0
        self.looks, self.probed, self.posted = 0, list[set[str]](), list[Any]()
        self.stop_at_s, self.left, self.silent_s = float("inf"), False, 0.0
        self.trained, self.step_s, self.prospects = 0, 1.0, dict[str, float]()
        self.leaving: dict[str, int] = {}
        self.held, self.others, self.taken = dict[str, int](), "", set[str]()
        self.asked, self.saves, self.problem = list[Any](), list[str](), ""
        self.ran, self.left_s = list[int](), list[float]()

        def table() -> list[dict[str, Any]]:
            self.looks += 1
            self.cpu_s += look_s
            if self.away:
                raise RaySystemError("the control store is away")
            return [{"NodeID": name, "Alive": True} for name in self.names]

        def unanswering(names: set[str], speaks: bool) -> set[str]:
            self.probed.append(set(names))
            return names & self.silent

        def wait(timeout_s: float) -> bool:
            self.now_s += timeout_s
            return self.workers.processes.closed

        monkeypatch.setattr(nodes.ray, "nodes", table)
        monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: self.leaving)
        monkeypatch.setattr(policy, "unanswering", unanswering)
        monkeypatch.setattr(policy, "SnapshotSaver", lambda job: self)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, thread_time=lambda: self.cpu_s)
        monkeypatch.setattr(policy, "time", clock)
        monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s))
        share: Any = SimpleNamespace(mine=self.mine)
        self.workers = WorkerLender(share)
        monkeypatch.setattr(WorkerProcessPool, "wait", lambda pool, timeout_s: wait(timeout_s))
        reply = lambda value=None: SimpleNamespace(get=lambda timeout_s=None: value, wait=lambda: None)  # noqa: E731
        mailbox: Any = SimpleNamespace(
            progress=lambda: reply(
                Progress(
                    step=self.trained,
                    left=self.left,
                    stop=self.now_s >= self.stop_at_s,
                    silent_s=self.silent_s,
                    longest_s=60.0,
                    prospects=RestartForecast(step_s=self.step_s, **self.prospects),
                )
            ),
            post=lambda events: reply(self.posted.extend(events)),
            limit_micro_batch=lambda rows: reply(),
            reset_for_new_group=reply,
            notices=lambda: reply({}),
            group_runs=lambda workers: reply(self.ran.append(workers)),
            ask=self.ask,
        )
        job = TrainJob(configs.recipes.tiny(), mailbox)
        scaling = ScalingConfig(num_workers=(bounds.min_workers, bounds.max_workers), resources_per_worker={"CPU": 1})
        self.policy = SpringtideScalingPolicy(scaling, bounds, job, None, self.workers, MemoryLimits(1))
        for name in ("_maybe_send_resource_request", "_send_resource_request"):
            monkeypatch.setattr(self.policy, name, lambda: None)

    def mine(self, timeout_s: float, holds: Mapping[str, int], most: int) -> WorkerShare:
        """As ``QueueClient``."""
        self.held = dict(holds)
        return WorkerShare({name: {"CPU": 1.0} for name in self.names if name not in self.taken}, self.others)

    def ask(self, interrupt: Interrupt, left_s: float = math.inf) -> None:
        """As ``MailboxClient``."""
        self.asked.append(interrupt)
        self.left_s.append(left_s)

    def begin(self) -> None:
        """As ``SnapshotSaver``."""
        self.saves.append("begin")

    def cancel(self) -> None:
        self.saves.append("cancel")

    def finish(self, is_over: Any) -> str:
        self.saves.append("finish")
        return self.problem

    def step(self) -> Any:
        """One turn of Ray's loop."""
        return self.policy.make_decision_for_non_running_worker_group()

    def until_started(self) -> tuple[str, ...]:
        for _ in range(1000):
            if not isinstance(self.step(), NoopDecision):
                return self.workers.processes.plan
        raise AssertionError("no group starts")


def test_waiting_costs_less_than_one_hundredth_of_a_core_and_asks_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"node-{number}" for number in range(1000)]
    run = Run(monkeypatch, Bounds(1001, 1001), names, look_s=0.02)
    begin_s = run.now_s
    while run.now_s - begin_s < 600.0:
        assert isinstance(run.step(), NoopDecision)
    assert run.cpu_s / (run.now_s - begin_s) < 0.01
    assert run.looks == round(run.cpu_s / 0.02)  # once a look
    assert not any(run.probed)
    run.names = [*names, "last"]
    before_s = run.now_s
    assert len(run.until_started()) == 1001
    assert run.now_s == before_s  # at the first look
    assert len(run.probed[-1]) == 1001


def test_a_small_cluster_is_looked_at_ten_times_a_second_and_a_request_to_stop_is_heard_in_a_long_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(3, 3), ["a"])
    run.step()
    run.now_s += 10.0  # settled
    before_s = run.now_s
    run.step()
    assert run.now_s - before_s == pytest.approx(0.1)
    slow = Run(monkeypatch, Bounds(3, 3), ["a"], look_s=1.0)
    slow.step()
    slow.now_s += 10.0
    slow.stop_at_s = slow.now_s + 0.2
    before_s = slow.now_s
    slow.step()
    assert slow.now_s - before_s == pytest.approx(0.5)  # of 5 s
    with pytest.raises(StoppedWaiting, match="no group trained"):
        slow.step()


def test_the_state_is_saved_from_memory_while_nobody_can_train_and_before_the_run_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(2, 2), ["a"])
    run.step()
    assert run.saves == []  # a node may be back at once
    run.now_s += 10.0
    run.step()
    assert run.saves == ["begin"]
    run.names = ["a", "b"]
    run.until_started()
    assert run.saves[-1] == "cancel"
    run.names, run.stop_at_s = ["a"], run.now_s
    with pytest.raises(StoppedWaiting):
        run.step()
    assert run.saves[-1] == "finish"
    run.problem = "503"
    with pytest.raises(TrainingInterrupted, match=r"memory only, cannot be saved: 503; the nodes hold it for a minute"):
        run.step()


def test_a_group_that_is_to_leave_into_memory_is_asked_again_where_no_room_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 2), ["a", "b"])
    no_room, room_again = Stay("too few would stay", save=True), Stay("2 workers train")
    for decision in (room_again, no_room, no_room, room_again, no_room, Leave("notice"), Leave("notice"), no_room):
        run.policy._ask(decision)
    assert run.asked == [Interrupt.SAVE, Interrupt.SAVE, Interrupt.LEAVE]  # early, once a notice
    for decision in (Leave("notice", durable=True), Leave("notice"), Leave("notice", durable=True)):
        run.policy._ask(decision)
    assert run.asked[3:] == [Interrupt.EVACUATE]
    run.until_started()
    run.policy._ask(Leave("notice"))
    assert run.asked[4:] == [Interrupt.LEAVE]  # the next group


def test_a_group_is_told_of_each_notice_at_once_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(1, 3), ["a", "b", "c"])
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in run.names]
    )
    run.until_started()

    def look() -> list[Interrupt]:
        run.asked.clear()
        assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
        return list(run.asked)

    assert look() == []
    run.leaving = {"b": 0}  # in 120 s
    assert look() == [Interrupt.COPY]
    assert look() == []
    run.leaving = {"b": 0, "c": 0}
    assert look()[0] is Interrupt.COPY
    run.leaving = {}
    assert look() == []
    run.leaving = {"b": 0}
    assert look()[0] is Interrupt.COPY


def test_a_node_that_leaves_in_hours_is_used_like_any_other_as_long_as_its_processes_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 4, settle_s=0.0, grow="always"), ["a", "b"])
    run.until_started()
    run.leaving = {"a": int((run.now_s + 7 * 3600.0) * 1000)}
    run.leaving["b"] = run.leaving["c"] = run.leaving["a"]
    run.names = ["a", "b", "c"]  # Ray starts no process on c: no group waits for one
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in "ab"])
    monkeypatch.setattr(run.workers.processes, "_begin", lambda node: pytest.fail(f"a process is started on {node}"))
    for _ in range(3):
        run.now_s += 100.0
        assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    assert run.asked == []  # nobody makes copies again, or leaves
    assert run.policy._get_num_workers_for_resource_request() == 4  # nor pays for twice the nodes
    assert run.posted[-1].reason == "2 workers train"
    run.leaving["b"] = int((run.now_s + 1800.0) * 1000)
    run.policy.make_decision_for_running_worker_group(group, None)
    assert run.asked == [Interrupt.COPY]
    assert run.policy._get_num_workers_for_resource_request() == 5


def test_a_node_that_drains_without_a_deadline_is_left_after_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(1, 2, settle_s=0.0), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in "ab"])
    run.leaving, begin_s = {"b": 0}, run.now_s
    while Interrupt.LEAVE not in run.asked and run.now_s < begin_s + 600.0:
        run.policy.make_decision_for_running_worker_group(group, None)
        run.now_s += 1.0
    assert begin_s + 100.0 < run.now_s <= begin_s + 120.0


def test_a_node_is_listened_to_as_long_as_a_group_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue gives no places on a node that leaves; what its cloud says next may be a nearer time."""
    run, covered = Run(monkeypatch, Bounds(1, 2, settle_s=0.0, shares=True), ["a", "b"]), list[set[str]]()
    monkeypatch.setattr(run.policy, "_watches", SimpleNamespace(cover=covered.append))
    run.until_started()
    run.leaving, run.taken = {"b": int((run.now_s + 600.0) * 1000)}, {"b"}
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in "ab"])
    run.policy.make_decision_for_running_worker_group(group, None)
    assert covered[-1] == {"a", "b"}
    run.names = ["a"]
    run.policy.make_decision_for_running_worker_group(group, None)
    assert covered[-1] == {"a"}


def test_a_group_that_is_to_leave_learns_how_long_a_copy_may_take_and_when_that_becomes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 2), ["a", "b"])
    run.policy._ask(Leave("more room"))
    run.policy._ask(Leave("notice", by_s=run.now_s + 60.0))
    run.now_s += 10.0
    run.policy._ask(Leave("notice", by_s=run.now_s + 50.0))  # the same time
    run.policy._ask(Leave("notice", by_s=run.now_s + 50.1))
    run.policy._ask(Leave("notice", by_s=run.now_s + 20.0))  # another node goes earlier
    run.policy._ask(Leave("notice", durable=True, by_s=run.now_s + 15.0))
    assert run.asked == [Interrupt.LEAVE] * 3 + [Interrupt.EVACUATE]
    assert run.left_s == [math.inf, 60.0, 20.0, 15.0]


def test_a_group_starts_as_soon_as_the_nodes_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(1, 3, settle_s=2.05), ["a", "b"], look_s=0.05)
    begin_s = run.now_s
    assert run.until_started() == ("a", "b")
    assert run.now_s - begin_s == pytest.approx(2.05, abs=0.01)


def test_only_the_nodes_that_would_train_are_asked_and_a_silent_one_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(2, 2, settle_s=0.0), ["a", "b", "c", "d"])
    run.silent = {"a"}
    assert run.until_started() == ("b", "c")
    assert [names for names in run.probed if names] == [{"a", "b"}, {"b", "c"}]
    decided = [event for event in run.posted if isinstance(event, Decided)]
    assert [event.decision for event in decided] == ["start"]  # what is done, not what was tried
    losses = run.policy._memory.losses
    run.probed.clear()
    for _ in range(5):
        run.now_s += 1.0
        assert run.until_started() == ("b", "c")
    assert run.policy._memory.losses == losses  # one loss is one, however often it is looked at
    assert run.probed[0] == {"a"}  # asked again
    run.silent, run.names = set(), ["a", "b"]
    run.now_s += 1.0
    assert run.until_started() == ("a", "b")


def test_a_cluster_that_cannot_be_looked_at_for_a_while_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(1, 1), ["a"])
    begin_s, run.away = run.now_s, True
    for _ in range(30):
        assert isinstance(run.step(), NoopDecision)
    assert run.now_s - begin_s == 1 + 2 + 4 + 8 + 16 + 32 + 24 * 60
    run.away = False
    assert run.until_started() == ("a",)
    run.away = True
    for _ in range(30):
        run.step()
    with pytest.raises(RaySystemError, match="away"):
        run.step()


def test_a_cluster_that_cannot_be_looked_at_does_not_disturb_a_group_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 1, settle_s=0.0), ["a"])
    run.away = True
    worker: Any = SimpleNamespace(metadata=SimpleNamespace(node_id="a"))
    group: Any = SimpleNamespace(workers=[worker])
    for _ in range(50):
        assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)


def test_a_mailbox_that_is_slow_for_once_tells_of_no_step_and_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart takes longer than what is left of the run; without an answer its cost is as it was known."""
    run = Run(monkeypatch, Bounds(1, 2, settle_s=0.0), ["a", "b"])
    run.trained, run.prospects = 700, {"restart_s": 180.0, "left_s": 60.0}
    run.taken = {"b"}
    run.until_started()
    worker: Any = SimpleNamespace(metadata=SimpleNamespace(node_id="a"))
    group: Any = SimpleNamespace(workers=[worker])
    monkeypatch.setattr(WorkerProcessPool, "warm", lambda *_: None)
    monkeypatch.setattr(WorkerProcessPool, "ready", lambda pool, busy: Counter(run.names))
    run.policy.make_decision_for_running_worker_group(group, None)
    run.taken, mailbox = set(), run.policy._mailbox
    monkeypatch.setattr(mailbox, "progress", late)
    for _ in range(5):
        run.now_s += 30.0
        run.policy.make_decision_for_running_worker_group(group, None)
    assert run.asked == []
    assert not run.policy._limits._trained, "it has done no step that anybody knows of"


def late() -> Any:
    """A call that is not answered in time."""

    def get(timeout_s: float | None = None) -> Any:
        raise GetTimeoutError

    return SimpleNamespace(get=get)


def test_a_request_to_stop_is_heard_after_a_group_has_left_without_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(2, 2, settle_s=0.0), ["a"])
    run.policy._share = None  # it is alone on the cluster
    monkeypatch.setattr(run.policy, "_reserved", lambda *_: run.mine(0.0, {}, 2).nodes)
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id="a"))])
    run.left = True
    assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    run.stop_at_s = run.now_s
    with pytest.raises(StoppedWaiting, match="no group trained"):
        run.policy.make_decision_for_running_worker_group(group, None)
    assert run.posted[-1].status == "stopped"
    # with room the next group starts: it hears the request, and saves what is in memory only
    run.names = ["a", "b"]
    assert not isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)


def test_a_run_that_others_take_all_workers_from_gives_them_back_and_says_for_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 2, settle_s=0.0, shares=True), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in "ab"])
    assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    assert run.held == {"a": 1, "b": 1}
    run.taken, run.others = {"a", "b"}, "'big' (priority 7) gets 2 workers"
    assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    assert run.asked == [Interrupt.EVACUATE]  # nobody follows it yet: its state goes to the store
    run.left = True
    assert run.policy.make_decision_for_running_worker_group(group, None).num_workers == 0
    said = [one.reason for one in run.posted if isinstance(one, Decided)]
    assert said[-2] == "2 workers for other runs: 'big' (priority 7) gets 2 workers"
    assert said[-1].endswith("room for 0 workers, elastic.min_workers is 1; 'big' (priority 7) gets 2 workers")
    assert isinstance(run.step(), NoopDecision)
    assert run.held == {}
    run.taken = {"a"}
    assert run.until_started() == ("b",)


def test_no_group_starts_before_a_store_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(1, 1), ["a"])
    run.workers.processes.not_before_s = run.now_s + 30.0
    run.until_started()
    assert run.now_s == pytest.approx(1030.0, abs=0.2)


def test_a_run_whose_driver_has_ended_does_not_go_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Bounds(2, 2), ["a"])
    run.step()
    run.workers.processes.close()
    with pytest.raises(StoppedWaiting, match="its driver has ended"):
        run.step()


def test_a_group_that_hangs_while_there_is_no_room_for_the_next_one_counts_as_one_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 4124 of the simulation: it counted again at every look, and the third ended the run."""
    run = Run(monkeypatch, Bounds(2, 2), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name), actor=None) for name in ("a", "b")]
    )
    diagnosed = list[int]()
    monkeypatch.setattr(policy, "diagnose", lambda workers, *_: (diagnosed.append(1) or "stacks", []))
    run.silent_s, run.leaving = 1e6, {"b": 1}
    for _ in range(5):
        run.now_s += 1.0
        assert isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    assert [event.again for event in run.posted if isinstance(event, Failed)] == [True]
    assert len(diagnosed) == 1
    assert run.ran == [2]  # once a group: its silence begins when it runs, not when its processes start
    run.leaving, run.names, run.now_s = {}, ["a", "c"], run.now_s + 30.0
    assert not isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    run.now_s += 1.0  # the next group hangs, too, and the one after it
    assert not isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    with pytest.raises(TrainingFailed, match="training hung 3 times after step 0"):
        run.policy.make_decision_for_running_worker_group(group, None)


def test_state_of_a_group_that_recovers_from_a_hang_is_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 365 of the simulation: a save during the hang counted as the newest state; later steps stayed in memory only."""
    run = Run(monkeypatch, Bounds(2, 2), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name), actor=None) for name in ("a", "b")]
    )
    monkeypatch.setattr(policy, "diagnose", lambda *_: ("stacks", []))
    run.silent_s, run.names = 1e6, ["a"]
    for _ in range(12):
        run.now_s += 1.0
        run.policy.make_decision_for_running_worker_group(group, None)
    assert run.saves[-1] == "begin"
    run.silent_s, run.names = 0.0, ["a", "b"]
    run.policy.make_decision_for_running_worker_group(group, None)
    assert run.saves[-1] == "cancel"


def test_a_run_whose_group_hangs_can_be_stopped_while_there_is_no_room_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(2, 2), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(workers=[SimpleNamespace(metadata=SimpleNamespace(node_id="a"), actor=None)])
    monkeypatch.setattr(policy, "diagnose", lambda *_: ("stacks", []))
    run.silent_s, run.names, run.stop_at_s = 1e6, ["a"], run.now_s
    with pytest.raises(StoppedWaiting, match="no group trained"):
        run.policy.make_decision_for_running_worker_group(group, None)


def test_a_group_that_waits_for_one_rank_is_ended_long_before_the_time_limit_but_not_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Bounds(1, 2, settle_s=0.0), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name), actor=name) for name in ("a", "b")]
    )
    waits, killed = ("/torch/distributed/distributed_c10d.py:1",), list[str]()
    monkeypatch.setattr(policy.ray, "kill", killed.append)
    monkeypatch.setattr(policy, "diagnose", lambda workers, *_: ("rank 1 does not answer", [workers[1]]))
    monkeypatch.setattr(hang, "look", lambda workers: [waits, ()])
    monkeypatch.setattr(hang.Watch, "lacks", lambda *_: False)
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: run.now_s))
    run.silent_s = 20.0  # a step takes a second, and the limit is 60 s

    def looks(number: int) -> list[bool]:
        found = []
        for _ in range(number):
            run.now_s += 2.0
            found.append(isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision))
        return found

    assert looks(5) == [True] * 5  # it may compile
    run.trained = 7
    assert looks(3) == [True, True, False]
    assert killed == ["b"]
    [failed] = [event for event in run.posted if isinstance(event, Failed)]
    assert failed.reason == "no event for 20 s, all other ranks wait for 1; rank 1 does not answer"


def test_hangs_of_processes_that_do_not_answer_are_the_fault_of_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 4 of the storms: three nodes in turn stopped at one step, and the third ended the run."""
    run = Run(monkeypatch, Bounds(1, 2, settle_s=0.0), ["a", "b"])
    run.until_started()
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(metadata=SimpleNamespace(node_id=name), actor=name) for name in ("a", "b")]
    )
    killed = list[str]()
    monkeypatch.setattr(policy.ray, "kill", killed.append)
    monkeypatch.setattr(policy, "diagnose", lambda workers, *_: ("stacks", [workers[1]]))
    run.silent_s = 1e6
    for _ in range(9):
        run.now_s += 1.0
        assert not isinstance(run.policy.make_decision_for_running_worker_group(group, None), NoopDecision)
    assert killed == ["b"] * 9
    with pytest.raises(TrainingFailed, match="training hung 10 times after step 0"):
        run.policy.make_decision_for_running_worker_group(group, None)
