"""Ray Tune saves its searcher, scheduler, callbacks and stopper in the sweep's folder."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune

from springtide import config as configs
from springtide.errors import ConfigError, TrainingInterrupted
from springtide.ray.tune import tuner
from springtide.ray.tune.messages import HeldSweep, TrialJob, TrialResult
from springtide.ray.tune.schedulers import POPULATIONS, SCHEDULERS, scheduler_of
from springtide.ray.tune.trial import Trial
from springtide.storage import Folder
from springtide.tune import Budget, Rung, SweepFolder, TrialOutcome, random_points, read, search_of

URI = "postgresql://ml:hunter2@127.0.0.1:9/mlflow"
TINY = configs.recipes.tiny()
TABLE = {
    "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * TINY.tokens_per_step},
}


@pytest.fixture
def closed() -> list[bool]:
    """One entry per call that closes the pool."""
    return []


@pytest.fixture
def pool(closed: list[bool]) -> Any:
    return SimpleNamespace(
        close=SimpleNamespace(remote=lambda: closed.append(True)), places=SimpleNamespace(remote=lambda: 4)
    )


def stopper(pool: Any, **budget: Any) -> tuner.BudgetStopper:
    return tuner.BudgetStopper(Budget(**{"trials": 4, "tokens_per_trial": 500, **budget}), pool, (), threading.Event())


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
    table = read(TABLE, base)
    held = HeldSweep(SweepFolder(Folder(tmp_path)), term=1)
    job = TrialJob(base, table, held, None, lambda config, **named: base, lambda run: None)  # type: ignore[arg-type]
    assert b"hunter2" in cloudpickle.dumps(job)
    members = random_points(table, base, 0) if name in POPULATIONS else []
    search, scheduler = search_of("random", table, base, 0, []), scheduler_of(name, table)
    assert tuner.TrialTuner(job, 2, print, threading.Event()).run(search, scheduler, members) == ""
    assert found["fit"]
    assert b"hunter2" not in cloudpickle.dumps(found)


def test_an_interrupted_sweep_ends_when_its_trials_have_saved(
    monkeypatch: pytest.MonkeyPatch, pool: Any, closed: list[bool]
) -> None:
    """An interrupted sweep ends when its trials have saved and begins no other."""
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


def trial_of(number: int, **result: Any) -> Any:
    return SimpleNamespace(
        custom_trial_name=f"trial-{number:04d}",
        status="RUNNING",
        path="",
        last_result=TrialResult(number=number, **result),
    )


def test_progress_is_silent_about_a_trial_without_an_evaluation(pool: Any) -> None:
    said: list[str] = []
    spent = stopper(pool)
    progress = tuner.ProgressCallback(read(TABLE, TINY), SimpleNamespace(live=0), spent, said.append, lambda *end: True)  # type: ignore[arg-type]
    trial = trial_of(3, heldout_loss=math.inf, over=True, done=True)
    progress.on_trial_result(0, [trial], trial, trial.last_result)
    progress.on_trial_complete(0, [trial], trial)
    assert said == []


def test_an_objective_that_is_not_finite_is_a_failure() -> None:
    """A search takes an objective that is not finite as a failure."""
    told: list[object] = []
    search: Any = SimpleNamespace(first=0, ask=lambda number: {}, tell=lambda number, values: told.append(values))
    objective = {**TABLE["OBJECTIVE"], "secondary": {"metric": "memory_bytes", "mode": "min"}}
    points = tuner.SearchAdapter(search, read({**TABLE, "OBJECTIVE": objective}, TINY), lambda *point: True, lambda: 4)
    for value in (math.inf, math.nan):
        assert points.suggest(str(value))
        points.on_trial_complete(str(value), TrialResult(heldout_loss=value, over=True))
    assert points.suggest("good")
    points.on_trial_complete("good", TrialResult(heldout_loss=2.0, memory_bytes=8.0, over=True))
    assert told == [None, None, [2.0, 8.0]]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was written to a store, whose pauses take no time."""
    monkeypatch.setattr(tuner, "store_pause_s", lambda failures: 0.0)
    return []


