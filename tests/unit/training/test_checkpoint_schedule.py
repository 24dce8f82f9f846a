"""What becomes of a save that is due while one is under way, and of one that fails when nothing follows it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saving import meta
from scripted import ScriptedWriter, scripted
from stepping import contributed, done_step, result_of

from springtide import config as configs
from springtide.checkpoint.async_saver import Copying
from springtide.checkpoint.commit import Committed
from springtide.distributed import alone
from springtide.elastic import GroupRequest
from springtide.errors import CheckpointError, DiskFull, StoreUnavailable
from springtide.storage import Folder
from springtide.training import checkpoint_schedule
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.group_lease import GroupLease
from springtide.training.requests import Requests


class Training:
    """Steps of one rank whose only work is to save."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        given = {f"checkpoint.{name}": value for name, value in {"every_steps": 2, **changes}.items()}
        self.step = 0
        config, world = configs.recipes.tiny().override(given), alone(torch.device("cpu"))
        run = Folder(folder)
        self.beats, self.on_beat = 0, lambda: None
        lease = GroupLease(run, "me", "", {}, 1)
        self.schedule = CheckpointSchedule(config, world, run, lease, Requests(), self._state, self._beat)

    def __enter__(self) -> None:
        self.schedule.begin(None)

    def __exit__(self, *exception: object) -> None:
        self.schedule.close()

    def _beat(self) -> None:
        self.beats += 1
        self.on_beat()

    def _state(self) -> Any:
        return {"weight": torch.ones(4)}, meta(self.step)

    @property
    def writer(self) -> ScriptedWriter:
        return ScriptedWriter.started[-1]

    def one_step(self, interrupts: frozenset[GroupRequest] = frozenset()) -> list[Any]:
        """Do a step; its events, by name and step."""
        self.step += 1
        agreed = contributed(self.schedule, step=self.step - 1)
        self.schedule.before_update()
        done = done_step(self.step, result_of(agreed, requests=interrupts))
        events = told(self.schedule.between_steps(done))
        if isinstance(self.schedule._saver.state, Copying):
            self.schedule._saver.state.handed_over.result(60)
        return events


def told(events: Iterator[Any]) -> list[tuple[str, int]]:
    """Names and steps."""
    return [(type(event).__name__, event.step) for event in events]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Any]:
    """Makes trainings with scripted writers."""
    with scripted():
        yield lambda **changes: Training(tmp_path, **changes)


def written(step: int) -> Committed:
    return Committed(f"step-{step:010}", 16, 16)


def test_a_save_that_is_due_during_another_is_skipped(training: Any) -> None:
    """A save that is due while one is under way is skipped."""
    one = training(when_busy="skip")
    with one:
        assert one.one_step() + one.one_step() + one.one_step() == []
        assert one.schedule.busy
        assert one.one_step() == [("SaveSkipped", 4)]
        one.writer.answers = [written(2)]
        assert one.one_step() == [("Saved", 2)]
        assert one.one_step() == []
        assert one.schedule.last_step == 6
        # one that was asked for is not skipped: training waits for the one before
        one.writer.answers = [written(6)]
        assert one.one_step(frozenset({GroupRequest.SAVE})) == [("Saved", 6)]
        assert one.schedule.last_step == 7
        assert one.writer.heard == ["stage", 2, 6, 7]


def test_a_save_that_is_due_during_another_is_queued(training: Any) -> None:
    """A save that is due while one is under way is queued."""
    one = training(when_busy="queue")
    with one:
        assert one.one_step() + one.one_step() + one.one_step() == []
        one.writer.answers = [written(2)]
        assert one.one_step() == [("Saved", 2)]
        assert one.writer.heard == ["stage", 2, 4]
        one.writer.answers = [written(4)]
        assert told(one.schedule.settle()) == [("Saved", 4)]


def test_a_full_disk_ends_the_last_save_at_once(training: Any) -> None:
    """Beside training it may be emptied; nothing follows the last save, and tries of it would take minutes."""
    full = OSError(errno.ENOSPC, "No space left on device: runs/a needs 9 bytes")
    one = training(every_steps=1, max_failed=2)
    with one:
        one.one_step()
        one.writer.answers = [full]
        assert ("SaveFailed", 1) in one.one_step(), "training goes on"
        one.writer.answers = [full]
        said = r"^step 2 is not saved: rank 0: .*No space left.*needs 9 bytes; make room, then --resume: committed"
        one.step = 3
        with pytest.raises(DiskFull, match=said):
            told(one.schedule.finish(3))


