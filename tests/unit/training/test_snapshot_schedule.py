"""The memory tier goes off when a rank cannot keep a snapshot, is told, and comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stepping import contributed, done_step, result_of

from springtide import config as configs
from springtide.elastic import GroupRequest
from springtide.events import SnapshotIntervalChanged
from springtide.training import snapshot_schedule
from springtide.training.snapshot_schedule import SnapshotSchedule


class Memory:
    """A snapshotter whose server is full for a while."""

    def __init__(self) -> None:
        self.full, self.begun, self.under_way = False, 0, False
        self.slow, self.stays, self.evacuated, self.asked = False, True, 0, 0
        """Whether copies never arrive; whether a node stays that can hold them."""

    def begin(self, *_: Any) -> None:
        self.begun += 1
        self.under_way = True

    def staged(self) -> None:
        return None

    def busy(self) -> bool:
        if self.full and self.under_way:
            raise OSError("the snapshot server of this node does not answer in time")
        self.under_way &= self.slow
        return self.under_way

    def staying(self) -> list[str]:
        self.asked += 1
        return ["a", "b"]

    def evacuate(self, stay: list[str]) -> bool:
        assert stay == ["a", "b"]
        self.evacuated += 1
        return self.stays

    def reset(self) -> None:
        self.under_way = False

    def close(self) -> None:
        return None


class Training:
    """Steps of one rank, a second each, that take snapshots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int = 1) -> None:
        self.now_s, self.step, self.memory = 1000.0, 0, Memory()
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(snapshot_schedule, "time", clock)
        config = configs.recipes.tiny().override({"checkpoint.memory_every": every}).checkpoint
        memory: Any = self.memory
        self.schedule = SnapshotSchedule(config, lambda: memory, lambda: ({}, None), True)  # type: ignore[arg-type, return-value]
        self.schedule.begin(None)

    def sleep(self, seconds: float) -> None:
        """Let time pass, but not for ever."""
        self.now_s += seconds
        assert self.now_s < 5000.0, "it waits for ever"

    def steps(self, number: int, asked: frozenset[GroupRequest] = frozenset()) -> list[SnapshotIntervalChanged]:
        told: list[Any] = []
        for _ in range(number):
            self.now_s += 1.0
            self.step += 1
            result = result_of(contributed(self.schedule, step=self.step - 1), requests=asked)
            told += self.schedule.between_steps(done_step(self.step, result))
        return told


def test_failed_snapshots_are_retried_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots that cannot be kept are tried again after growing pauses and both are told."""
    run = Training(monkeypatch)
    assert run.steps(5) == []
    run.memory.full = True
    [off] = run.steps(10)
    assert off.every_steps == 0
    assert off.reason.endswith("in 60 s")
    begun = run.memory.begun
    [again] = run.steps(60)
    assert again.reason.endswith("in 120 s")
    assert run.memory.begun == begun + 1  # not at each step
    run.memory.full = False
    [on] = run.steps(125)
    assert (on.every_steps, on.reason) == (1, "they can be kept again")
    begun = run.memory.begun
    run.steps(5)
    assert run.memory.begun == begun + 5
    run.memory.full = True
    [off] = run.steps(3)
    assert off.reason.endswith("in 60 s")


def test_a_group_that_leaves_without_snapshots_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that leaves while snapshots are off goes to the store and does not wait."""
    run = Training(monkeypatch)
    assert run.schedule.leave(0)
    run.memory.full = True
    run.steps(3)
    begun = run.memory.begun
    assert not run.schedule.leave(3)
    assert run.memory.begun == begun


def test_a_group_that_finds_memory_full_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that learns as it leaves that memory is full goes to the store."""
    run = Training(monkeypatch)
    run.steps(2)
    run.memory.full = True
    assert not run.schedule.leave(2)


@pytest.mark.parametrize("slow_from", ["the snapshot before", "the last one"])
def test_a_group_with_late_copies_turns_to_the_store(monkeypatch: pytest.MonkeyPatch, slow_from: str) -> None:
    """A group whose copies do not arrive in time turns to the store early."""
    run = Training(monkeypatch)
    run.memory.slow = slow_from == "the snapshot before"
    run.steps(1)
    assert run.memory.busy() == run.memory.slow
    run.memory.slow, begun, begin_s = True, run.memory.begun, run.now_s
    assert not run.schedule.leave(2, left_s=7.0)
    assert 7.0 <= run.now_s - begin_s < 7.1
    assert run.memory.begun - begun == (slow_from == "the last one")


def test_a_group_without_a_near_deadline_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that leaves in time or has no deadline waits for its copies."""
    run = Training(monkeypatch)
    run.steps(2)
    assert run.schedule.leave(3, left_s=0.5)
    run.memory.slow = True
    with pytest.raises(AssertionError, match="waits"):
        run.schedule.leave(4)


def test_a_group_of_which_no_node_stays_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    run.memory.slow, run.memory.stays = True, False
    run.steps(1)
    begin_s = run.now_s
    assert not run.schedule.leave(2, left_s=60.0)
    assert run.now_s == begin_s


def test_after_a_notice_the_next_snapshot_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a notice the next snapshot goes to nodes that stay and does not wait for its turn."""
    run = Training(monkeypatch, every=50)
    run.steps(10)
    assert run.memory.begun == 0
    run.memory.under_way = run.memory.slow = True  # the one before is not safe yet
    run.steps(1, frozenset({GroupRequest.COPY}))
    assert (run.memory.evacuated, run.memory.asked, run.memory.begun) == (1, 1, 0)
    run.steps(3)
    assert run.memory.begun == 0
    run.memory.slow = False
    run.steps(2)
    assert (run.memory.evacuated, run.memory.begun) == (1, 1)
    run.steps(48)
    assert run.memory.begun == 1  # then as before
    run.steps(3)
    assert run.memory.begun == 2