def test_a_store_that_returns_is_written_to_again(pool: Any, written: list[str]) -> None:
    """A store that is away for a moment is written to again."""
    spent, tries = stopper(pool), iter([OSError("503 Slow Down"), OSError("503 Slow Down"), None])

    def write(what: str) -> None:
        if error := next(tries):
            raise error
        written.append(what)

    assert spent.unless_lost(write)("the end of a trial")
    assert written == ["the end of a trial"]
    assert not spent.stop_all()


@pytest.mark.parametrize("error", [OSError("503 Slow Down"), PermissionError("403")], ids=["away", "forbidden"])
def test_a_store_that_stays_away_ends_the_sweep(
    pool: Any, closed: list[bool], written: list[str], error: OSError
) -> None:
    """A store that stays away ends the sweep when its trials have saved."""
    spent = stopper(pool)
    spent.running = 1

    def write() -> None:
        written.append("try")
        raise error

    assert not spent.unless_lost(write)()
    assert len(written) == (1 if isinstance(error, PermissionError) else tuner.MOST_STORE_FAILURES + 1)
    assert (spent.stop_all(), spent.failure, closed) == (False, error, [True])
    assert str(error) in spent.over
    spent.running = 0
    assert spent.stop_all()
    assert cloudpickle.loads(cloudpickle.dumps(spent)).failure is None, "errors of a store's client may not pickle"


def test_a_stop_does_not_wait_for_a_store_that_is_away(pool: Any) -> None:
    interrupted = threading.Event()
    interrupted.set()
    spent = tuner.BudgetStopper(Budget(trials=2, tokens_per_trial=10), pool, (), interrupted)

    def write() -> None:
        raise OSError("503 Slow Down")

    assert not spent.unless_lost(write)()


def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: Any, fit: Any) -> tuple[str, list[str]]:
    """Run a sweep whose Tune does ``fit(stopper)``; returns why it ended early and what it said."""

    class Tuner:
        def __init__(self, trainable: object, run_config: Any, **settings: object) -> None:
            self.spent = run_config.stop

        def fit(self) -> None:
            fit(self.spent)

    monkeypatch.setattr(tune, "Tuner", Tuner)
    monkeypatch.setattr(tune, "with_parameters", lambda trainable, job: Trial)
    table, said = read(TABLE, TINY), list[str]()
    held = HeldSweep(SweepFolder(Folder(tmp_path)), term=1)
    job = TrialJob(TINY, table, held, pool, lambda config, **named: TINY, lambda run: None)
    search = search_of("random", table, TINY, 0, [])
    limit = tuner.TrialTuner(job, 2, said.append, threading.Event()).run(search, scheduler_of("none", table))
    return limit, said


def test_an_error_inside_tune_is_raised_and_names_its_cause(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(spent: tuner.BudgetStopper) -> None:
        raise tune.TuneError("Traceback (most recent call last):\n  ...\nKeyError: 'rung'\n")

    with pytest.raises(TrainingInterrupted, match=r"KeyError: 'rung'.*--resume"):
        run_with(monkeypatch, tmp_path, pool, fit)


def test_an_error_inside_tune_does_not_hide_why_a_sweep_ends(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(spent: tuner.BudgetStopper) -> None:
        spent.over = "the budget is spent, tokens: 900"
        raise tune.TuneError("Traceback (most recent call last):\n  ...\nKeyError: 'rung'\n")

    limit, said = run_with(monkeypatch, tmp_path, pool, fit)
    assert limit == "the budget is spent, tokens: 900"
    assert said == ["an error inside Ray Tune: KeyError: 'rung'"]


def test_a_store_that_stayed_away_is_raised_as_itself(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(spent: tuner.BudgetStopper) -> None:
        spent.failure = OSError("503 Slow Down")

    with pytest.raises(OSError, match="503 Slow Down"):
        run_with(monkeypatch, tmp_path, pool, fit)


def test_costs_of_an_earlier_start_count_before_its_reports(pool: Any) -> None:
    """What an earlier start has spent counts before its trials are reported again."""
    before = [TrialOutcome(number, {}, "stopped", (Rung(10, 400, 2.0),), worker_s=8.0) for number in range(2)]
    budget = Budget(trials=4, tokens_per_trial=500, tokens=1000)
    spent = tuner.BudgetStopper(budget, pool, before, threading.Event())
    assert not spent.stop_all()
    spent("id of Tune", TrialResult(number=0, tokens=100, worker_s=9.0))  # its first rung, told again
    spent("another id", TrialResult(number=1, heldout_loss=math.inf, done=True))
    assert not spent.stop_all()
    spent("one more", TrialResult(number=2, tokens=199))
    assert not spent.stop_all()
    spent("one more", TrialResult(number=2, tokens=200))
    assert spent.stop_all()
    assert spent.over == "the budget is spent, tokens: 1000"


def test_a_failure_does_not_give_back_what_its_trial_has_spent(pool: Any) -> None:
    spent = stopper(pool, tokens=900)
    for number, tokens in ((0, 500), (1, 375)):
        spent(f"id {number}", TrialResult(number=number, tokens=tokens))
    spent("id 1", TrialResult(number=1, heldout_loss=math.inf, failed="no memory", done=True))
    spent("id 2", TrialResult(number=2, tokens=25))
    assert spent.stop_all()


def test_a_budget_that_an_earlier_start_has_spent_begins_no_trial(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "Tuner", lambda *args, **settings: pytest.fail("Tune starts"))
    table = read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "tokens": 10 * TINY.tokens_per_step}}, TINY)
    before = [TrialOutcome(0, {}, "finished", (Rung(10, 10 * TINY.tokens_per_step, 2.0),))]
    held = HeldSweep(SweepFolder(Folder(tmp_path)), term=1)
    job = TrialJob(TINY, table, held, pool, lambda config, **named: TINY, lambda run: None)
    search = search_of("random", table, TINY, 0, [])
    trials = tuner.TrialTuner(job, 2, print, threading.Event())
    assert trials.run(search, scheduler_of("none", table), before=before).startswith("the budget")