def test_the_last_save_is_tried_until_it_is_safe(training: Any) -> None:
    one = training(every_steps=0, max_failed=2)
    with one:
        one.one_step()
        one.writer.answers = [OSError("full"), OSError("full"), written(1)]
        failed = ("SaveFailed", 1)
        assert told(one.schedule.finish(1)) == [failed, failed, ("Saved", 1)]
        assert one.writer.heard == ["stage", 1, 1, 1]


@pytest.mark.parametrize(
    ("why", "kind"), [(OSError("full"), StoreUnavailable), (PermissionError("not yours"), CheckpointError)]
)
def test_the_last_save_that_fails_too_often_is_an_error(
    training: Any, why: OSError, kind: type[CheckpointError]
) -> None:
    """The last save that fails too often is an error and says whether it may pass."""
    one = training(every_steps=0, max_failed=2)
    with one:
        one.one_step()
        one.writer.answers = [why] * 3
        with pytest.raises(CheckpointError, match=r"3 saves .*\(checkpoint\.max_failed = 2\)") as error:
            told(one.schedule.finish(1))
    assert type(error.value) is kind


def test_a_failure_is_counted_until_a_save_succeeds(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_schedule, "_AWAY_S", 0.0)
    one = training(max_failed=1)
    with one:
        one.one_step()
        one.one_step()
        one.writer.answers = [OSError("full")]
        assert one.one_step() == []  # the other ranks learn it in the next step
        assert one.one_step() == [("SaveFailed", 2)]
        assert one.schedule.last_step == 4
        one.writer.answers = [written(4)]
        assert one.one_step() == [("Saved", 4)]
        one.one_step()
        one.writer.answers = [OSError("full")]
        assert one.one_step() == []
        assert one.one_step() == [("SaveFailed", 6)]  # the first in a row
        one.writer.alive = False
        assert one.one_step() == []
        with pytest.raises(CheckpointError, match="2 saves"):
            one.one_step()


def test_a_store_away_for_minutes_ends_no_run(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away for less than half an hour ends no run."""
    one, now_s = training(max_failed=1), 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s)
    monkeypatch.setattr(checkpoint_schedule, "time", clock)
    with one:
        one.one_step()
        one.one_step()
        for number in range(1, 16):
            one.writer.answers = [OSError("connection refused")]
            assert one.one_step() == []
            assert one.one_step() == [("SaveFailed", 2 * number)]
            now_s += 120.0
        one.writer.answers = [OSError("connection refused")]
        one.one_step()
        with pytest.raises(CheckpointError, match="16 saves") as error:
            one.one_step()
    assert type(error.value) is CheckpointError, "it has been away for long enough"


def test_an_absent_store_ends_no_run_with_queued_saves(training: Any) -> None:
    """A store that is away ends no run whose saves are queued."""
    one = training(max_failed=1, every_steps=1, when_busy="queue")
    with one:
        one.one_step()
        for step in range(2, 8):  # the save fails while the next one waits for it
            one.writer.answers = [OSError("connection refused")]
            assert one.one_step() == [("SaveFailed", step - 1)]
        one.writer.answers = [OSError("connection refused")]
        with pytest.raises(CheckpointError, match="7 saves"):
            told(one.schedule.finish(one.step))


def test_a_save_that_is_waited_for_sends_heartbeats(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is waited for says that the group is alive and one of an hour does not."""
    one = training(every_steps=0)
    now_s = 1000.0

    def later(pause_s: float) -> None:
        nonlocal now_s
        now_s += 60.0
        if now_s >= 1000.0 + 2 * 3600.0:
            one.writer.answers = [written(1)]

    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s, sleep=later)
    monkeypatch.setattr(checkpoint_schedule, "time", clock)
    with one:
        one.one_step()
        assert told(one.schedule.finish(1)) == [("Saved", 1)]
    assert now_s == 1000.0 + 2 * 3600.0
    assert 60 <= one.beats <= 62
