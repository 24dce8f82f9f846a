"""The journal keeps every event, whatever kills its writer."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_faults
import s3_server
from journal_events import step

from springtide.events import EVENTS, Evaluated, Event, Started, StepDone, Stopped, event, record
from springtide.storage import Folder, s3
from springtide.tracking.journal import Journal, frame, last_steps, read_journal
from springtide.tracking.journal_reader import JournalReader
from springtide.tracking.timeline import timeline_of


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run" if request.param == "local" else f"memory://journal-{uuid.uuid4().hex}")


def test_an_event_survives_its_record() -> None:
    for one in (Started(step=0, world_size=2), step(3), Stopped(step=4, status="finished")):
        assert event(record(one)) == one
    saves = {"saved", "save_failed", "save_skipped", "cadence", "snapshots", "rejected"}
    elastic = {"decided", "left", "failed", "ready", "commanded", "ordered", "deadline"}
    training = {
        "started",
        "step",
        "spiked",
        "rolled_back",
        "miscomputed",
        "monitored",
        "waited",
        "paused",
        "resumed",
        "straggling",
        "evaluated",
        "sampled",
        "profiled",
        "warned",
        "stopped",
    }
    assert set(EVENTS) == training | saves | elastic
    with pytest.raises(ValueError, match="'of another version'"):
        event({"kind": "of another version"})


def test_each_start_writes_segments_that_are_read_in_order(run: Folder) -> None:
    """Each start writes its own segments and all are read in order."""
    for term in (1, 2, 3):
        with Journal(run) as journal:
            assert journal.term == term
            journal(Started(step=term, world_size=1))
            journal(step(term))
    events = read_journal(run)
    assert [one.term for one in events] == [1, 1, 2, 2, 3, 3]
    assert [one.step for one in events if isinstance(one, StepDone)] == [1, 2, 3]


def test_what_a_driver_writes_after_another_took_over_is_taken_back(run: Folder) -> None:
    """A driver that is cut off goes on writing its own segments. Readers order by term, and the newer start takes them back."""
    reader = JournalReader(run)
    with Journal(run, term=1) as old, Journal(run, term=2) as new:
        for one in (Started(step=0, world_size=1), *map(step, range(1, 5))):
            old(one)
        new(Started(step=4, world_size=1))
        new(step(5, 2.0))
        reader.read()
        for late in range(5, 9):
            old(step(late, 1.0))
    reader.read()
    for steps in (reader.timeline.steps, timeline_of(read_journal(run)).steps):
        assert steps["step"].tolist() == [1, 2, 3, 4, 5]
        assert steps["loss"][-1] == 2.0
    assert len(reader.timeline.tries["step"]) == 9, "and the older driver's work is on record"


def test_a_start_that_wrote_nothing_leaves_nothing(run: Folder) -> None:
    with Journal(run), Journal(run, enabled=False) as silent:
        silent(step(1))
    assert read_journal(run) == []


def test_long_journals_are_cut_into_segments(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 10)
    with Journal(run) as journal:
        for number in range(1, 26):
            journal(step(number))
    assert (run / "journal").names() == ["0001-0000.jsonl", "0001-0001.jsonl", "0001-0002.jsonl"]
    assert [one.step for one in last_steps(read_journal(run))] == list(range(1, 26))


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    """A line torn by a kill is left out and the next start goes on."""
    run = Folder(tmp_path)
    with Journal(run) as journal:
        journal(step(1))
    segment = tmp_path / "journal" / "0001-0000.jsonl"
    segment.write_text(segment.read_text() + '{"kind": "step", "st')
    with Journal(run) as journal:
        journal(step(2))
    assert [one.step for one in last_steps(read_journal(run))] == [1, 2]


@pytest.mark.processes
def test_a_killed_writer_loses_no_event_that_it_wrote(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from springtide.storage import Folder; from springtide.tracking.journal import Journal\n"
        "from springtide.events import Evaluated\n"
        "journal = Journal(Folder(sys.argv[1]))\n"
        "for n in range(100): journal(Evaluated(step=n, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [one.step for one in read_journal(Folder(tmp_path)) if isinstance(one, Evaluated)] == list(range(100))


def steps_in(run: Folder) -> list[int]:
    return [one.step for one in read_journal(run) if isinstance(one, StepDone)]


def until(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # between looks at what a thread does


def test_two_journals_of_one_folder_never_write_over_each_other(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("springtide.tracking.segments.listed", lambda _: [])  # each listed before another wrote
        first, second = Journal(run), Journal(run)
        assert (first.term, second.term) == (1, 2)
        same, also = Journal(run, term=7), Journal(run, term=7)
    for number, journal in enumerate((first, second, same, also)):
        for one in range(10):
            journal(step(10 * number + one))
    for journal in (also, same, second, first):
        journal.close()
    assert steps_in(run) == list(range(40))
    assert [one.term for one in read_journal(run)] == [1] * 10 + [2] * 10 + [7] * 20
    names = ["0001-0000.jsonl", "0002-0000.jsonl", "0007-0000.jsonl", "0007-0001.jsonl"]
    assert (run / "journal").names() == names


def test_starts_beyond_the_ten_thousandth_are_read_in_order(run: Folder) -> None:
    for term in (9999, 10_000, 0):
        with Journal(run, term=term) as journal:
            journal(step(term or 1))
    assert [(one.term, one.step) for one in read_journal(run)] == [(9999, 9999), (10_000, 10_000), (10_001, 1)]  # type: ignore[attr-defined]


def test_a_folder_that_refuses_writes_for_a_while_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that cannot be written for a while holds up nothing and loses nothing."""
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 10)
    monkeypatch.setattr("springtide.tracking.segments._MEMORY_BYTES", 5_000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, told = Folder(tmp_path / "run"), list[str]()
    journal = Journal(run, say=told.append)
    journal(step(1))
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("a file where the folder was")
    for number in range(2, 101):
        journal(step(number))
    assert "training continues" in told[0]
    assert list(tmp_path.glob("springtide-journal-*/*.waiting")), (
        "nothing waits on the disk, beyond the bound of memory"
    )
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    until(lambda: len(told) > 1, "nobody was told that the journal is whole")
    assert steps_in(run) == list(range(1, 101))
    journal(step(101))
    assert steps_in(run) == list(range(1, 102)), "what is healthy again is written at once"
    journal.close()
    assert [text.partition("journal ")[2][:6] for text in told] == ["cannot", "in " + str(tmp_path)[:3]]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_what_the_store_never_takes_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store never takes is left where a person finds it."""
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 10)
    monkeypatch.setattr("springtide.tracking.journal._CLOSE_S", 0.3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, told = Folder(tmp_path / "run"), list[str]()
    journal = Journal(run, say=told.append)
    for number in range(5):
        journal(step(number))
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("")
    for number in range(5, 35):
        journal(step(number))
    journal.close()
    [left] = tmp_path.glob("springtide-journal-*")
    assert str(left) in told[-1]
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    for file in left.iterdir():
        file.replace(tmp_path / "run" / "journal" / file.name)
    assert steps_in(run) == list(range(35))


@pytest.mark.processes
def test_a_full_disk_loses_no_event(
    tmp_path: Path, small_disk: Callable[[Path, list[str]], subprocess.CompletedProcess[str]]
) -> None:
    """A full disk ends nothing and every event is there once there is room. One that stays full does not hold up the end."""
    script = """
    import sys, time
    from pathlib import Path
    from springtide.storage import Folder
    from springtide.events import Evaluated
    from springtide.tracking.journal import Journal, read_journal

    disk, told = Path(sys.argv[1]), []
    filler = disk / "filler"

    def fill():
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    with Journal(Folder(disk / "run"), say=told.append) as journal:
        def post(numbers):
            for n in numbers:
                journal(Evaluated(step=n, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1))
        post(range(10))
        fill()
        post(range(10, 300))
        print(told)
        assert len(told) == 1 and "No space left" in told[0]
        assert len(read_journal(Folder(disk / "run"))) < 300
        filler.unlink()
    assert len(told) == 2 and "whole again" in told[1], told
    assert [one.step for one in read_journal(Folder(disk / "run"))] == list(range(300))
    journal = Journal(Folder(disk / "run"), say=told.append)
    fill()
    for n in range(300, 600):
        journal(Evaluated(step=n, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1))
    before_s = time.monotonic()
    journal.close()
    assert time.monotonic() - before_s < 15, "half of what other stores get"
    assert "No space left" in told[-1] and "events are in" in told[-1], told
    """
    done = small_disk(tmp_path / "disk", [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "disk")])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unreliable(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Folder, s3_faults.Faults]]:
    """A run in a real S3 server behind a proxy that misbehaves when told to, and a client that soon gives up."""
    monkeypatch.setattr("springtide.storage.s3._RETRY_FOR", datetime.timedelta(seconds=0.2))
    monkeypatch.setattr("springtide.storage.s3._RETRIES", 1)
    monkeypatch.setattr("springtide.storage.s3._CREATE_TRIES", 1)
    with s3_faults.proxy(os.environ["AWS_ENDPOINT_URL"]) as (url, faults), s3_server.pointing_to(url):
        yield Folder(f"{s3}/journal-{uuid.uuid4().hex[:8]}"), faults


def test_an_absent_object_store_gets_all_events_later(
    unreliable: tuple[Folder, s3_faults.Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store that is away holds up nobody and gets all when it is back."""
    run, faults = unreliable
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 20)
    callers: list[int] = []
    for name in ("put", "create", "read"):
        real = getattr(s3, name)

        def counted(*arguments: object, real: Callable[..., object] = real) -> object:
            callers.append(threading.get_ident())
            return real(*arguments)

        monkeypatch.setattr(s3, name, counted)
    told: list[str] = []
    journal = Journal(run, term=3, say=told.append)
    journal(Started(step=0, world_size=1))
    assert journal.flush()
    assert len(read_journal(run)) == 1
    callers.clear()
    faults.set("slowdown")
    for number in range(1, 101):
        journal(step(number))
    journal(Evaluated(step=100, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1))
    until(lambda: bool(told), "nobody was told of the trouble")
    assert not journal.flush(0.0)
    faults.set("")
    journal(Stopped(step=100, status="finished"))
    journal.close()
    assert callers
    assert threading.get_ident() not in callers, "somebody who posts an event waited for the store"
    assert steps_in(run) == list(range(1, 101))
    assert isinstance(read_journal(run)[-1], Stopped)
    assert len(told) == 2
    assert "whole again" in told[1]


