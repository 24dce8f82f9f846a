"""What a journal on an object store puts again."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from journal_events import step

from springtide.events import Stopped
from springtide.storage import Folder
from springtide.tracking.journal import Journal, read_journal


def test_a_long_journal_puts_few_bytes_again_on_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its open segment is put whole at each event that is no step; here a mark at each hundredth line."""
    run, put = Folder(f"memory://journal-{uuid.uuid4().hex}"), dict[str, int]()
    write = Folder.write

    def counted(folder: Folder, name: str, data: Any, *rest: Any, **named: Any) -> Any:
        if name.endswith(".jsonl"):
            put[name] = put.get(name, 0) + len(data)
        return write(folder, name, data, *rest, **named)

    monkeypatch.setattr(Folder, "write", counted)
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES_PUT", 200)
    with Journal(run) as journal:
        for number in range(1, 2001):
            journal(step(number))
            if number % 100 == 0:
                journal(Stopped(step=number, status="finished"))
                assert journal.flush()
    held = {name: (run / "journal").size(name) for name in (run / "journal").names() if name.endswith(".jsonl")}
    assert len(held) == 11
    assert sum(put.values()) < 3 * sum(held.values())  # 10 times with one segment


def test_a_console_that_fails_ends_neither_the_thread_nor_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    run, write, is_away = Folder(f"memory://journal-{uuid.uuid4().hex}"), Folder.write, [True]

    def away_once(folder: Folder, name: str, data: Any, *rest: Any, **named: Any) -> Any:
        if name.endswith(".jsonl") and is_away and is_away.pop():
            raise OSError("503")
        return write(folder, name, data, *rest, **named)

    def say(text: str) -> None:
        raise ValueError("the console cannot show it")

    monkeypatch.setattr("springtide.tracking.journal._FIRST_PAUSE_S", 0.01)
    with Journal(run, say=say) as journal:
        monkeypatch.setattr(Folder, "write", away_once)
        journal(step(1))
        journal(Stopped(step=1, status="finished"))
        assert journal.flush(10.0)
    assert not is_away
    assert len(read_journal(run)) == 2
