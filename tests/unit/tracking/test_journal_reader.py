"""A journal that grows is read once, byte by byte, wherever it lies, and each look tells what is new."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from journal_events import step

from springtide.events import Saved
from springtide.storage import Folder
from springtide.tracking.journal import Journal, read_journal, read_segment
from springtide.tracking.journal_reader import JournalReader
from springtide.tracking.timeline import timeline_of


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run" if request.param == "local" else f"memory://follow-{uuid.uuid4().hex}")


def look(reader: JournalReader) -> list[int]:
    """The steps that a look finds new."""
    is_new = reader.read()
    found = [int(number) for number in reader.new.tries["step"]]
    assert is_new == bool(found or reader.new.events)
    return found


def test_each_look_tells_what_is_new_over_segments_and_terms(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 10)
    reader = JournalReader(run)
    assert look(reader) == []
    found = []
    for term, until in enumerate((7, 25, 26), 1):
        with Journal(run) as journal:
            for number in range(1, until + 1):
                journal(step(100 * term + number))
                if number % 6 == 0:
                    journal.flush()
                    found += look(reader)
    assert len(found) == 6 + 24 + 24 + 1 + 1  # the last steps of a term come with the next look
    found += look(reader)
    assert found == [int(one) for one in timeline_of(read_journal(run)).tries["step"]]
    assert look(reader) == []


def test_only_new_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ranges = Folder(tmp_path), []
    read_range = Folder.read_range

    def counted(self: Folder, name: str, begin: int, end: int) -> bytes | memoryview:
        ranges.append((begin, end))
        return read_range(self, name, begin, end)

    reader = JournalReader(run)
    with Journal(run) as journal:
        journal(step(1))
        assert look(reader) == [1]
        size = Path(tmp_path / "journal" / "0001-0000.jsonl").stat().st_size
        monkeypatch.setattr(Folder, "read_range", counted)
        for number in range(2, 5):
            journal(step(number))
            assert look(reader) == [number]
            assert look(reader) == []
    assert [begin for begin, _ in ranges] == [size, *(end for _, end in ranges[:-1])]
    assert len(ranges) == 3


def test_torn_lines_and_unknown_kinds_leave_the_rest(tmp_path: Path) -> None:
    """Bytes that arrive in any portions are read as whole lines; a kind of a later version is skipped."""
    with Journal(Folder(tmp_path)) as journal:
        for number in range(1, 9):
            journal(step(number))
    segment = tmp_path / "journal" / "0001-0000.jsonl"
    lines = segment.read_bytes().splitlines(True)
    lines.insert(3, b'{"format": 1, "kind": "later", "of": {"kind": "step"}}\n')
    lines.insert(6, b'{"format": 1, "kind": "unheard_of"}\n')
    data, reader, found = b"".join(lines), JournalReader(Folder(tmp_path)), list[int]()
    segment.write_bytes(b"")
    for begin in range(0, len(data), 301):
        with segment.open("ab") as file:
            file.write(data[begin : begin + 301])
        reader.read()
        found += [int(number) for number in reader.new.tries["step"]]
    assert found == list(range(1, 9))
    assert reader.timeline.steps["step"].tolist() == found
    segment.write_bytes(data[:-1])
    assert look(JournalReader(Folder(tmp_path))) == found[:-1], "a line that a kill cut short is not read"


def test_events_between_new_steps_keep_their_place(tmp_path: Path) -> None:
    reader = JournalReader(Folder(tmp_path))
    with Journal(Folder(tmp_path)) as journal:
        journal(step(1))
        assert look(reader) == [1]
        for event in (step(2), Saved(step=2, name="step-0000000002", size_bytes=1, save_time_s=1.0), step(3)):
            journal(event)
    assert look(reader) == [2, 3]
    assert [(at, event.kind) for at, event in reader.new.placed] == [(1, "saved")]
    assert [(at, event.kind) for at, event in reader.timeline.placed] == [(2, "saved")]


def test_what_a_read_brought_that_failed_half_way_is_new_at_the_next(
    run: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 20)
    with Journal(run) as journal:
        for number in range(1, 101):
            journal(step(number))
    reader, fails = JournalReader(run), ["0001-0003.jsonl"]

    def away_once(folder: Folder, name: str) -> bytes:
        if name in fails:
            fails.remove(name)
            raise OSError("the store is away")
        return read_segment(folder, name)

    monkeypatch.setattr("springtide.tracking.journal_reader.read_segment", away_once)
    with pytest.raises(OSError, match="away"):
        reader.read()
    assert look(reader) == list(range(1, 101))
    assert look(reader) == []


def test_a_segment_that_goes_on_is_read_on_at_an_object_store(s3: str) -> None:
    run = Folder(f"{s3}/follow-{uuid.uuid4().hex}")
    reader = JournalReader(run)
    with Journal(run) as journal:
        for number in range(1, 4):
            journal(step(number))
            assert journal.flush()
            assert look(reader) == [number]