def test_a_put_whose_answer_was_lost_is_no_other_journal(unreliable: tuple[Folder, s3_faults.Faults]) -> None:
    run, _ = unreliable
    with Journal(run, term=1) as journal:
        (run / "journal").write("0001-0001.jsonl", "somebody else's\n")
        segment = journal._open
        journal(step(1))
        journal.flush()
        segment.is_created = False  # as when the answer to its creation had been lost
        journal._segments._number = 0
        journal(step(2))
    assert (run / "journal").names() == ["0001-0000.jsonl", "0001-0001.jsonl"]
    assert steps_in(run) == [1, 2]


def test_damaged_lines_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Folder(tmp_path)
    with Journal(run) as journal:
        for number in range(8):
            journal(step(number))
    file = tmp_path / "journal" / "0001-0000.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[1], lines[2], lines[3] = bytes(300), b"", lines[3][:40]
    lines[4], lines[5] = lines[4].replace(b'"loss"', b'"lors"'), lines[5].replace(b'"step"', b'"st p"', 1)
    lines[6] = b"\xff\xfe" + b"[" * 50_000
    file.write_bytes(b"\n".join(lines))
    assert steps_in(run) == [0, 7]
    named = [record.getMessage() for record in caplog.records]
    assert [f"{file}: line {number} is skipped" in text for number, text in zip(range(2, 8), named, strict=True)] == [
        True
    ] * 6
    read_journal(run)
    assert len(caplog.records) == 6, "each is named once"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one | {"step": "many"}, "valid integer"),
        (lambda one: one | {"loss": "much"}, "valid number"),
        (lambda one: one | {"time_s": float("inf")}, "finite number"),
        (lambda one: one | {"digest": ["00"]}, "valid string"),
        (lambda one: one | {"lors": 1.0}, "lors"),
        (lambda one: one | {"format": 2}, "is in format 2, this version of springtide reads 1"),
        (lambda one: one | {"kind": ["step"]}, "no kind of event"),
        (lambda one: [one], "not an object"),
    ],
)
def test_a_line_whose_values_no_event_has_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any], problem: str
) -> None:
    run = Folder(tmp_path)
    with Journal(run) as journal:
        for number in range(3):
            journal(step(number))
    file = tmp_path / "journal" / "0001-0000.jsonl"
    lines = file.read_text().splitlines()
    assert json.loads(lines[1])["format"] == 1
    lines[1] = json.dumps(change(json.loads(lines[1])))
    file.write_text("\n".join(lines) + "\n")
    assert steps_in(run) == [0, 2]
    [told] = [record.getMessage() for record in caplog.records]
    assert f"{file}: line 2 is skipped" in told
    assert problem in told


