"""Joules have the kind of the time in which they were used, and their kinds sum to what was counted."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from journal_events import step as any_step

from springtide.cli.main import main
from springtide.config import RUN_CONFIG, Config, dump
from springtide.events import Evaluated, Event, Failed, Left, RolledBack, Saved, Started, StepDone, event, record
from springtide.run.compare import compare_runs
from springtide.run.folder import open_run
from springtide.run.run_status import overview
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Ledger, ledger
from springtide.tracking.prometheus import observed


def step(number: int, time_s: float, joules: float, between: float = 0.0, wait_s: float = 0.0) -> StepDone:
    return dataclasses.replace(
        any_step(number),
        time_s=time_s,
        term=1,
        step_time_s=1.0,
        data_wait_s=wait_s,
        energy_j=joules,
        energy_between_j=between,
    )


def started(at: int, time_s: float, source: str = "nvml", workers: int = 2) -> Started:
    return Started(step=at, world_size=workers, time_s=time_s, term=1, energy_source=source)


HISTORY: list[Event] = [
    started(0, 10.0),
    step(1, 13.0, 500.0, between=100.0),  # two seconds of start-up before it
    step(2, 14.0, 400.0, between=8.0, wait_s=0.25),
    Evaluated(step=2, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1, time_s=17.0, term=1),
    Saved(step=2, name="x", size_bytes=1, save_time_s=0.1, time_s=18.0, term=1),
    step(3, 19.0, 1200.0, between=800.0),
    Failed(step=3, cause="lost nodes", reason="a", again=True, time_s=19.5, term=1),
    started(2, 30.0, "mixed: nvml; rapl", workers=3),
    step(3, 33.0, 900.0, between=300.0),
    step(4, 34.0, 450.0),
    Left(step=4, kept_in="memory", time_s=34.25, term=1),
]


def joules(book: Ledger) -> dict[str, float]:
    return {kind: round(kwh * 3.6e6, 6) for kind, kwh in book.energy_kwh.items() if kwh}


def test_energy_has_the_kind_of_its_time_and_the_kinds_sum_to_what_was_counted() -> None:
    book = ledger(HISTORY)
    assert joules(book) == {
        "productive": 400.0 + 392.0 + 400.0 + 450.0,
        "recomputed": 600.0,
        "data_stall": 8.0,
        "evaluation": 600.0,
        "checkpoint_stall": 200.0,
        "start_up": 100.0,
        "resize": 300.0,
    }
    counted = sum(event.energy_j for event in HISTORY if isinstance(event, StepDone))
    assert sum(joules(book).values()) == pytest.approx(counted, rel=1e-9)
    assert book.total_kwh == pytest.approx(counted / 3.6e6)
    assert book.energy_sources == ["nvml", "mixed: nvml; rapl"]
    # from the start of each group to its last step; the steps of these events have two workers
    assert book.energy_counted == pytest.approx(9 * 2 + 4 * 2)
    assert book.energy_counted < book.held


def test_a_journal_without_joules_has_none_and_is_read_as_before() -> None:
    old = {key: value for key, value in record(any_step(1)).items() if not key.startswith("energy")}
    read = event(old)
    assert isinstance(read, StepDone)
    assert (read.energy_j, read.energy_between_j) == (0.0, 0.0)
    none = [started(0, 10.0, ""), step(1, 11.0, 0.0)]
    book = ledger(none)
    assert (book.total_kwh, book.energy_counted, book.energy_sources) == (0.0, 0.0, [])
    assert book.spent == ledger([started(0, 10.0), step(1, 11.0, 5.0)]).spent


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_joules_that_are_no_number_or_below_0_are_left_out(bad: float) -> None:
    good = [started(0, 10.0), step(1, 11.0, 7.0)]
    assert joules(ledger([*good, step(2, 12.0, bad)])) == {"productive": 7.0}
    assert sum(joules(ledger([*good, step(2, 14.0, 5.0, between=bad)])).values()) == pytest.approx(12.0)


def test_what_was_used_between_steps_without_any_time_between_them_is_other() -> None:
    assert joules(ledger([started(0, 10.0), step(1, 11.0, 5.0, between=2.0)])) == {"productive": 3.0, "other": 2.0}


def test_a_rollback_is_of_the_resize_and_its_steps_are_recomputed() -> None:
    back = RolledBack(step=2, skipped=[], reason="for a spike", time_s=12.5, term=1)
    history = [
        started(0, 10.0),
        step(1, 11.0, 1.0),
        step(2, 12.0, 1.0),
        back,
        started(1, 13.0),
        step(2, 16.0, 9.0, 4.0),
    ]
    assert joules(ledger(history)) == {"productive": 2.0, "resize": 4.0, "recomputed": 5.0}


def test_reports_tell_kilowatt_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        run = Folder(tmp_path / name)
        run.write(RUN_CONFIG, dump(Config().override({"run.id": name, "run.root": str(tmp_path)})))
        with Journal(run, term=1) as journal:
            for one in HISTORY:
                journal(one)
    where = str(tmp_path / "a")
    assert main(["report", where]) == 0
    text = capsys.readouterr().out
    assert "0.000958 kWh in " in text
    assert "(nvml; mixed: nvml; rapl)" in text
    assert "recomputed steps cost 0.000167 kWh" in text
    assert main(["report", where, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["energy_kwh"].values()) == pytest.approx(3450 / 3.6e6)
    assert main(["run", "list", str(tmp_path)]) == 0
    assert "kWh" in capsys.readouterr().out
    assert [row.energy_kwh for row in overview(str(tmp_path))] == [pytest.approx(3450 / 3.6e6, abs=1e-9)] * 2
    one, other = compare_runs(open_run(where), open_run(str(tmp_path / "b"))).runs
    assert one.energy_kwh == other.energy_kwh == pytest.approx(3450 / 3.6e6, abs=1e-9)


def test_prometheus_counts_joules() -> None:
    found = {metric.name: (metric.kind, value) for metric, _, value in observed(step(1, 2.0, 12.5))}
    assert found["energy_joules_total"] == ("counter", 12.5)
