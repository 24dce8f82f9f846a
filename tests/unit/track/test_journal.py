"""The journal keeps every event, whatever kills its writer."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from springtide.store import Folder
from springtide.track.events import EVENTS, Evaluated, Event, Started, StepDone, Stopped, event, record
from springtide.track.journal import Journal, frame, last_steps, read_journal


def step(number: int, loss: float = 1.0) -> StepDone:
    return StepDone(
        step=number,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=number * 10,
        step_tokens=10,
        step_time_s=0.5,
        data_wait_s=0.1,
        tokens_per_s=20.0,
        mfu=0.5,
        memory_bytes=1,
        world_size=2,
        digest="00",
    )


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run" if request.param == "local" else f"memory://journal-{uuid.uuid4().hex}")


def test_an_event_survives_its_record() -> None:
    for one in (Started(step=0, world_size=2), step(3), Stopped(step=4, status="finished")):
        assert event(record(one)) == one
    saves = {"saved", "save_failed", "save_skipped", "cadence", "snapshots", "rejected"}
    elastic = {"decided", "left", "failed", "ready"}
    training = {
        "started",
        "step",
        "spiked",
        "rolled_back",
        "waited",
        "straggling",
        "evaluated",
        "sampled",
        "profiled",
        "stopped",
    }
    assert set(EVENTS) == training | saves | elastic
    with pytest.raises(KeyError):
        event({"kind": "of another version"})


def test_each_start_writes_its_own_segments_and_all_are_read_in_order(run: Folder) -> None:
    for attempt in (1, 2, 3):
        with Journal(run) as journal:
            assert journal.attempt == attempt
            journal(Started(step=attempt, world_size=1))
            journal(step(attempt))
    events = read_journal(run)
    assert [one.attempt for one in events] == [1, 1, 2, 2, 3, 3]
    assert [one.step for one in events if isinstance(one, StepDone)] == [1, 2, 3]


def test_a_start_that_wrote_nothing_leaves_nothing(run: Folder) -> None:
    with Journal(run), Journal(run, enabled=False) as silent:
        silent(step(1))
    assert read_journal(run) == []


def test_long_journals_are_cut_into_segments(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.track.journal._SEGMENT_LINES", 10)
    with Journal(run) as journal:
        for number in range(1, 26):
            journal(step(number))
    assert (run / "journal").names() == ["0001-0000.jsonl", "0001-0001.jsonl", "0001-0002.jsonl"]
    assert [one.step for one in last_steps(read_journal(run))] == list(range(1, 26))


def test_a_line_torn_by_a_kill_is_left_out_and_the_next_start_goes_on(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    with Journal(run) as journal:
        journal(step(1))
    segment = tmp_path / "journal" / "0001-0000.jsonl"
    segment.write_text(segment.read_text() + '{"kind": "step", "st')
    with Journal(run) as journal:
        journal(step(2))
    assert [one.step for one in last_steps(read_journal(run))] == [1, 2]


def test_a_killed_writer_loses_no_event_that_it_wrote(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from springtide.store import Folder; from springtide.track.journal import Journal\n"
        "from springtide.track.events import Evaluated\n"
        "journal = Journal(Folder(sys.argv[1]))\n"
        "for n in range(100): journal(Evaluated(step=n, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [one.step for one in read_journal(Folder(tmp_path)) if isinstance(one, Evaluated)] == list(range(100))


def test_of_a_step_trained_twice_the_last_counts() -> None:
    events: list[Event] = [step(1, 9.0), step(2, 8.0), step(2, 7.0), step(3, 6.0)]
    assert [(one.step, one.loss) for one in last_steps(events)] == [(1, 9.0), (2, 7.0), (3, 6.0)]
    assert frame(events)["loss"].to_dict() == {1: 9.0, 2: 7.0, 3: 6.0}
    assert frame([]).empty
