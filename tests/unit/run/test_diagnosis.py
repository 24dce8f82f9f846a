"""What limits a run is named, with its numbers, and nothing is named where nothing is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from journal_events import step

from springtide.cli.main import main
from springtide.config import Config
from springtide.config.fields import fields
from springtide.events import (
    Decided,
    Evaluated,
    Event,
    Failed,
    Profiled,
    Resumed,
    Saved,
    SaveFailed,
    Started,
    Stopped,
    Straggling,
    Waited,
)
from springtide.run.diagnosis import REMEDIES, Diagnosis, DiagnosisBuilder
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.timeline import timeline_of

REPOSITORY = Path(__file__).parents[3]


def why(events: list[Event]) -> Diagnosis:
    """What limits a run with these events."""
    builder = DiagnosisBuilder()
    builder.take(timeline_of(events))
    return builder.diagnosis()


def steps(first: int, last: int, at_s: float, **changes: object) -> list[Event]:
    """Steps of half a second on two workers without waits, that end from ``at_s`` + 0.5 on."""
    usual = {"step_time_s": 0.5, "data_wait_s": 0.0, "mfu": 0.45, "term": 1, **changes}
    return [
        dataclasses.replace(step(number), time_s=at_s + 0.5 * place, **usual)  # type: ignore[arg-type]
        for place, number in enumerate(range(first, last + 1), 1)
    ]


def started(at: int, time_s: float, workers: int = 2, **more: object) -> Started:
    return Started(step=at, world_size=workers, time_s=time_s, term=1, **more)  # type: ignore[arg-type]


def profiled(**shares: float) -> Profiled:
    return Profiled(step=9, time_s=150.0, term=1, bound_by="memory", shares=shares, top={}, advice="", trace="")


BEGIN: list[Event] = [started(0, 100.0, nodes=["aaaaaaaabb", "ccccccccdd"], phases_s={"import": 3.0, "model": 1.0})]
HUNDRED = steps(1, 100, 100.0)
CASES: dict[str, tuple[list[Event], float, list[str]]] = {
    "data": (
        [*steps(1, 100, 100.0, data_wait_s=0.2), Waited(step=100, data_waits_s=[1.0, 20.0], time_s=150.0, term=1)],
        0.4,
        ["0.2 s of 0.5 s", "rank 1 on node cccccccc", "20 s in all"],
    ),
    "communication": ([*HUNDRED, profiled(communication=0.45)], 0.45, ["45% of a profiled step"]),
    "idle device": ([*HUNDRED, profiled(waiting=0.5)], 0.5, ["nothing to do in 50%"]),
    "compute": (steps(1, 100, 100.0, mfu=0.1), 0.75, ["MFU is 10.0%"]),
    "restarts": (
        [
            *HUNDRED,
            Failed(step=100, cause="lost nodes", reason="a", again=True, time_s=150.0, term=1),
            started(90, 160.0),
            *steps(91, 110, 160.0),
        ],
        15 / 70,
        ["1 restarts cost 30 worker-seconds", "10 steps trained again", "'lost nodes', about 10 s"],
    ),
    "memory": (
        [
            *HUNDRED,
            Failed(step=100, cause="out of memory", reason="a", again=True, time_s=150.0, term=1),
            started(100, 160.0),
            *steps(101, 110, 160.0),
        ],
        10 / 65,
        ["1 worker group ended out of memory"],
    ),
    "start-up": (
        [Decided(step=0, decision="start", reason="", time_s=80.0, term=1), *HUNDRED],
        20 / 70,
        ["import took longest, 3.0 s"],
    ),
    "straggler": (
        [
            *steps(1, 50, 100.0),
            Straggling(step=50, rank=1, node="ccccccccdd", share=0.5, time_s=125.0, term=1),
            *HUNDRED[50:],
        ],
        0.25,
        ["rank 1 on node cccccccc had 50%", "25 worker-seconds"],
    ),
    "saves": (
        [*HUNDRED, Saved(step=100, name="x", size_bytes=1, save_time_s=9.0, stall_s=4.0, time_s=155.0, term=1)],
        5 / 55,
        ["10 worker-seconds", "around 1 saves", "4.00 s"],
    ),
    "failed saves": (
        [*HUNDRED, SaveFailed(step=100, reason="the bucket is gone", in_a_row=1, time_s=150.0, term=1)],
        0.0,
        ["1 of 1 saves failed", "the bucket is gone"],
    ),
    "capacity": (
        [
            *HUNDRED,
            Failed(step=100, cause="lost nodes", reason="a", again=True, time_s=150.0, term=1),
            Decided(step=100, decision="stay", reason="waiting for capacity: room for 0", time_s=150.0, term=1),
            Decided(step=100, decision="start", reason="2 of 2", time_s=200.0, term=1),
            started(100, 200.0),
            *steps(101, 102, 200.0),
        ],
        50 / 101,
        ["100 worker-seconds", "room for 0"],
    ),
    "skipped updates": ([*HUNDRED[:90], *steps(91, 100, 145.0, updated=False)], 0.1, ["10 of 100 steps"]),
    "evaluation": (
        [*HUNDRED, Evaluated(step=100, heldout_loss=1, heldout_bits_per_byte=1, rows=1, time_s=160.0, term=1)],
        1 / 6,
        ["20 worker-seconds 1 evaluations"],
    ),
    "pauses": ([*HUNDRED, Resumed(step=100, paused_s=50.0, time_s=200.0, term=1)], 0.5, ["1 pauses"]),
    "device": (HUNDRED, 1.0, ["MFU 45%"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_limits_a_run_is_named_first_with_its_numbers(name: str) -> None:
    events, share, parts = CASES[name]
    found = why([*BEGIN, *events])
    if name in ("memory", "failed saves"):  # beside what the failure cost, and the device
        [one] = [one for one in found.findings if one.name == name]
    else:
        [one, *rest] = found.findings
        assert not rest or name == "capacity", rest
    assert one.name == name
    assert one.share == pytest.approx(share, rel=1e-3)
    assert one.remedy == REMEDIES[name]
    for part in parts:
        assert part in one.text
    json.dumps(found.as_dict(), allow_nan=False)


def test_every_finding_is_tried() -> None:
    assert set(CASES) == set(REMEDIES)


def test_remedies_name_settings_and_pages_that_exist() -> None:
    sections = {name.split(".")[0] for name in fields()}
    for text in REMEDIES.values():
        for word in text.replace(",", " ").replace("(", " ").replace(")", " ").replace(";", " ").split():
            if word.startswith("docs/"):
                assert (REPOSITORY / word).exists(), word
            elif word.split(".")[0] in sections and "." in word:
                assert word in fields(), word


def test_a_little_of_everything_is_not_named() -> None:
    events = [*steps(1, 100, 100.0, data_wait_s=0.02), profiled(communication=0.2, waiting=0.2)]
    assert [one.name for one in why([*BEGIN, *events]).findings] == ["device"]


def test_findings_are_sorted_by_what_they_cost() -> None:
    events = [*steps(1, 100, 100.0, data_wait_s=0.1), profiled(communication=0.5)]
    found = why([*BEGIN, *events]).findings
    assert [(one.name, round(one.share, 2)) for one in found] == [("communication", 0.4), ("data", 0.2)]


def test_a_peak_that_is_not_known_and_steps_without_finite_numbers_say_nothing_of_compute() -> None:
    odd = steps(1, 10, 100.0, mfu=3.0, loss=math.nan, tokens_per_s=math.nan)
    found = why([*BEGIN, *odd])
    assert [one.name for one in found.findings] == ["device"]
    assert any(one.startswith("compute") for one in found.not_measured)
    json.dumps(why([*BEGIN, *steps(1, 9, 100.0, step_time_s=math.nan, mfu=math.nan)]).as_dict())


def test_a_run_without_steps_tells_what_it_waits_for() -> None:
    assert why([]).findings == []
    waits = Decided(step=0, decision="stay", reason="waiting for capacity: room for 1 of 4", time_s=1.0, term=1)
    [one] = why([waits]).findings
    assert (one.name, one.share) == ("capacity", 1.0)
    assert "room for 1 of 4" in one.text


def test_the_command_prints_findings_as_text_and_json(
    tiny: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    run = Run(Folder(tiny.run.root) / "mine")
    run.write_config(tiny)
    slow = Failed(step=0, cause="\x1b[31mred", reason="", again=True, time_s=150.0, term=1)
    with Journal(run.folder) as journal:
        for event in [*BEGIN, *CASES["data"][0], slow, started(0, 190.0), *steps(1, 2, 190.0)]:
            journal(event)
    assert main(["run", "status", run.folder.url]) == 0
    said = capsys.readouterr().out
    lines = [line.rstrip().split(None, 1) for line in said.splitlines()]
    shown = {line[0]: line[1] for line in lines}
    assert shown["1."].startswith("restarts, ")
    assert shown["2."].startswith("data, ")
    assert ["try", REMEDIES["data"]] in lines
    assert shown["restarts"].startswith("1, 100 steps trained again; the last: 2 -> 2 workers, 40.0 s without a step; ")
    assert shown["time"].startswith("resize 44.0%, productive ")
    assert "\x1b" not in said
    assert main(["run", "status", run.folder.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["findings"][1]["name"]) == ("mine", "data")
    assert found["findings"][1]["share"] == pytest.approx(run.why().findings[1].share)
    assert sum(found["spent"].values()) == pytest.approx(1.0)
    assert list(found["spent"].values()) == sorted(found["spent"].values(), reverse=True)
    assert found["last_restart"]["steps_lost"] == 100


def test_a_long_run_keeps_a_bounded_number_of_events() -> None:
    found = why(
        [*BEGIN, *steps(1, 3000, 100.0, data_wait_s=0.1), Stopped(step=3000, status="finished", time_s=1600.0, term=1)]
    )
    assert "last 200 steps" in found.findings[0].text
    assert found.step == 3000


def test_a_run_that_is_looked_at_rarely_has_the_same_ledger() -> None:
    before = [started(0, 0.0), *steps(1, 1000, 0.0)]
    failed = Failed(step=1000, cause="hung", reason="a", again=True, time_s=501.0, term=1)
    after = [failed, started(500, 502.0), *steps(501, 1400, 502.0)]
    builders = DiagnosisBuilder(), DiagnosisBuilder()
    builders[0].take(timeline_of([*before, *after]))
    for part in (before, after):
        builders[1].take(timeline_of(part))
    at_once, in_parts = (one.book.ledger() for one in builders)
    assert at_once.spent["recomputed"] == pytest.approx(500 * 0.5 * 2)
    assert in_parts.spent == pytest.approx(at_once.spent)
