"""A sweep's folder: what is written there is read again, under the names that users know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.errors import ConfigError, DamagedFile
from springtide.storage import Folder
from springtide.tune import (
    Chosen,
    SweepFolder,
    TrialEnd,
    TrialOutcome,
    member_config,
    rank_trials,
    read,
    with_takeover,
)

TINY = configs.recipes.tiny()
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * TINY.tokens_per_step, "rungs": 4},
}
BUDGET = read(TABLE, TINY).budget
POINT = {"optim.peak_lr": 0.01, "optim.warmup": 3}


def test_a_takeover_is_a_new_run_and_what_was_recorded_counts(tmp_path: Path) -> None:
    folder = SweepFolder(Folder(tmp_path))
    before = folder.lineage(2, POINT)
    assert [one.run for one in before] == ["trial-0002"]
    folder.write_point(2, POINT)
    folder.write_point(2, {"optim.peak_lr": 0.05})
    assert folder.lineage(2, {"optim.peak_lr": 0.05})[-1].point == POINT
    donor = f"{folder.url}/trials/trial-0001/checkpoints/step-0000000010"
    longer = with_takeover(2, before, {**POINT, "optim.peak_lr": 0.02}, donor)
    folder.write_lineage(2, longer)
    assert folder.lineage(2, {}) == longer
    assert [one.run for one in longer] == ["trial-0002", "trial-0002-1"]
    config = member_config(TINY, read(TABLE, TINY).budget, *longer[-1])
    assert (config.run.id, config.train.start_from, config.optim.peak_lr) == ("trial-0002-1", donor, 0.02)
    assert config.checkpoint.every_steps == config.train.eval_every == 10


def test_an_empty_folder_has_no_sweep(tmp_path: Path) -> None:
    folder = SweepFolder(Folder(tmp_path / "it"))
    assert (folder.plan(), folder.points(), folder.finalists(BUDGET)) == (None, {}, None)
    assert (folder.ended(), folder.end_of(0)) == (frozenset(), None)
    assert not (tmp_path / "it").exists()


def test_every_file_has_its_name(tmp_path: Path) -> None:
    folder, table = SweepFolder(Folder(tmp_path)), read(TABLE, TINY)
    folder.write_plan({"search": "random", "seed": 0, "space": []})
    for number in (10_000, 9):
        folder.write_point(number, POINT)
    folder.write_end(9, TrialEnd("failed", "its loss was not finite"))
    folder.write_lineage(9, folder.lineage(9, {}))
    folder.write_finalists(Chosen([], 4, 3))
    folder.write_result(rank_trials(table, [TrialOutcome(9, POINT, "waiting")]))
    folder.write_page("<html>")
    folder.write_best(TINY.override({"track.mlflow_uri": "postgresql://ml:hunter2@host/db"}))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        *("sweep.json", "finalists.json", "result.json", "sweep.html", "best.yaml"),
        *("points/trial-0009.json", "points/trial-10000.json", "ended/trial-0009.json", "lineage/trial-0009.json"),
    }
    assert list(folder.points()) == [9, 10_000]
    assert folder.ended() == {9}
    assert folder.end_of(9) == ("failed", "its loss was not finite")
    assert json.loads((tmp_path / "ended" / "trial-0009.json").read_text()).keys() == {"status", "reason"}
    assert folder.finalists(BUDGET) == ([], 4, 3), "chosen, but there are none"
    folder.root.write_json("finalists.json", [9])
    assert folder.finalists(BUDGET) == ([9], BUDGET.trials, BUDGET.seeds), "from before the numbers"
    assert folder.page == str(tmp_path / "sweep.html")
    assert (tmp_path / "best.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("sweep.json", []),
        ("points/trial-0002.json", [1]),
        ("lineage/trial-0002.json", {}),
        ("lineage/trial-0002.json", []),
        ("lineage/trial-0002.json", ["trial-0002"]),
        ("lineage/trial-0002.json", [{"run": "../../../etc", "point": {}}]),
        ("lineage/trial-0002.json", [{"run": "trial-0001", "point": {}}]),
        ("lineage/trial-0002.json", [{"run": "trial-0002", "point": {}, "unknown": 1}]),
        ("ended/trial-0002.json", {"status": "failed"}),
        ("ended/trial-0002.json", {"status": None, "reason": ""}),
        ("finalists.json", {"0": 1}),
        ("finalists.json", [-1]),
        ("finalists.json", ["first"]),
        ("finalists.json", {"numbers": [1], "trials": 4}),
        ("finalists.json", {"numbers": [1], "trials": 4, "seeds": 1}),
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, file: str, value: object) -> None:
    folder = SweepFolder(Folder(tmp_path))
    folder.root.write_json(file, value)
    with pytest.raises(DamagedFile, match=f"{file}: "):
        (folder.plan(), folder.points(), folder.lineage(2, {}), folder.end_of(2), folder.finalists(BUDGET))


def test_files_that_are_no_trials_are_no_trials(tmp_path: Path) -> None:
    folder = SweepFolder(Folder(tmp_path))
    folder.write_point(3, POINT)
    for name in ("points/notes.txt", "points/trial-x.json", "ended/trial-0001.json~"):
        folder.root.write(name, "{}")
    assert (list(folder.points()), folder.ended()) == ([3], frozenset())


def test_a_sweep_of_another_format_is_refused_by_number(tmp_path: Path) -> None:
    folder = SweepFolder(Folder(tmp_path))
    folder.write_plan({"search": "random"})
    assert folder.root.read_json("sweep.json")["format"] == 1
    assert folder.plan() == {"search": "random"}
    folder.root.write_json("sweep.json", {"format": 2})
    with pytest.raises(ConfigError, match=r"sweep\.json.*format 2.*reads 1"):
        folder.plan()
    folder.root.write_json("sweep.json", {"search": "random"})
    assert folder.plan() == {"search": "random"}, "from before the number"


def test_a_point_that_no_trial_can_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trial-0002: optim\.peak_lr = -1"):
        member_config(TINY, read(TABLE, TINY).budget, "trial-0002", {"optim.peak_lr": -1}, "")
