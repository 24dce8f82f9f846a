"""A journal that is followed is read once, byte by byte, wherever it lies."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_events import step

from springtide.events import Event, StepDone
from springtide.store import Folder
from springtide.track.follow import JournalFollower
from springtide.track.journal import Journal, read_journal


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run" if request.param == "local" else f"memory://follow-{uuid.uuid4().hex}")


def numbers(events: Iterator[Event]) -> list[int]:
    return [one.step for one in events if isinstance(one, StepDone)]


def test_each_look_yields_what_is_new_over_segments_and_terms(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.track.journal._SEGMENT_LINES", 10)
    follower = JournalFollower(run)
    assert numbers(follower.events()) == []
    found = []
    for term, until in enumerate((7, 25, 26), 1):
        with Journal(run) as journal:
            for number in range(1, until + 1):
                journal(step(100 * term + number))
                if number % 6 == 0:
                    journal.flush()
                    found += numbers(follower.events())
    assert len(found) == 6 + 24 + 24 + 1 + 1  # the last steps of a term come with the next look
    found += numbers(follower.events())
    assert found == numbers(iter(read_journal(run)))
    assert numbers(follower.events()) == []


def test_only_new_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ranges = Folder(tmp_path), []
    read_range = Folder.read_range

    def counted(self: Folder, name: str, begin: int, end: int) -> bytes | memoryview:
        ranges.append((begin, end))
        return read_range(self, name, begin, end)

    monkeypatch.setattr(Folder, "read_range", counted)
    follower = JournalFollower(run)
    with Journal(run) as journal:
        for number in range(1, 4):
            journal(step(number))
            assert numbers(follower.events()) == [number]
            assert numbers(follower.events()) == []
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert len(ranges) == 3


def test_a_line_that_is_not_complete_waits_and_damage_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(Folder(tmp_path)) as journal:
        journal(step(1))
    segment = tmp_path / "journal" / "0001-0000.jsonl"
    line = segment.read_bytes()
    follower = JournalFollower(Folder(tmp_path))
    assert numbers(follower.events()) == [1]
    with segment.open("ab") as file:
        file.write(line[:40])
        file.flush()
        assert numbers(follower.events()) == []
        file.write(line[40:] + b"no event\n" + b"[" * 100_000 + b"\n" + line)
    assert numbers(follower.events()) == [1, 1]
    assert follower.num_skipped == 2
    assert caplog.text.count("a line is skipped") == 1
    monkeypatch.setattr("springtide.track.follow._READ_BYTES", 1000)
    monkeypatch.setattr("springtide.track.follow._LONGEST_LINE", 999)
    with segment.open("ab") as file:
        file.write(b"x" * 5000)
    assert numbers(follower.events()) == []
    assert follower.num_skipped == 3
    assert len(numbers(JournalFollower(Folder(tmp_path)).events())) == 2  # in parts that end within a line


def test_a_segment_that_goes_on_is_read_on_at_an_object_store(s3: str) -> None:
    run = Folder(f"{s3}/follow-{uuid.uuid4().hex}")
    follower = JournalFollower(run)
    with Journal(run) as journal:
        for number in range(1, 4):
            journal(step(number))
            assert journal.flush()
            assert numbers(follower.events()) == [number]
