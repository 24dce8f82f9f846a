"""A segment's file of columns says what the segment says, and nothing else is believed."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal_events import assert_same, life

from springtide.store import Folder
from springtide.track import column_file, journal_reader
from springtide.track.column_file import columns_in, decode, encode
from springtide.track.journal import Journal, read_journal
from springtide.track.journal_reader import JournalReader
from springtide.track.timeline import COLUMNS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A run whose journal has five segments or more, each with its columns but for those that are short."""
    monkeypatch.setattr("springtide.track.journal._SEGMENT_LINES", 50)
    monkeypatch.setattr("springtide.track.journal._COLUMNS_LINES", 20)
    with Journal(Folder(tmp_path)) as journal:
        for event in life(2):
            journal(event)
            journal._await_columns()  # as if events came slowly: one file is written at a time
    return Folder(tmp_path)


def files(run: Folder) -> list[Path]:
    return sorted(Path(run.url).glob("journal/*.columns"))


def test_columns_say_what_the_segments_say(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(journal_reader, "read_segment", lambda folder, name: read.append(name) or folder.read(name))
    reader = JournalReader(run)
    assert reader.read()
    assert len(files(run)) >= 4
    assert not {file.with_suffix(".jsonl").name for file in files(run)} & set(read)
    assert_same(reader.timeline, read_journal(run))
    assert not reader.read()


def test_a_segment_of_another_size_is_read_itself(run: Folder) -> None:
    segment = files(run)[-1].with_suffix(".jsonl")
    line = next(line for line in segment.read_bytes().splitlines(True) if b'"kind": "step"' in line)
    with segment.open("ab") as file:
        file.write(line)
    reader = JournalReader(run)
    assert reader.read()
    assert_same(reader.timeline, read_journal(run))


def changed(data: bytes, **fields: Any) -> bytes:
    """A file with other fields in its head, and the checksum of that."""
    magic, head, rest = data.split(b"\n", 2)
    body = b"\n".join([magic, json.dumps({**json.loads(head), **fields}).encode(), rest[:-4]])
    return body + struct.pack("<I", zlib.crc32(body))


LIES: list[dict[str, Any]] = [
    {"steps": -1},
    {"steps": 10**12},
    {"steps": 1.5},
    {"steps": True},
    {"lines": 1},
    {"segment_bytes": -1},
    {"segment_bytes": None},
    {"columns": ["step"]},
    {"columns": None},
    {"extra": ["a", "a"]},
    {"extra": [1]},
    {"extra": [["a"]]},
    {"extra": None},
    {"extra": 1},
    {"others": [[0, 1]]},
    {"others": [[10**9, 1, "{}"]]},
    {"others": [[0, 0, "{}"]]},
    {"others": [["a", 1, "{}"]]},
    {"others": [[0, 1, 2]]},
    {"others": None},
    {"others": [[0, 1, "\ud800"]]},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_file_that_lies_is_not_believed(run: Folder, lie: dict[str, Any]) -> None:
    data = files(run)[0].read_bytes()
    assert decode(data) is not None
    assert decode(changed(data)) is not None
    assert decode(changed(data, **lie)) is None
    files(run)[0].write_bytes(changed(data, **lie))
    reader = JournalReader(run)
    reader.read()
    assert_same(reader.timeline, read_journal(run))


@pytest.mark.parametrize(("column", "value"), [("time_s", -1.0), ("time_s", np.nan), ("step", 1.5), ("tokens", np.inf)])
def test_numbers_that_no_step_has_are_not_believed(run: Folder, column: str, value: float) -> None:
    found = decode(files(run)[0].read_bytes())
    assert found is not None
    columns = {name: found.steps[name].copy() for name in COLUMNS}
    assert decode(encode(found)) is not None
    columns[column][3] = value
    other = found._replace(steps=column_file.StepColumns(columns, found.steps.extra))
    assert decode(encode(other)) is None


def test_changed_bytes_are_found(run: Folder) -> None:
    data, chance = files(run)[0].read_bytes(), random.Random(0)
    for at in (0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(200))):
        assert decode(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]) is None
        assert decode(data[:at]) is None


def test_a_segment_with_an_odd_step_has_no_columns(run: Folder) -> None:
    segment = files(run)[0].with_suffix(".jsonl").read_bytes()
    assert columns_in(segment) is not None
    lines = segment.splitlines(True)
    at = next(at for at, line in enumerate(lines) if b'"kind": "step"' in line)
    lines[at] = lines[at].replace(b'"kind": "step"', b'"kind": "step", "kind": "step"')
    assert columns_in(b"".join(lines)) is None


def test_a_store_that_takes_no_columns_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.track.journal._SEGMENT_LINES", 50)
    monkeypatch.setattr("springtide.track.journal._COLUMNS_LINES", 20)
    tried, write = list[str](), Folder.write

    def refuse(folder: Folder, name: str, *given: Any, **more: Any) -> None:
        if name.endswith(".columns"):
            tried.append(name)
            raise PermissionError("denied")
        write(folder, name, *given, **more)

    monkeypatch.setattr(Folder, "write", refuse)
    events = life(3)
    with Journal(Folder(tmp_path)) as journal:
        for event in events:
            journal(event)
    assert tried
    assert not files(Folder(tmp_path))
    assert len(read_journal(Folder(tmp_path))) == len(events)
