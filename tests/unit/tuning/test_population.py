"""Members of a population: which fields may change, and which run is whose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide import config as configs
from springtide.app.sweep import _last_settled_rung
from springtide.errors import ConfigError
from springtide.events import Evaluated, Event, Started
from springtide.store import Folder
from springtide.track.journal import Journal
from springtide.tuning import (
    Point,
    check_population,
    clamped,
    lineage_of,
    member_config,
    name_of,
    point_at,
    random_points,
    read,
    shares,
    turned,
)

TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * STEP, "rungs": 4},
}


@given(st.integers(0, 10**6))
def test_a_point_comes_back_from_its_shares(seed: int) -> None:
    sweep = read(TABLE, TINY)
    for point in random_points(sweep, TINY, seed):
        found = shares(sweep, point)
        assert all(0 <= share <= 1 for share in found.values())
        again = point_at(sweep, found)
        assert again["optim.warmup"] == point["optim.warmup"]
        assert again["optim.peak_lr"] == pytest.approx(point["optim.peak_lr"], rel=1e-5)


def test_what_was_changed_too_far_is_brought_back_into_the_space() -> None:
    sweep = read(TABLE, TINY)
    assert clamped(sweep, {"optim.peak_lr": 0.5, "optim.warmup": 12.0}) == {"optim.peak_lr": 0.1, "optim.warmup": 10}
    assert clamped(sweep, {"optim.peak_lr": 1e-9, "optim.warmup": 3}) == {"optim.peak_lr": 1e-4, "optim.warmup": 3}
    assert point_at(sweep, {"optim.peak_lr": 1.2, "optim.warmup": -0.1}) == {"optim.peak_lr": 0.1, "optim.warmup": 0}


def test_a_trial_that_turns_is_a_new_run_and_what_was_noted_counts(tmp_path: Path) -> None:
    folder, point = Folder(str(tmp_path)), Point(**{"optim.peak_lr": 0.01, "optim.warmup": 3})
    before = lineage_of(folder, 2, point)
    assert [one.run for one in before] == ["trial-0002"]
    (folder / "points").write_json("trial-0002.json", point)
    assert lineage_of(folder, 2, {"optim.peak_lr": 0.05})[-1].point == point
    donor = f"{folder.url}/trials/trial-0001/checkpoints/step-0000000010"
    longer = turned(folder, 2, before, {**point, "optim.peak_lr": 0.02}, donor)
    assert lineage_of(folder, 2, {}) == longer
    assert [one.run for one in longer] == ["trial-0002", "trial-0002-1"]
    config = member_config(TINY, read(TABLE, TINY).budget, *longer[-1])
    assert (config.run.id, config.train.start_from, config.optim.peak_lr) == ("trial-0002-1", donor, 0.02)
    assert config.checkpoint.every_steps == config.train.eval_every == 10


def test_a_rung_that_nobody_has_gone_on_from_is_heard_of_again(tmp_path: Path) -> None:
    """Its driver was killed before it said who takes over whose state."""
    folder, points = Folder(str(tmp_path)), [{"optim.peak_lr": rate, "optim.warmup": 3} for rate in (0.01, 0.02)]
    table = read(TABLE, TINY)

    def told(*events: tuple[int, Event]) -> int:
        for number, event in events:
            run = folder / "trials" / name_of(number)
            if not run.exists(configs.RUN_CONFIG):
                config = member_config(TINY, table.budget, name_of(number), points[number], "")
                run.write(configs.RUN_CONFIG, configs.dump(config))
            with Journal(run) as journal:
                journal(event)
        return _last_settled_rung(folder, table, points)

    def at(step: int) -> Event:
        return Evaluated(step=step, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1)

    assert _last_settled_rung(folder, table, []) == told() == 0
    assert told((0, Started(step=0, world_size=1)), (0, at(10)), (1, Started(step=0, world_size=2))) == 0
    assert told((1, at(10))) == 0
    assert told((1, Started(step=11, world_size=2))) == 10
    assert told((0, Started(step=11, world_size=2)), (0, at(20)), (1, at(20))) == 10
    donor = f"{folder.url}/trials/trial-0001/checkpoints/step-0000000020"
    turned(folder, 0, lineage_of(folder, 0, points[0]), points[1], donor)
    assert told() == 20


@pytest.mark.parametrize(
    ("space", "trials", "scheduler", "match"),
    [
        ({"model.num_layers": ("uniform", 1, 4)}, 4, "pbt", r"model\.num_layers.*cannot change while a trial trains"),
        ({"optim.optimizer": ("choice", "adamw", "muon")}, 4, "pbt", r"optim\.optimizer.*cannot change"),
        ({"optim.peak_lr": ("choice", 0.1, 0.2)}, 4, "pb2", r"is a choice, and pb2 takes only ranges"),
        ({"optim.peak_lr": ("uniform", 0.1, 0.2)}, 1, "pbt", r"BUDGET\.trials = 1: is too few for a population"),
    ],
)
def test_what_no_population_can_be_is_refused(space: object, trials: int, scheduler: str, match: str) -> None:
    table = {**TABLE, "SPACE": space, "BUDGET": {**TABLE["BUDGET"], "trials": trials}}
    with pytest.raises(ConfigError, match=match):
        check_population(read(table, TINY), scheduler)
