"""Ray Tune saves its searcher, scheduler, callbacks and stopper in the sweep's folder."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune

from springtide import config as configs
from springtide.on_ray.tune import tuner
from springtide.on_ray.tune.held_sweep import HeldSweep
from springtide.on_ray.tune.messages import TrialJob
from springtide.on_ray.tune.schedulers import POPULATIONS, SCHEDULERS, scheduler_of
from springtide.on_ray.tune.trial import Trial
from springtide.store import Folder
from springtide.tuning import Budget, SweepFolder, random_points, read, search_of

URI = "postgresql://ml:hunter2@127.0.0.1:9/mlflow"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_nothing_that_tune_saves_has_the_password_of_the_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    class Tuner:
        def __init__(self, trainable: object, **settings: object) -> None:
            found.update(settings)

        def fit(self) -> None:
            found["fit"] = True

    monkeypatch.setattr(tune, "Tuner", Tuner)
    monkeypatch.setattr(tune, "with_parameters", lambda trainable, job: Trial)
    base = configs.recipes.tiny().override({"track.mlflow_uri": URI, "run.root": str(tmp_path)})
    table = read(
        {
            "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
            "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
            "BUDGET": {"trials": 4, "tokens_per_trial": 40 * base.tokens_per_step},
        },
        base,
    )
    held = HeldSweep(SweepFolder(Folder(tmp_path)), term=1)
    job = TrialJob(base, table, held, None, lambda config, **named: base, lambda run: None)  # type: ignore[arg-type]
    assert b"hunter2" in cloudpickle.dumps(job)
    members = random_points(table, base, 0) if name in POPULATIONS else []
    search, scheduler = search_of("random", table, base, 0, []), scheduler_of(name, table)
    assert tuner.TrialTuner(job, 2, print, threading.Event()).run(search, scheduler, members) == ""
    assert found["fit"]
    assert b"hunter2" not in cloudpickle.dumps(found)


def test_an_interrupted_sweep_ends_when_its_trials_have_saved_and_begins_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    pool: Any = SimpleNamespace(close=SimpleNamespace(remote=lambda: closed.append(True)))
    now_s = 0.0
    monkeypatch.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: now_s))
    interrupted = threading.Event()
    spent = tuner.BudgetStopper(Budget(trials=2, tokens_per_trial=10), pool, (), interrupted)
    spent.running = 2
    assert not spent.stop_all()
    interrupted.set()
    assert [spent.stop_all(), spent.stop_all(), closed] == [False, False, [True]], "Tune would end them in ten seconds"
    assert spent.over.startswith("interrupted")
    spent.running = 0
    assert spent.stop_all()
    spent.running, now_s = 1, tuner.SAVED_S + 1
    assert spent.stop_all(), "one that does not end holds up nobody for ever"
    assert cloudpickle.loads(cloudpickle.dumps(spent)).over == spent.over
