"""Runs side by side: where two of them part, to the step, and what stands below a root."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from journal_events import step

from springtide import config as configs
from springtide.cli.main import main
from springtide.events import Decided, Evaluated, Event, Started, Stopped
from springtide.run.compare import compare_runs
from springtide.run.folder import Run
from springtide.run.run_status import overview
from springtide.storage import Folder
from springtide.tracking.journal import Journal

TRAINED: list[Event] = [Started(step=0, world_size=2), *(step(number, 1 / number) for number in range(1, 41))]


def written(root: Path, name: str, events: list[Event], **changes: object) -> Run:
    """A run's folder with these events and settings of tiny."""
    run = Run(Folder(root / name))
    run.write_config(configs.recipes.tiny().override({"run.id": name, "run.root": str(root), **changes}))
    with Journal(run.folder) as journal:
        for event in events:
            journal(event)
    return run


def changed(number: int, **values: object) -> list[Event]:
    """The usual events, with another step ``number``."""
    return [dataclasses.replace(one, **values) if one.kind == "step" and one.step == number else one for one in TRAINED]  # type: ignore[attr-defined, arg-type]


def test_a_run_and_its_twin_are_identical(tmp_path: Path) -> None:
    found = compare_runs(written(tmp_path, "one", TRAINED), written(tmp_path, "twin", TRAINED))
    assert found.identical
    assert found.changes_training == []
    assert set(found.settings) == {"run.id"}
    assert [tokens for tokens, _, _ in found.curves] == [40 * place for place in range(1, 11)]
    assert all(one == other for _, one, other in found.curves)


def test_two_branches_that_begin_at_a_later_step_are_identical(tmp_path: Path) -> None:
    told = [Started(step=50, world_size=2), *(step(number, 1 / number) for number in range(51, 101))]
    one, other, longer = (
        written(tmp_path, name, [*told, *more]) for name, more in (("one", []), ("other", []), ("longer", [step(101)]))
    )
    found = compare_runs(one, other)
    assert (found.identical, found.common_steps, found.runs[0].last_step) == (True, 50, 100)
    assert not compare_runs(one, longer).identical


def test_a_model_that_was_given_up_is_not_compared(tmp_path: Path) -> None:
    anew = [Started(step=0, world_size=2), *(step(number, 2.0) for number in range(1, 11))]
    one, other = written(tmp_path, "one", [*TRAINED, *anew]), written(tmp_path, "other", anew)
    found = compare_runs(one, other)
    assert [(run.last_step, run.loss) for run in found.runs] == [(10, 2.0)] * 2
    assert found.identical
    assert [number.step for number in one.steps] == list(range(1, 11))


def test_the_first_other_step_is_named_for_samples_and_for_losses(tmp_path: Path) -> None:
    one = written(tmp_path, "one", TRAINED, **{"optim.peak_lr": 1e-3})
    other = written(tmp_path, "other", changed(12, loss=0.5), **{"optim.peak_lr": 2e-3})
    found = compare_runs(one, other)
    assert (found.first_other_samples, found.first_other_loss, found.identical) == (None, 12, False)
    assert found.settings["optim.peak_lr"] == (1e-3, 2e-3)
    assert found.changes_training == ["optim.peak_lr"]
    shuffled = compare_runs(one, written(tmp_path, "shuffled", changed(7, digest="ff")))
    assert (shuffled.first_other_samples, shuffled.first_other_loss) == (7, None)


def test_steps_that_are_not_a_number_in_both_are_equal_and_a_shorter_run_is_not_identical(tmp_path: Path) -> None:
    one, other = (written(tmp_path, name, changed(5, loss=math.nan)) for name in ("one", "other"))
    assert compare_runs(one, other).first_other_loss is None
    short = written(tmp_path, "short", TRAINED[:21])
    found = compare_runs(written(tmp_path, "long", TRAINED), short)
    assert (found.common_steps, found.first_other_loss, found.identical) == (20, None, False)
    assert found.curves[-1][0] == 200
    empty = compare_runs(written(tmp_path, "empty", []), short)
    assert (empty.common_steps, empty.curves, empty.identical) == (0, [], False)


