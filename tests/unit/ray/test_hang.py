"""What the ranks of a hung group are doing is written down, if the store takes it, and the group is ended in any case."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.config import recipes
from springtide.elastic.policy import RestartForecast
from springtide.elastic.stalled import BUSY, STARVED, Frames, stalled
from springtide.ray.cluster import liveness
from springtide.ray.train import hang, worker
from springtide.ray.train.hang import Collective, newest_collectives
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Progress


class Actor(SimpleNamespace):
    """A worker's, by identity."""

    __hash__ = object.__hash__

    def __init__(self, execute: Any, is_stopped: bool) -> None:
        super().__init__(execute=execute, is_stopped=is_stopped)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two, of which the second does not answer."""
    newest = (Collective("0 default_pg", 7, "nccl:all_reduce", "[4]", False),)

    def wait(asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [answer for answer in asked if answer != "silent"], ["silent"]

    ray = SimpleNamespace(wait=wait, get=lambda answer: answer)
    monkeypatch.setattr(hang, "ray", ray)
    monkeypatch.setattr(hang, "silent_processes", lambda actors: {one for one in actors if one.is_stopped})

    def worker(answer: str) -> Any:
        execute = SimpleNamespace(remote=lambda function: newest if function is newest_collectives else answer)
        actor = Actor(execute, is_stopped=answer == "silent")
        return SimpleNamespace(actor=actor, metadata=SimpleNamespace(node_id="node", pid=1))

    return [worker(answer) for answer in ("stacks", "silent")]


class Store:
    """A run's folder in a store."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.written, self.back = error, dict[str, str](), threading.Event()
        self.back.set()

    def __truediv__(self, name: str) -> Store:
        return self

    def write(self, name: str, text: str) -> None:
        """Wait until the store is back, and write or fail."""
        self.back.wait(60)
        if self.error:
            raise self.error
        self.written[name] = text


def test_the_stacks_are_written_and_the_silent_ones_named(workers: list[Any]) -> None:
    store: Any = Store()
    summary, silent = hang.diagnose(workers, store, 7)
    assert silent == workers[1:]
    [(name, text)] = store.written.items()
    assert summary == f"rank 1 on node node, pid 1 does not answer; their stacks are in hangs/{name}"
    newest = "collective 7 of group 0 default_pg: nccl:all_reduce [4], under way"
    assert f"rank 0 on node node, pid 1\n{newest}\nstacks" in text


def test_a_rank_that_holds_the_lock_is_busy_and_not_ended(workers: list[Any]) -> None:
    workers[1].actor.is_stopped = False
    assert hang.look(workers) == ["stacks", BUSY]
    summary, silent = hang.diagnose(workers, Store(), 7)  # type: ignore[arg-type]
    assert silent == []
    assert summary.startswith("every rank answers")
    assert stalled([WAITS, BUSY], [WAITS, BUSY]) == []  # the time limit decides


