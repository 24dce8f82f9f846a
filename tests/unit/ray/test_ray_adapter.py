"""A worker group that does not come to train: what becomes of its processes. Ray is faked, its group's start is interrupted."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeRay, faked
from ray.exceptions import ActorDiedError, RayTaskError

from springtide import config as configs
from springtide.elastic.patience import StartTimes
from springtide.errors import CheckpointError
from springtide.ray._ray_private import WorkerGroupStartupFailedError
from springtide.ray.train import ray_adapter
from springtide.ray.train.failure_policy import fatal
from springtide.ray.train.job import TrainJob
from springtide.ray.train.process_pool import WorkerProcessPool
from springtide.ray.train.ray_adapter import PooledWorkerGroup


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = faked(monkeypatch)
    monkeypatch.setattr(ray_adapter, "ray", found)
    monkeypatch.setattr(ray_adapter, "_starter", lambda resources, environment: found.start)
    return found


def forming(processes: WorkerProcessPool, setup: Any, *nodes: str) -> PooledWorkerGroup:
    """A group on ``nodes`` which calls ``setup`` where Ray sets it up."""
    job: Any = TrainJob(configs.recipes.tiny(), mailbox=None)  # type: ignore[arg-type]
    processes.prepare(nodes, job)

    class Group(PooledWorkerGroup):
        def __init__(self) -> None:
            self.processes = processes  # type: ignore[misc]
            self._train_run_context: Any = SimpleNamespace(run_config=SimpleNamespace(worker_runtime_env={}))
            self._world_rank_to_ongoing_poll: dict[int, object] = {}
            self._worker_group_state: Any = None

        def _start_impl(self, worker_group_state_builder: object) -> None:
            workers = self._create_workers(len(nodes), None, {"CPU": 1.0})
            self._worker_group_state = SimpleNamespace(workers=workers)
            setup()

    return Group()


def raises(error: Exception) -> Any:
    def setup() -> None:
        raise error

    return setup


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        RuntimeError("[Errno 98] EADDRNOTAVAIL"),
        TimeoutError("rendezvous"),
        WorkerGroupStartupFailedError("as Ray says it"),
    ],
)
def test_a_group_that_fails_while_it_forms_gives_its_processes_back(ray: FakeRay, error: Exception) -> None:
    """One is lost with its node, one waits for it in the process group's setup, one is free."""
    processes = WorkerProcessPool()
    ray.let_go_s["stuck"] = 600.0
    begin_s = ray.now_s
    one = forming(processes, raises(error), "free", "lost", "stuck")
    ray.silent = {"lost"}
    with pytest.raises(WorkerGroupStartupFailedError) as found:
        one._start()
    assert found.value is error or found.value.__cause__ is error
    assert not one.has_started()
    assert ray.alive == ["free"]
    assert ray.now_s - begin_s < 5.0 + 5.0  # to start, and to let go
    # and the next group has room for its processes at once
    again = forming(processes, lambda: None, "free", "stuck")
    again._start()
    assert ray.alive == ["free", "stuck"]
    assert len(ray.started) == 4


def test_an_error_of_ours_is_still_known_for_what_it_is(ray: FakeRay) -> None:
    ours = CheckpointError("none of the checkpoints can be used")
    for error in (ours, RayTaskError("_setup", "trace", ours)):
        with pytest.raises(WorkerGroupStartupFailedError) as found:
            forming(WorkerProcessPool(), raises(error), "a")._start()
        assert fatal(SimpleNamespace(controller_failure=found.value)) is ours  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [{"b"}, set[str]()])
def test_a_group_with_a_lost_or_hung_process_is_ended(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, lost: set[str]
) -> None:
    """A group that waits for a lost node or for a process that hangs is ended.

    Ray notices a lost node much later, and a process that hangs never."""
    processes = WorkerProcessPool()
    processes.setup_times = StartTimes(*((60.0, 60.0) if lost else (0.01, 0.01)))
    monkeypatch.setattr(ray_adapter, "_LOOK_S", 0.02)
    ended = list[str]()
    failed, kill = threading.Event(), ray.kill

    def killed(actor: Any) -> None:
        kill(actor)
        ended.append(actor.node)
        if ended in (["b"], ["a", "b"]):
            failed.set()

    monkeypatch.setattr(ray, "kill", killed)

    def setup() -> None:
        ray.silent = lost
        assert failed.wait(30)  # for the other
        raise ActorDiedError

    with pytest.raises(WorkerGroupStartupFailedError):
        forming(processes, setup, "a", "b")._start()
    assert ray.alive == (["a"] if lost else [])


def test_a_hung_process_is_left_behind_in_seconds(ray: FakeRay) -> None:
    """A process that hangs is left behind in seconds and one that died takes no node along."""
    processes = WorkerProcessPool()
    processes.give_back(_taken(processes, ray, "a", "hangs", "dies"))
    ray.answer_s["hangs"] = math.inf
    ray.started[2].is_alive = False
    begin_s = ray.now_s
    with pytest.raises(WorkerGroupStartupFailedError, match=r"hangs, dies$"):
        forming(processes, lambda: None, "a", "hangs", "dies")._start()
    assert ray.now_s - begin_s == 10.0
    assert processes.problems() == {"hangs": "its worker does not answer in 10 s"}
    forming(processes, lambda: None, "a", "dies")._start()
    assert ray.alive == ["a", "dies"]


@pytest.mark.parametrize(("workers", "interval_s"), [(1, 0.2), (100, 0.2), (1000, 2.0)])
def test_a_controller_asks_its_workers_no_more_than_it_can(
    monkeypatch: pytest.MonkeyPatch, workers: int, interval_s: float
) -> None:
    controller = object.__new__(ray_adapter.Controller)
    controller._shortest_look_s = 0.2
    policy, running = SimpleNamespace(is_leaving=False), SimpleNamespace(is_silent=False)
    controller._scaling_policy, controller._worker_group = policy, running  # type: ignore[assignment]
    seen: list[float] = []

    async def polled(self: Any) -> None:
        seen.append(self._health_check_interval_s)

    monkeypatch.setattr(ray_adapter.TrainController, "_start_worker_group", lambda self, number, resources: None)
    monkeypatch.setattr(ray_adapter.TrainController, "_poll_workers", polled)
    controller._start_worker_group(workers, {"CPU": 1})
    for policy.is_leaving, running.is_silent in ((False, False), (True, False), (False, True), (False, False)):
        asyncio.run(controller._poll_workers())
    assert seen == [interval_s, 0.05, 0.05, interval_s]


def _taken(processes: WorkerProcessPool, ray: FakeRay, *nodes: str) -> Any:
    job: Any = TrainJob(configs.recipes.tiny(), mailbox=None)  # type: ignore[arg-type]
    processes.prepare(nodes, job)
    return processes.take(ray.start)
