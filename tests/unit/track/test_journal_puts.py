"""What a journal on an object store puts again."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from journal_events import step

from springtide.events import Stopped
from springtide.store import Folder
from springtide.track.journal import Journal


def test_a_long_journal_puts_few_bytes_again_on_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its open segment is put whole at each event that is no step; here a mark at each hundredth line."""
    run, put = Folder(f"memory://journal-{uuid.uuid4().hex}"), dict[str, int]()
    write = Folder.write

    def counted(folder: Folder, name: str, data: Any, *rest: Any, **named: Any) -> Any:
        if name.endswith(".jsonl"):
            put[name] = put.get(name, 0) + len(data)
        return write(folder, name, data, *rest, **named)

    monkeypatch.setattr(Folder, "write", counted)
    monkeypatch.setattr("springtide.track.journal._SEGMENT_LINES_PUT", 200)
    with Journal(run) as journal:
        for number in range(1, 2001):
            journal(step(number))
            if number % 100 == 0:
                journal(Stopped(step=number, status="finished"))
                assert journal.flush()
    held = {name: (run / "journal").size(name) for name in (run / "journal").names() if name.endswith(".jsonl")}
    assert len(held) == 11
    assert sum(put.values()) < 3 * sum(held.values())  # 10 times with one segment
