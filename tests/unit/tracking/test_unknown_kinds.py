"""Events of kinds that this version does not know are skipped and counted by whatever reads a journal."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from journal_events import life, step

from springtide.cli.main import main
from springtide.config import Config
from springtide.events import EVENTS, Event, Saved, Spiked, Started, Stopped, event, record
from springtide.events.record import UnknownKind
from springtide.run.folder import Run
from springtide.run.run_status import overview
from springtide.storage import Folder
from springtide.tracking.journal import Journal, read_journal
from springtide.tracking.journal_reader import JournalReader
from springtide.tracking.prometheus import observed
from springtide.tracking.timeline import Timeline

FUTURE = {
    "format": 1,
    "kind": "teleported",
    "time_s": 5.0,
    "term": 1,
    "step": 2,
    "to": {"planet": "Mars"},
    "loss": math.nan,
}
SPIKE = Spiked(step=2, what="loss", value=9.0, usual=1.0, deviations=8.0, left_out=True)
KNOWN: list[Event] = [Started(step=0, world_size=2), step(1), step(2), Stopped(step=2, status="finished")]


@pytest.fixture
def run(tiny: Config) -> Run:
    """A finished run, with a spike."""
    run = Run(Folder(tiny.run.root) / "mine")
    run.write_config(tiny)
    with Journal(run.folder) as journal:
        for one in (*KNOWN[:3], SPIKE, *KNOWN[3:]):
            journal(one)
    return run


def put(run: Run, line: dict[str, Any], at: int) -> None:
    """Write an event among the others."""
    file = Path(run.folder.where("journal/0001-0000.jsonl"))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:at], json.dumps(line), *lines[at:]]) + "\n")


def test_a_kind_of_a_later_version_is_told_from_damage() -> None:
    with pytest.raises(UnknownKind) as caught:
        event(FUTURE)
    assert caught.value.kind == "teleported"
    for damage in (
        {"kind": ["step"]},
        {"kind": None},
        {"kind": "x" * 100},
        {"kind": "a b"},
        {"format": 2},
        {"kind": "step"},
    ):
        with pytest.raises(ValueError, match=r".") as other:
            event({**FUTURE, **damage})
        assert not isinstance(other.value, UnknownKind), damage


def test_kinds_of_a_later_version_are_skipped_by_every_reader(
    run: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = read_journal(run.folder), run.ledger
    for at in (0, 3, 4, 8):
        put(run, FUTURE, at)
    put(run, {**FUTURE, "kind": "sang"}, 2)
    with caplog.at_level(logging.WARNING):
        assert (read_journal(run.folder), run.ledger) == before
        assert run.timeline.unknown == {"teleported": 4, "sang": 1}
        assert (run.status, run.last_step, len(run.steps), run.starts) == ("finished", 2, 2, before[0][:1])
        assert list(run.metrics.index) == [1, 2]
        assert [row.state for row in overview(run.config.run.root)] == ["finished"]
        run.write_report()
        assert all(list(observed(one)) is not None for one in read_journal(run.folder))
        for command in (["inspect"], ["run", "status"], ["run", "compare", run.folder.url], ["report"]):
            assert main([*command, run.folder.url]) == 0
    assert caplog.messages == [], "nothing is damaged"
    assert (
        "  skipped: 5 events of kinds that this version does not know: sang (1), teleported (4)\n"
        in capsys.readouterr().out
    )
    assert main(["report", run.folder.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown_events"] == {"sang": 1, "teleported": 4}


def test_a_run_without_such_kinds_is_told_nothing_of_them(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.timeline.unknown == {}
    assert main(["report", run.folder.url]) == 0
    assert "skipped" not in capsys.readouterr().out
    assert main(["report", run.folder.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown_events"] == {}


def test_a_kind_that_was_retired_is_skipped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPIKE.kind in {one.kind for one in read_journal(run.folder)}
    monkeypatch.delitem(EVENTS, SPIKE.kind)
    assert [one.kind for one in read_journal(run.folder)] == [one.kind for one in KNOWN]
    assert run.timeline.unknown == {SPIKE.kind: 1}
    assert run.status == "finished"


def timeline_of(run: Folder) -> Timeline:
    reader = JournalReader(run)
    reader.read()
    return reader.timeline


@pytest.mark.parametrize("seed", range(4))
def test_they_are_counted_once_however_the_journal_is_read(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several looks, several segments, and where a line makes the reader judge each line by itself."""
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 50)
    events, run, reader = life(seed), Folder(tmp_path), JournalReader(Folder(tmp_path))
    saves = sum(isinstance(one, Saved) for one in events)
    with Journal(run) as journal:
        for number, one in enumerate(events):
            journal(one)
            if number % 17 == 0:
                reader.read()
    assert saves
    assert timeline_of(run).unknown == {}
    monkeypatch.delitem(EVENTS, Saved.kind)
    assert timeline_of(run).unknown == {Saved.kind: saves}
    assert len(read_journal(run)) == len(events) - saves
    reader = JournalReader(run)
    for name in run.names():
        (tmp_path / "later" / name).mkdir(parents=True)
    later = JournalReader(Folder(tmp_path / "later"))
    for name in (run / "journal").names():
        data = (run / "journal").read(name)
        for end in (len(data) // 3, len(data) // 2, len(data)):  # a line that is being written, too
            Folder(tmp_path / "later").write(f"journal/{name}", data[:end])
            later.read()
    assert later.timeline.unknown == {Saved.kind: saves}
    broken = json.dumps({**record(step(1)), "loss": "much"}).encode() + b"\n"
    Folder(tmp_path / "later").write("journal/0009-0000.jsonl", broken + (run / "journal").read("0001-0000.jsonl"))
    found = timeline_of(Folder(tmp_path / "later"))
    first = (run / "journal").read("0001-0000.jsonl").count(b'"kind": "saved"')
    assert found.unknown == {Saved.kind: saves + first}
