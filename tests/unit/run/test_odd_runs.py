"""What reads a run bears what no run should have: clocks that disagree, numbers that are none, ten thousand restarts, folders
that are half there. Every reader is tried on each; none fails, and none tells a number that is not finite."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journal_events import step

from springtide.cli.main import main
from springtide.config import Config
from springtide.events import Evaluated, Event, Failed, Monitored, Saved, Started, Stopped
from springtide.events.record import event as parsed
from springtide.run.compare import compare_runs
from springtide.run.folder import Run
from springtide.run.report.run_charts import curves
from springtide.run.report.run_page import RunFacts, parts
from springtide.run.run_status import StatusBuilder, overview
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Prices, ledger
from springtide.tracking.prometheus import observed
from springtide.tracking.run_state import run_state
from springtide.tracking.timeline import timeline_of

NAN, HOUR = math.nan, 3600.0


def at(event: Event, time_s: float, term: int = 1) -> Event:
    return dataclasses.replace(event, time_s=time_s, term=term)


def clocks() -> list[Event]:
    """Two drivers; the clock of the second one is an hour behind, and jumps back another one while it trains."""
    begun, saved = Started(step=0, world_size=2), Saved(step=3, name="step-0000000003", size_bytes=1, save_time_s=1.0)
    first = [at(begun, 9000.0), *(at(step(number), 9000.0 + number) for number in (1, 2, 3)), at(saved, 9003.5)]
    again = [at(Started(step=3, world_size=1), 9010.0 - HOUR, 2), at(step(4), 9011.0 - HOUR, 2)]
    return [*first, at(Stopped(step=3, status="stopped"), 9004.0), *again, at(step(5), 9012.0 - 2 * HOUR, 2)]


def no_numbers() -> list[Event]:
    """Nothing that is computed is a number."""
    wild = {
        "loss": NAN,
        "grad_norm": math.inf,
        "mfu": NAN,
        "tokens_per_s": math.inf,
        "energy_j": NAN,
        "step_time_s": 0.0,
    }
    steps = [dataclasses.replace(step(number, sources=("a",)), **wild, extra={"loss/a": NAN}) for number in range(1, 5)]
    held_out = Evaluated(step=4, heldout_loss=NAN, heldout_bits_per_byte=NAN, rows=1, forgetting={"old": NAN})
    return [Started(step=0, world_size=2), *steps, held_out, Monitored(step=4), *steps]


def restarts() -> list[Event]:
    """Every group fails after a step that was trained before."""
    found: list[Event] = []
    for number in range(10_000):
        failed = Failed(step=1, cause="hung", reason="no step for 300 s", again=True)
        found += [at(Started(step=0, world_size=2), 10.0 * number), at(failed, 10.0 * number + 5)]
    return [*found, at(step(1), 1e6)]


def finite(value: Any) -> None:
    json.dumps(value, allow_nan=False)


@pytest.mark.parametrize(("made", "last_step"), [(clocks, 5), (no_numbers, 4), (restarts, 1)])
def test_every_reader_bears_it(made: Callable[[], list[Event]], last_step: int) -> None:
    events = made()
    timeline = timeline_of(events)
    assert run_state(events).known == "running or killed"
    book = ledger(timeline.condensed(), Prices(1.0))
    assert min(book.spent.values()) >= 0.0
    finite([book.spent, book.total_dollars])
    builder = StatusBuilder(10, Prices(1.0))
    for part in (events[:-1], events[-1:]):
        builder.take(timeline_of(part))
    status = builder.status(9000.0)
    assert (status.step, status.is_over) == (last_step, False)
    finite([status.left_s, status.checkpoint_age_s, status.losses, status.dollars, status.steps_lost])
    finite([status.diagnosis.spent, [one.share for one in status.diagnosis.findings]])
    finite(curves(timeline))
    assert sum(map(len, parts(timeline, RunFacts()).values())) < 300_000, "tables show the newest rows"
    finite([value for event in timeline.events[-100:] for _, _, value in observed(event)])


@pytest.mark.parametrize(("made", "last_step"), [(clocks, 5), (no_numbers, 4)])
def test_every_command_bears_it(
    made: Callable[[], list[Event]],
    last_step: int,
    tiny: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(Folder(tmp_path / "odd"))
    run.write_config(tiny.override({"track.price": 1.0}))
    for term in (1, 2):
        with Journal(run.folder, term=term) as journal:
            for event in made():
                if max(event.term, 1) == term:
                    journal(event)
    assert (run.status, run.last_step) == ("running or killed", last_step)
    [row] = overview(str(tmp_path))
    assert (row.state, row.step, row.workers > 0) == ("running or killed", last_step, True)
    assert 0.0 <= row.goodput <= 1.0
    run.write_report()
    for command in (["run", "list", str(tmp_path)], ["run", "status", run.folder.url], ["inspect", run.folder.url]):
        assert main([*command, "--json"]) == 0
        assert "NaN" not in capsys.readouterr().out
    assert compare_runs(run, run).common_steps == last_step


@pytest.mark.parametrize("content", [None, b"", b'{"kind": "started", "st', b"\x00\xff\n"], ids=repr)
def test_a_partial_folder_is_a_run_that_has_not_started(
    content: bytes | None, tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is half there is a run that has not started."""
    run = Run(Folder(tmp_path / "half"))
    run.write_config(tiny)
    (tmp_path / "half" / "checkpoints" / "step-0000000004").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    if content is not None:
        run.folder.write("journal/0001-0000.jsonl", content)
    assert run.status == "not started"
    assert [(row.id, row.state, row.where) for row in overview(str(tmp_path))] == [("half", "not started", "")]
    for command in (["run", "status"], ["inspect"]):
        assert main([*command, run.folder.url]) == 0
    assert main(["run", "compare", run.folder.url, run.folder.url]) == 0
    capsys.readouterr()
    for verb in ("save", "stop", "pause"):
        assert main(["run", verb, run.folder.url, "--wait", "1"]) == 3
        assert "never been trained" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "step", "step": 10**400},
        {"kind": "step", "step": 2**53 + 2},
        {"kind": "started", "world_size": 10**10},
        {"kind": "started", "world_size": -1},
        {"kind": "started", "flops_per_token": 10**400},
        {"kind": "step", "world_size": 10**10},
        {"kind": "step", "term": 2**60},
        {"kind": "started", "skipped_updates": [10**400]},
        {"kind": "saved", "size_bytes": 10**400},
        {"kind": "step", "extra": {"loss/a": 10**400}},
    ],
    ids=str,
)
def test_a_number_that_no_run_writes_is_a_damaged_line(damage: dict[str, Any], tmp_path: Path) -> None:
    whole = [Started(step=0, world_size=2), step(1), Saved(step=1, name="x", size_bytes=1, save_time_s=1.0)]
    with Journal(Folder(tmp_path / "odd")) as journal:
        for one in whole:
            journal(one)
    [segment] = (tmp_path / "odd" / "journal").glob("*.jsonl")
    lines = segment.read_text().splitlines()
    [line] = [line for line in lines if json.loads(line)["kind"] == damage["kind"]]
    segment.write_text("\n".join([*lines, json.dumps(json.loads(line) | damage), ""]))
    run = Run(Folder(tmp_path / "odd"))
    assert len(run.events) == len(whole)
    assert len(run.timeline.tries) == 1
    with pytest.raises(ValueError, match=r"input|number|world_size"):
        parsed(json.loads(line) | damage)


def test_a_group_is_priced_without_a_list_of_its_workers() -> None:
    assert Prices(3600.0, 1.0).of(Started(step=0, world_size=10**12)) == (10**12, 0.0)