def test_a_lost_process_is_named_within_twenty_seconds(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is gone is named within twenty seconds whatever the group does."""
    watch, now_s, looks = hang.Watch(), [1000.0], list[float]()

    def silent_processes(actors: Any) -> set[Any]:
        looks.append(now_s[0])
        return {one for one in actors if one.is_stopped}

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(liveness, "silent_processes", silent_processes)
    starting = {"step": 0, "longest_s": 3600.0, "step_s": math.inf}
    while not watch.lacks(workers, silent(now_s[0] - 1000.0, **starting)):  # type: ignore[arg-type]
        now_s[0] += 0.2
    assert now_s[0] - 1000.0 < 18.0
    assert watch.silent == {1}
    assert len(looks) <= 6  # each costs a connection to every worker
    workers[1].actor.is_stopped = False  # it goes on, as after a pause of its host
    now_s[0] += 4.0
    assert not watch.lacks(workers, silent(20.0, **starting))  # type: ignore[arg-type]


def test_an_absent_store_does_not_keep_a_hung_group(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away does not keep a hung group alive."""
    away: Any = Store(RuntimeError("botocore: Could not connect to the endpoint URL"))
    summary, silent = hang.diagnose(workers, away, 7)
    assert "RuntimeError: botocore" in summary
    assert silent == workers[1:]
    slow: Any = Store()
    slow.back.clear()
    monkeypatch.setattr(hang, "_WRITE_S", 0.05)
    assert "still being written" in hang.diagnose(workers, slow, 7)[0]
    slow.back.set()


class Clock:
    """Time that goes on when it is told."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def group(monkeypatch: pytest.MonkeyPatch, looks: list[list[Frames]]) -> tuple[hang.Watch, Clock, list[float]]:
    """A watch on a group of which ``looks`` are what it sees; and when it looked."""
    clock, seen, left = Clock(), list[float](), iter(looks)
    monkeypatch.setattr(hang, "time", clock)

    def look(workers: Any) -> list[Frames]:
        seen.append(clock.now_s)
        return next(left)

    monkeypatch.setattr(hang, "look", look)
    return hang.Watch(), clock, seen


def silent(seconds: float, step: int = 7, step_s: float = 1.0, longest_s: float = 300.0) -> Progress:
    return Progress(step=step, silent_s=seconds, longest_s=longest_s, prospects=RestartForecast(step_s=step_s))


WAITS: Frames = ("/torch/distributed/distributed_c10d.py:1",)


def test_a_stopped_rank_is_named_by_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops is named by two looks within three steps and ten seconds."""
    watch, clock, seen = group(monkeypatch, [[WAITS, ()]] * 3)
    named_s = None
    for tenth in range(200):  # the controller looks ten times a second
        clock.now_s = 1000.0 + tenth / 10
        if watch.stalled([], silent(tenth / 10)):
            named_s = tenth / 10
            break
    assert named_s is not None
    assert named_s + 2 * hang.LOOK_S <= 3 * 1.0 + 10.0
    assert len(seen) == 2
    assert (watch.why, watch.silent) == ("all other ranks wait for 1", {1})
    assert not watch.stalled([], silent(0.1, step=8))  # of the next group nothing is said
    assert (watch.why, watch.silent) == ("", set())


def test_a_deadlocked_group_is_found_after_twenty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that waits for itself is found after twenty steps and half a minute."""
    for step_s, limit_s in ((0.01, 30.0), (4.0, 80.0)):
        watch, clock, _ = group(monkeypatch, [[WAITS, WAITS]] * 99)
        found_s = 0.0
        while not watch.stalled([], silent(found_s, step_s=step_s)):
            found_s += 0.5
            clock.now_s = 1000.0 + found_s
        assert limit_s < found_s < limit_s + 5.0
        assert (watch.why, watch.silent) == ("all ranks wait in a collective", set())


def test_a_rank_silent_twice_is_not_waited_for_again(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that did not answer twice is neither waited for nor probed again."""
    asked = list[Any]()
    monkeypatch.setattr(hang, "silent_processes", lambda actors: pytest.fail("probed again") if actors else set())
    monkeypatch.setattr(hang.ray, "wait", lambda answers, **_: (asked.extend(answers), (answers, []))[1])
    summary, silent = hang.diagnose(workers, Store(), 7, known={1})  # type: ignore[arg-type]
    assert (asked[0], len(asked), silent) == ("stacks", 2, workers[1:])  # and its collectives
    assert summary.startswith("rank 1 on node node, pid 1 does not answer")


def test_a_group_that_may_be_working_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that goes on or may wait for ever or has no step yet is not looked at."""
    watch, clock, seen = group(monkeypatch, [[WAITS, ()]] * 9)
    for progress in (silent(5.0), silent(50.0, longest_s=math.inf), silent(50.0, step_s=math.inf)):
        assert not watch.stalled([], progress)
    assert seen == []
    assert not watch.stalled([], silent(50.0, step=7))
    clock.now_s += 10.0
    assert not watch.stalled([], silent(50.0, step=8))  # another step: two looks at it
    assert len(seen) == 2


def test_a_look_finds_the_training_thread_only(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look finds the thread that trains and nothing of a process that does not answer."""
    assert hang.look(workers) == ["stacks", ()]
    assert hang.frames() == ()  # nothing trains here
    began, end = threading.Event(), threading.Event()

    def train(job: Any) -> bool:
        began.set()
        assert end.wait(30)
        raise ConnectionError

    monkeypatch.setattr(worker, "_train", train)
    thread = threading.Thread(target=lambda: _quiet(worker.work))
    thread.start()
    assert began.wait(30)
    found = hang.frames()
    end.set()
    thread.join()
    assert "threading.py" in found[0]
    assert any("test_hang.py" in frame for frame in found)


@pytest.mark.processes
def test_a_thread_without_a_core_does_not_stand_still() -> None:
    """Start 14 of 40 on busy cores was ended: rank 0 had no core for nine seconds, and stood at one line."""
    load = [
        subprocess.Popen(
            [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}:\n    sum(range(10**6))"]
        )
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    end = threading.Event()

    def compute() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not end.is_set():
            sum(range(1000))

    starved, idle = threading.Thread(target=compute), threading.Thread(target=end.wait, args=(60,))
    for thread in (starved, idle):
        thread.start()
    try:
        found = [any(hang._is_starved(thread.ident or 0) for _ in range(20)) for thread in (starved, idle)]
    finally:
        end.set()
        for process in load:
            process.kill()
            process.wait()
    assert found == [True, False]
    assert stalled([WAITS, STARVED], [WAITS, STARVED]) == []
    assert not hang._is_starved(-1)


def _quiet(work: Any) -> None:
    with contextlib.suppress(ConnectionError):
        work(TrainJob(recipes.tiny(), mailbox=None))  # type: ignore[arg-type]  # it posts nothing