def worth_after(least: float, values: list[float], steps: int = 40) -> str:
    """Why no other trial is started after trials of random points with these objectives, of a dollar each."""
    table = read({**TABLE, "BUDGET": {**TABLE["BUDGET"], "trials": 40, "min_improvement_per_dollar": least}}, TINY)
    points = tuner.SearchAdapter(search_of("random", table, TINY, 0, []), table, lambda *point: True, lambda: 40)
    for number, value in enumerate(values):
        if points.suggest(str(number)) == tuner.Searcher.FINISHED:
            break
        result = TrialResult(heldout_loss=value, over=True, dollars=1.0, tokens=steps * TINY.tokens_per_step)
        points.on_trial_complete(str(number), result)
    return points.worthless


def test_no_trial_is_started_that_is_not_worth_its_price() -> None:
    values = [3.0 + 0.1 * (number % 4) for number in range(8)]
    assert worth_after(1e-3, values) == ""
    said = worth_after(1e3, values)
    assert re.fullmatch(r"another trial can gain at most \S+ per dollar; min_improvement_per_dollar is 1000", said)
    assert worth_after(0.0, values) == "", "0 ends nothing"


def test_few_stopped_or_diverged_trials_end_nothing() -> None:
    """Few trials end nothing and neither do those that were stopped or diverged."""
    assert worth_after(1e3, [3.0, 3.1, 3.2]) == ""
    assert worth_after(1e3, [3.0, 3.1, 3.2, math.nan]) == ""
    assert worth_after(1e3, [3.0, 3.1, 3.2, 3.3], steps=10) == ""
    assert worth_after(1e3, [3.0, 3.1, 3.2, 3.3]) != ""


def test_a_search_without_new_points_ends_the_sweep() -> None:
    """A search that finds no other point ends the sweep and says why."""
    found: list[dict[str, float]] = [{"optim.peak_lr": 0.01}]

    def ask(number: int) -> dict[str, float]:
        if not found:
            raise ConfigError("SPACE: gave no point; widen it")
        return found.pop()

    search: Any = SimpleNamespace(first=0, ask=ask, tell=lambda number, values: None)
    points = tuner.SearchAdapter(search, read(TABLE, TINY), lambda *point: True, lambda: 4)
    assert points.suggest("a")
    assert points.suggest("b") == tuner.Searcher.FINISHED
    points.on_trial_complete("a", TrialResult(heldout_loss=2.0, over=True))
    assert points.worthless == "SPACE: gave no point; widen it"
    with pytest.raises(ConfigError):
        tuner.SearchAdapter(search, read(TABLE, TINY), lambda *point: True, lambda: 4).suggest("a")
