"""A journal in columns says what its events say, and is read in parts while it grows."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
from pathlib import Path

import pytest
from journal_events import assert_same, life, step

from springtide.events import Event, Started, StepDone
from springtide.run.report.run_charts import curves
from springtide.storage import Folder
from springtide.tracking.journal import Journal, _line, parse_lines, read_journal
from springtide.tracking.journal_reader import JournalReader, _parsed
from springtide.tracking.ledger import Prices, ledger
from springtide.tracking.timeline import Timeline, parse_steps, timeline_of


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_of_few_events_is_that_of_all(seed: int) -> None:
    events = life(seed)
    timeline = timeline_of(events)
    few = timeline.condensed()
    assert len(few) < len(events)
    prices = Prices(1.0, 3.0)
    found, expected = ledger(few, prices), ledger(events, prices)
    assert found.restarts == expected.restarts
    assert (found.tokens, found.stragglers) == (expected.tokens, expected.stragglers)
    for name in ("spent", "dollars"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-9)
    # what was used between steps is shared by time among the kinds of a longer span
    for name in ("total_kwh", "energy_counted"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    assert found.energy_kwh["recomputed"] == pytest.approx(expected.energy_kwh["recomputed"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_the_events(tmp_path: Path, seed: int) -> None:
    with Journal(Folder(tmp_path)) as journal:
        for event in life(seed):
            journal(event)
    reader = JournalReader(Folder(tmp_path))
    assert reader.read()
    assert_same(reader.timeline, read_journal(Folder(tmp_path)))


def test_steps_that_a_later_start_went_back_on_are_not_the_run_s() -> None:
    """A run from scratch, a rollback, and a start that has not trained yet."""
    first = [Started(step=0, world_size=1), *(step(number, 9.0) for number in range(1, 101))]
    anew = [Started(step=0, world_size=1), *(step(number, 2.0) for number in range(1, 51))]
    back = [Started(step=90, world_size=1), *(step(number, 2.0) for number in range(91, 94))]
    for later, last, loss in ((anew, 50, 2.0), (back, 93, 2.0), (back[:1], 90, 9.0), ([*anew, *back], 93, 2.0)):
        timeline = timeline_of([*first, *later])
        assert_same(timeline, [*first, *later])
        assert (timeline.steps["step"][-1], timeline.steps["loss"][-1]) == (last, loss)
    assert timeline.last_try == 100
    counted = [dataclasses.replace(one, energy_j=5.0) for one in first[1:] if isinstance(one, StepDone)]
    assert len(timeline_of([*first[:1], *counted, *anew[:1]]).steps) == 0
    curves(timeline_of([*first[:1], *counted, *anew[:1]]))


def test_a_journal_that_grows_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, events = Folder(tmp_path), life(1)
    monkeypatch.setattr("springtide.tracking.journal._SEGMENT_LINES", 25)
    reader, counted = JournalReader(run), list[int]()
    take = reader._new_bytes
    monkeypatch.setattr(reader, "_new_bytes", lambda *given: counted.append(len(data := take(*given))) or data)
    assert not reader.read()
    with Journal(run) as journal:
        for event in events:
            journal(event)
            assert reader.read()
            new = [*reader.new.tries["step"], *(one.step for one in reader.new.events)]  # type: ignore[attr-defined]
            assert new == [event.step]  # type: ignore[attr-defined]
            assert not reader.read()
    assert_same(reader.timeline, read_journal(run))
    size = sum(path.stat().st_size for path in (tmp_path / "journal").iterdir())
    assert sum(counted) == size, "no byte is read twice"


def test_an_older_lease_that_hands_in_late_stands_before_the_newer(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    reader = JournalReader(run)
    with Journal(run) as older, Journal(run) as newer:
        older(step(1, 1.0))
        newer(step(2, 2.0))
        reader.read()
        older(step(2, 3.0))
        reader.read()
    assert reader.timeline.steps["loss"].tolist() == [1.0, 2.0]


BROKEN = [
    "WITHOUT mfu",
    "WITHOUT step",
    '{"kind": "step", nonsense',
    '{"kind": "step", "step": 1}',
    "WITH extra 5",
    'WITH loss "a"',
    "WITH step null",
    "WITH time_s -1",
    "WITH format 2",
    "WITH unknown 1",
    'WITH extra {"a": "b"}',
    'WITH extra {"a": {"kind": "step"}}',
    'WITH kind "saved"',
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_damaged_line_is_skipped_as_ever(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(Folder(tmp_path)) as journal:
        journal(step(1, sources=("wiki",)))
        journal(step(2, sources=("wiki",)))
    segment = tmp_path / "journal" / "0001-0000.jsonl"
    lines = segment.read_text().splitlines()
    if broken.startswith("WITH "):
        _, name, value = broken.split(" ", 2)
        broken = json.dumps({**json.loads(lines[0]), name: json.loads(value)})
    elif broken.startswith("WITHOUT "):
        broken = json.dumps({name: value for name, value in json.loads(lines[0]).items() if name != broken.split()[1]})
    segment.write_text("\n".join([lines[0], broken, lines[1], ""]))
    reader = JournalReader(Folder(tmp_path))
    with caplog.at_level(logging.WARNING):
        reader.read()
    assert reader.timeline.steps["step"].tolist() == [1.0, 2.0]
    assert "line 2 is skipped" in caplog.text
    assert_same(reader.timeline, read_journal(Folder(tmp_path)))


def test_lines_as_a_run_writes_them_take_the_fast_way(tmp_path: Path) -> None:
    with Journal(Folder(tmp_path)) as journal:
        for event in life(2):
            journal(event)
        journal(dataclasses.replace(step(900), loss=math.nan, extra={"noise_scale": math.inf, "new": 1.0}))
    lines = (tmp_path / "journal" / "0001-0000.jsonl").read_bytes().splitlines()
    steps = [line for line in lines if b'"kind": "step"' in line]
    found = parse_steps(steps)
    assert found is not None
    assert len(found) == len(steps)
    assert math.isnan(found["loss"][-1])
    assert math.isnan(found.extra["noise_scale"][-1])
    assert found.extra["new"][-1] == 1.0


def in_columns(data: bytes) -> Timeline:
    """What a reader says of lines."""
    return Timeline(*_parsed("lines", 0, data.split(b"\n")[:-1]))


def by_json(data: bytes) -> list[Event]:
    """What the slow way says of the same lines."""
    return [event for _, event in parse_lines("lines", enumerate(data.split(b"\n")[:-1], 1))]


@pytest.mark.parametrize("seed", range(6))
def test_columns_of_odd_names_say_what_events_say(seed: int) -> None:
    chance, events = random.Random(seed), life(seed)
    names = ["loss/data.en", "loss/a, b", "epochs/naïve"]
    for at, event in enumerate(events):
        if isinstance(event, StepDone):
            extra = event.extra | {name: chance.choice([math.nan, 1e-9 * at, 3e20]) for name in names if seed % 3}
            events[at] = dataclasses.replace(event, extra=extra, updated=chance.random() < 0.9)
    data = b"".join(map(_line, events))
    found = in_columns(data)
    assert parse_steps([line for line in data.splitlines() if b'"kind": "step"' in line]) is not None
    assert_same(found, by_json(data))
    assert list(found.tries.extra) == list(timeline_of(events).tries.extra)


NUMBERS = ("1.e5", ".5", "-.5", "5.", "01", "-01", "-0", "+1", "1e5", "1E-5", "1e999", "0x1", "nan", "NaN", "Infinity")
WORDS = (
    "true",
    "null",
    "nul",
    "",
    " 1",
    '"1"',
    "1.0",
    "2.5",
    "-",
    "--1",
    "1-",
    "1_0",
    "9007199254740993",
    "1,2",
    '1, "term": 2',
    "1" * 400,
    "1}",
    "[]",
)


@pytest.mark.parametrize("value", NUMBERS + WORDS)
def test_odd_values_are_taken_as_by_json(value: str) -> None:
    lines = [_line(step(number, sources=("wiki",))) for number in range(1, 5)]
    fields = json.loads(lines[2])
    for name in (name for name in fields | fields["extra"] if name not in ("extra", "kind")):
        written = re.sub(rb'("%s": )[^,}]*' % name.encode(), lambda match: match[1] + value.encode(), lines[2])
        data = b"".join([*lines[:2], written, lines[3]])
        assert_same(in_columns(data), by_json(data))


def test_large_whole_figures_are_read() -> None:
    lines = [_line(dataclasses.replace(step(number), extra={"rows": 2**53 + 1})) for number in (1, 2)]
    assert_same(in_columns(b"".join(lines)), by_json(b"".join(lines)))


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_taken_as_by_json(seed: int) -> None:
    chance = random.Random(seed)
    whole = b"".join(map(_line, life(3, starts=1)[:6]))
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2])):
            data[chance.randrange(len(data) - 1)] = chance.choice(b'0123456789.eE+-,:{}" \nnt\x00\xff')
        assert_same(in_columns(bytes(data)), by_json(bytes(data)))


def test_nothing_is_read_of_nothing(tmp_path: Path) -> None:
    reader = JournalReader(Folder(tmp_path))
    assert not reader.read()
    assert len(reader.timeline.steps) == 0
    assert reader.timeline.condensed() == []
    assert isinstance(step(1), StepDone)
