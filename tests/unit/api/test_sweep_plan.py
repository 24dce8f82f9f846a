"""With what a sweep may be resumed, and the config of its best trial."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import config as configs
from springtide.api.sweep import SweepDriver, check_finalists, plan_of, started_with
from springtide.errors import ConfigError, RunExists
from springtide.events import Evaluated, Started, Stopped
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tune import Chosen, SweepFolder, name_of, rank_trials, read, trial_config

TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "stream.global_batch": ("choice", 12, 24)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * STEP, "rungs": 4},
}


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(Folder(tmp_path) / "first")


def begin(folder: SweepFolder, base: configs.Config = TINY, **changes: Any) -> dict[str, Any]:
    """Start a sweep as a driver does; returns its plan."""
    plan = started_with(folder, plan_of(base, read({**TABLE, **changes}, base), "random", 0), False)
    folder.write_plan(plan)
    return plan


def again(folder: SweepFolder, base: configs.Config, search: str = "random", resume: Any = True) -> dict[str, Any]:
    return started_with(folder, plan_of(base, read(TABLE, base), search, 0), resume)


def test_a_sweep_is_resumed_under_what_it_was_started_with(folder: SweepFolder) -> None:
    with pytest.raises(ConfigError, match=r"first.*sweep.*--resume"):
        again(folder, TINY)
    plan = begin(folder)
    assert (plan["distinct"], plan["seed"]) == (True, 0)
    assert again(folder, TINY) == again(folder, TINY, resume="auto") == folder.plan()
    with pytest.raises(RunExists, match="with --resume"):
        again(folder, TINY, resume=False)
    with pytest.raises(ConfigError, match=r"space.*--search.*--seed"):
        again(folder, TINY, search="grid")


def test_a_resume_under_another_base_is_refused_and_names_what_differs(folder: SweepFolder) -> None:
    begin(folder)
    other = TINY.override({"model.num_layers": TINY.model.num_layers + 1, "stream.seed": 7})
    with pytest.raises(ConfigError) as caught:
        again(folder, other)
    text = str(caught.value)
    layers = TINY.model.num_layers
    assert f"stream.seed was {TINY.stream.seed}, is 7; model.num_layers was {layers}, is {layers + 1}" in text
    assert text.endswith("another --name")


def test_a_resume_may_change_what_trials_do_not_learn_from(folder: SweepFolder) -> None:
    begin(folder, TINY.override({"shards.dataset": "/data/a"}))
    changes = {
        "run.root": "/elsewhere",
        "track.price": 2.0,
        "elastic.max_workers": 9,
        "shards.dataset": "",
        "optim.peak_lr": 0.5,
        "stream.global_batch": 24,
        "train.total": 10**6,
        "train.eval_every": 7,
    }
    assert again(folder, TINY.override(changes))["seed"] == 0


def test_a_password_is_neither_in_the_plan_nor_a_difference(folder: SweepFolder) -> None:
    """A password is not in the plan and a new one is no difference."""
    begin(folder, TINY.override({"corpus.source": "https://ml:hunter2@host/a.txt"}))
    assert b"hunter2" not in folder.root.read("sweep.json")
    again(folder, TINY.override({"corpus.source": "https://ml:hunter3@host/a.txt"}))


def test_an_older_sweep_resumes_with_the_points_it_drew(folder: SweepFolder) -> None:
    """A sweep from before is resumed with the points that it drew."""
    plan = begin(folder)
    folder.write_plan({key: plan[key] for key in ("search", "seed", "space")})
    found = again(folder, TINY.override({"stream.seed": 7}))
    assert found == folder.plan()
    assert "distinct" not in found


def test_the_numbers_of_repeats_are_fixed_with_the_finalists(folder: SweepFolder) -> None:
    """The numbers of repeats stay what they were when finalists were chosen."""

    def budget(**changes: int) -> Any:
        return read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "finalists": 2, **changes}}, TINY).budget

    check_finalists(folder, budget(trials=9))
    folder.write_finalists(Chosen([3, 1], trials=4, seeds=3))
    check_finalists(folder, budget(finalists=1))
    with pytest.raises(ConfigError, match=r"BUDGET\.trials = 16.* 4 .*--name"):
        check_finalists(folder, budget(trials=16))
    with pytest.raises(ConfigError, match=r"BUDGET\.seeds = 5.* 3 "):
        check_finalists(folder, budget(seeds=5))
    folder.root.write_json("finalists.json", [3, 1])  # from before the numbers
    check_finalists(folder, budget(trials=16))


def test_the_best_config_is_what_its_trial_was_trained_with(folder: SweepFolder) -> None:
    table = read(TABLE, TINY)
    base = TINY.override({"run.root": folder.trials.url})
    point = {"optim.peak_lr": 0.01, "stream.global_batch": 24}
    folder.write_point(0, point)
    ran = trial_config(base.override({"model.num_layers": 3}), table.budget, name_of(0), point)
    run = folder.trials / name_of(0)
    run.write(configs.RUN_CONFIG, configs.dump(ran.override({"train.micro_batch": 2})))
    with Journal(run) as journal:
        journal(Started(step=0, world_size=1))
        journal(Evaluated(step=20, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1))
        journal(Stopped(step=20, status="finished", reason=""))
    held: Any = SimpleNamespace(folder=folder)
    driver = SweepDriver(held, table, base, "/runs", "off", 0, print)
    driver._write(rank_trials(table, driver.reader.outcomes()))
    best = configs.load_config(Path(folder.root.path) / "best.yaml")
    assert (best.model.num_layers, best.optim.peak_lr, best.stream.global_batch) == (3, 0.01, 24)
    assert (best.run.root, best.run.id, best.train.micro_batch) == ("/runs", "", base.train.micro_batch)