def test_a_segment_of_another_version_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A segment of another version is named and not line by line."""
    run = Folder(tmp_path)
    for _ in range(2):
        with Journal(run) as journal:
            for number in range(100):
                journal(step(number))
    file = tmp_path / "journal" / "0001-0000.jsonl"
    file.write_text(file.read_text().replace('"format": 1', '"format": 7'))
    assert steps_in(run) == list(range(100))
    assert len(caplog.records) == 21
    assert "80 more lines" in caplog.records[-1].getMessage()


def test_a_text_that_is_not_unicode_is_written_and_read(run: Folder) -> None:
    with Journal(run) as journal:
        journal(Stopped(step=1, status="failed", reason="no file \udcff.bin, é"))
    [one] = read_journal(run)
    assert isinstance(one, Stopped)
    assert one.reason == "no file ?.bin, é"


@pytest.mark.parametrize("what", ["folder", "zeros", "sparse"])
def test_what_is_no_segment_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    run = Folder(tmp_path)
    with Journal(run) as journal:
        journal(step(1))
    odd = tmp_path / "journal" / "0001-0001.jsonl"
    if what == "folder":
        odd.mkdir()
    elif what == "zeros":
        odd.symlink_to("/dev/zero")
    else:
        with odd.open("wb") as file:
            file.truncate(2**36)
    assert steps_in(run) == [1]
    [told] = [record.getMessage() for record in caplog.records]
    assert f"{odd}: it is skipped" in told


def test_of_a_step_trained_twice_the_last_counts() -> None:
    events: list[Event] = [step(1, 9.0), step(2, 8.0), step(2, 7.0), step(3, 6.0)]
    assert [(one.step, one.loss) for one in last_steps(events)] == [(1, 9.0), (2, 7.0), (3, 6.0)]
    assert frame(events)["loss"].to_dict() == {1: 9.0, 2: 7.0, 3: 6.0}
    assert frame([dataclasses.replace(step(1), extra={"objective/kl": 0.5})])["objective/kl"].to_dict() == {1: 0.5}
    assert frame([]).empty
    given_up = [Started(step=0, world_size=1), *events, Started(step=1, world_size=1)]
    assert [one.step for one in last_steps(given_up)] == [1], "step 3 is of a model that the run has no more"
    assert [(one.step, one.loss) for one in last_steps([*given_up, step(2, 5.0)])] == [(1, 9.0), (2, 5.0)]
    by_source = frame([step(1, 2.0, ("web", "wiki"))]).loc[1]
    assert by_source["loss/wiki"] == 3.0
    assert by_source["step_tokens/web"] == 5
    assert by_source["epochs/web"] == 0.25