def test_passwords_in_settings_are_not_shown(tmp_path: Path) -> None:
    one = written(tmp_path, "one", [], **{"track.mlflow_uri": "https://me:geheim@host/x"})
    found = compare_runs(one, written(tmp_path, "two", []))
    assert "geheim" not in str(found.as_dict())


def test_all_runs_below_a_root_are_listed_the_newest_first_and_damaged_ones_too(tmp_path: Path) -> None:
    ended = [*TRAINED, Evaluated(step=40, heldout_loss=1, heldout_bits_per_byte=1, rows=1, tokens=1)]
    written(tmp_path, "done", [*ended, Stopped(step=40, status="finished")])
    written(tmp_path, "live", TRAINED[:11])
    written(tmp_path, "new", [])
    paused = Decided(step=10, decision="stay", reason="paused by me@here, and holds no workers")
    written(tmp_path, "rests", [*TRAINED[:11], paused])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("model: [")
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "empty").mkdir()
    rows = {row.id: row for row in overview(str(tmp_path))}
    assert {name: (row.state, row.step, row.workers) for name, row in rows.items() if name != "broken"} == {
        "done": ("finished", 40, 0),
        "live": ("running or killed", 10, 2),
        "new": ("not started", 0, 0),
        "rests": ("paused", 10, 0),
    }
    assert rows["broken"].state.startswith("cannot be read")
    assert (rows["done"].where, rows["new"].where) == ("2 workers", "")


def test_sweeps_are_listed_with_their_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list of a sweep's own folder has its trials, and a report of it says what to open."""
    written(tmp_path / "runs", "one", TRAINED)
    sweep = Folder(tmp_path / "runs") / "sw1"
    sweep.write_json("sweep.json", {})
    for number in range(2):
        written(Path((sweep / "trials").path), f"trial-000{number}", TRAINED)
    rows = {row.id: row for row in overview(str(tmp_path / "runs"))}
    assert (rows["sw1"].state, rows["sw1"].where) == ("sweep, 2 trials", sweep.where("sweep.html"))
    assert rows["sw1"].seen_s > 0
    assert {row.id for row in overview(sweep.url)} == {"trial-0000", "trial-0001"}
    assert main(["run", "list", str(tmp_path / "runs")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sw1")]
    assert line.split()[:4] == ["sw1", "sweep,", "2", "trials"]
    assert "0/0" not in line
    assert main(["report", sweep.url]) == 2
    assert (
        f"is a sweep's folder, not a run's; name one of its trials (springtide run list {sweep.url})"
        in capsys.readouterr().err
    )


def test_a_list_reads_each_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "one", TRAINED)
    (tmp_path / "no run").mkdir()
    asked: list[str] = []
    names, exists = Folder.names, Folder.exists
    monkeypatch.setattr(Folder, "names", lambda folder: (asked.append(f"list {folder.name}"), names(folder))[1])
    monkeypatch.setattr(Folder, "exists", lambda folder, name="": (asked.append(name), exists(folder, name))[1])
    assert [row.id for row in overview(str(tmp_path))] == ["one"]
    assert sorted(asked) == ["list journal", "list no run", "list one", f"list {tmp_path.name}"]


def test_the_commands_print_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(written(tmp_path, name, TRAINED).folder.url) for name in ("one", "two")]
    assert main(["run", "compare", *runs]) == 0
    assert "identical: 40 steps on the same samples" in capsys.readouterr().out
    assert main(["run", "compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True
    assert main(["run", "list", str(tmp_path)]) == 0
    assert "running or killed" in capsys.readouterr().out
    assert main(["run", "list", str(tmp_path), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [40, 40]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("springtide ")
