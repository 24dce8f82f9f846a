"""A sweep under Ray Tune, which says which trials go on and where. With ``trial.py``, the only file that imports it."""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow.fs
import ray
from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import Searcher

from springtide import config as configs
from springtide.errors import ConfigError, RunExists, explain
from springtide.on_ray.tune.trial import Trial, TrialJob
from springtide.store import Folder
from springtide.tuning import (
    Budget,
    Point,
    Search,
    Sweep,
    TrialOutcome,
    check_population,
    clamped,
    draw,
    expected_improvement,
    name_of,
    number_of,
    point_at,
    shares,
)

_FAILURES = 3
"""Of a trial's process, not of its training, before it is given up."""
_HEAD = "node:__internal_head__"
"""Trials are driven from there, for it stays; their workers are wherever the pool has room."""

Say = Callable[[str], None]
Note = Callable[[int, str, str], Any]
"""Writes down that a trial, by number, is not to go on: how it ended, and why."""

SCHEDULERS = ("none", "asha", "hyperband", "median", "pbt", "pb2")
POPULATIONS = ("pbt", "pb2")
"""Those under which trials take over each other's state."""


class SearchAdapter(Searcher):
    """Ours, as one of Tune's."""

    def __init__(
        self, search: Search, sweep: Sweep, note: Callable[[int, Point], bool], room: Callable[[], int]
    ) -> None:
        """``note(number, point)``: writes down a point before it is tried, False when it may not; ``room``: how many trials
        there may be now."""
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self._search, self._sweep, self._note, self._room = search, sweep, note, room
        self._numbers: dict[str, int] = {}
        self.live = 0
        """Trials that run or are about to; those that are paused leave their room to others."""
        self._results: dict[str, dict[str, Any]] = {}
        self.worthless = ""
        """Why no other trial is begun; empty while there is no reason."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial's number and point; None while there is no room for one."""
        number = len(self._numbers)
        if self.live >= self._room():
            return None
        if self.worthless:
            return Searcher.FINISHED
        number += self._search.first
        point = self._search.ask(number)
        if point is None:
            return Searcher.FINISHED
        if not self._note(number, point):
            return Searcher.FINISHED
        self._numbers[trial_id] = number
        self.live += 1
        return _config(number, point)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A trial is over."""
        failed = error or not result or "failed" in result or "held" in result
        values = None
        if not failed and result is not None:
            secondary = [result[self._sweep.secondary.metric]] if self._sweep.secondary else []
            values = [result[self._sweep.metric], *secondary]
        self._search.tell(self._numbers[trial_id], values)
        self._results[trial_id] = result or {}
        self.worthless = self._is_worthless()

    def _is_worthless(self) -> str:
        """By what trials that were trained to their end came to, and what all cost."""
        least, known = self._sweep.budget.min_improvement_per_dollar, list(self._results.values())
        values = [
            self._sweep.promise(one[self._sweep.metric]) for one in known if one.get("over") and "failed" not in one
        ]
        paid, what = sum(one.get("dollars", 0.0) for one in known), "dollar"
        if not paid:
            paid, what = sum(one.get("worker_s", 0.0) for one in known) / 3600.0, "worker-hour"
        if not least or not paid:
            return ""
        worth = expected_improvement(values, len(known)) / (paid / len(known))
        return (
            ""
            if worth >= least
            else f"another trial promises {worth:.3g} for a {what}; min_improvement_per_dollar is {least:g}"
        )

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep that is resumed is told again."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, likewise."""


class ProgressCallback(tune.Callback):
    """Tells what becomes of trials, and notes which a scheduler has stopped."""

    def __init__(self, sweep: Sweep, points: SearchAdapter, spent: BudgetStopper, say: Say, note: Note) -> None:
        self._sweep, self._points, self._spent, self._say, self._note = sweep, points, spent, say, note
        self._trials = sweep.budget.trials
        self._over: set[str] = set()
        self._best: tuple[float, str] | None = None
        self._of: dict[str, str] = {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Tune looks round: once or more for each result."""
        self._points.live = sum(one.status in ("PENDING", "RUNNING") for one in trials)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial was evaluated."""
        name, value = _name(trial), result.get(self._sweep.metric)
        if (of := result.get("of", "")) != self._of.get(name, ""):
            self._of[name] = of
            self._say(f"{name}: went on from {of}")
        if value is None or "failed" in result or "held" in result:
            return
        if self._best is None or self._sweep.better(value, self._best[0]):
            self._best = value, name
        running = sum(one.status == "RUNNING" for one in trials)
        counts = f"{len(self._over)} of {self._trials} done, {running} running"
        figures = f"{self._sweep.metric} {value:.4f} after {result['tokens']:,} tokens"
        self._say(f"{name}: {figures}; best {self._best[0]:.4f} of {self._best[1]}; {counts}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial is over."""
        name, result = _name(trial), trial.last_result or {}
        self._over.add(name)
        if "held" in result:
            self._say(f"{name}: left to its holder, {result['held']}")
        elif "failed" in result:
            self._note(number_of(name), "failed", result["failed"])
            self._say(f"{name}: FAILED, {result['failed']}")
        elif not result.get("over") and not self._spent.over:
            self._note(number_of(name), "stopped", "")
            self._say(f"{name}: stopped, {self._sweep.metric} {result.get(self._sweep.metric, float('nan')):.4f}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process failed too often."""
        self._over.add(_name(trial))
        self._say(f"{_name(trial)}: its process failed {_FAILURES + 1} times; see {trial.path}")


class BudgetStopper(tune.Stopper):
    """Ends the sweep where its budget does."""

    def __init__(self, budget: Budget, pool: Any, before: Sequence[TrialOutcome]) -> None:
        """``before``: trials whose results will not come again."""
        self._budget, self._pool = budget, pool
        self._by_trial = {one.name: (float(one.tokens), one.worker_s, one.dollars) for one in before}
        self.over = ""
        """Which limit was met; empty while none is."""
        self._lost = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Hear of a result; no trial is stopped for itself."""
        tokens, worker_s = result.get("tokens", 0.0), result.get("worker_s", 0.0)
        self._by_trial[trial_id] = tokens, worker_s, result.get("dollars", 0.0)
        return False

    def unless_lost(self, write: Callable[..., None]) -> Callable[..., bool]:
        """``write``, which returns whether it may: where another driver has taken the sweep over, this one ends."""

        def checked(*arguments: Any) -> bool:
            try:
                write(*arguments)
            except RunExists as error:
                self._lost, self.over = True, str(error)
                self._pool.close.remote()
            return not self._lost

        return checked

    def stop_all(self) -> bool:
        """Whether one of the limits is met, or another driver holds the sweep."""
        if self._lost:
            return True
        tokens, worker_s, dollars = map(sum, zip(*self._by_trial.values(), (0.0, 0.0, 0.0), strict=True))
        spent = {"tokens": tokens, "worker_hours": worker_s / 3600.0, "dollars": dollars}
        met = [kind for kind, value in spent.items() if 0 < getattr(self._budget, kind) <= value]
        self.over = f"{met[0]}: {spent[met[0]]:g}" if met else ""
        if self.over:
            self._pool.close.remote()
        return bool(self.over)


def scheduler_of(name: str, sweep: Sweep) -> TrialScheduler:
    """Tune's scheduler ``name``, in rungs of the budget. ConfigError for an unknown one."""
    if name not in SCHEDULERS:
        raise ConfigError(explain("--scheduler", name, "is not known", configs.nearest(name, SCHEDULERS)))
    asked = {"metric": sweep.metric, "mode": sweep.mode}
    rungs, reduction = sweep.budget.rungs, sweep.budget.reduction
    if name == "asha":
        return ASHAScheduler(max_t=rungs, grace_period=1, reduction_factor=reduction, stop_last_trials=False, **asked)
    if name == "hyperband":
        return HyperBandScheduler(max_t=rungs, reduction_factor=reduction, stop_last_trials=False, **asked)
    if name == "median":
        return MedianStoppingRule(time_attr="training_iteration", grace_period=1, **asked)
    if name in POPULATIONS:
        check_population(sweep, name)
        return _population(name, sweep, {**asked, "time_attr": "rung", "perturbation_interval": 1, "synch": True})
    return FIFOScheduler()


class _SynchronousPBT(PopulationBasedTraining):
    """One that does not wait for members which are over."""

    _next_perturbation_sync: float

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        """A population that is resumed begins at a later rung than Tune thinks."""
        decision = super().on_trial_result(tune_controller, trial, result)
        self._go_on(tune_controller)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        super().on_trial_complete(tune_controller, trial, result)
        self._go_on(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_error(tune_controller, trial)
        self._go_on(tune_controller, trial)

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """With it goes where the state is to come from. Tune would restore it from a checkpoint of its own, and may restore the
        trial's instead, where that was still being written."""
        config, changes = super()._get_new_config(trial, trial_to_clone)
        return {"trial": {**config["trial"], "of": self._trial_state[trial_to_clone].last_result["state"]}}, changes

    def _go_on(self, tune_controller: Any, over: Any = None) -> None:
        """Where nobody is left to be waited for, the next rung is."""
        live = [one for one in tune_controller.get_live_trials() if one is not over]
        reached = [self._trial_state[one].last_train_time for one in live]
        if reached and min(reached) >= self._next_perturbation_sync:
            self._next_perturbation_sync = max(reached) + self._perturbation_interval


class _SynchronousPB2(_SynchronousPBT, PB2):
    """The same of the other kind."""


def _population(name: str, sweep: Sweep, asked: dict[str, Any]) -> TrialScheduler:
    """Its members wait for each other at each rung, so that what becomes of it does not depend on who lost workers. PBT changes
    the point that is taken over by a fifth, or draws anew; PB2 asks a Gaussian process for the next (Parker-Holder et al.,
    2020), along the ranges as the space has them, in logs where it does."""
    if name == "pb2":

        def explore(config: dict[str, Any]) -> dict[str, Any]:
            trial = config["trial"]
            return {"trial": {**trial, "point": point_at(sweep, trial["shares"])}}

        bounds = {"trial": {"shares": {one.field: [0.0, 1.0] for one in sweep.space}}}
        return _SynchronousPB2(hyperparam_bounds=bounds, custom_explore_fn=explore, log_config=False, **asked)

    def explore_near(config: dict[str, Any]) -> dict[str, Any]:
        trial = config["trial"]
        return {"trial": {**trial, "point": clamped(sweep, trial["point"])}}

    near = {
        one.field: list(one.values) if one.kind == "choice" else functools.partial(draw, one, random.Random())
        for one in sweep.space
    }
    return _SynchronousPBT(
        hyperparam_mutations={"trial": {"point": near}}, custom_explore_fn=explore_near, log_config=False, **asked
    )


def _members(sweep: Sweep, points: Sequence[Point]) -> dict[str, Any]:
    """A population as Tune has it: all are there from the start."""
    members = [_config(number, point)["trial"] for number, point in enumerate(points)]
    return {"trial": tune.grid_search([{**one, "shares": shares(sweep, one["point"])} for one in members])}


def run_trials(
    job: TrialJob,
    search: Search,
    begun: Callable[[int, Point], None],
    population: Sequence[Point],
    folder: Folder,
    scheduler: TrialScheduler,
    concurrent: int,
    say: Say,
    note: Note,
    before: Sequence[TrialOutcome] = (),
) -> str:
    """Try the points of ``search``, so many at once, 0 as many as there is room for, until all are done or the budget is;
    returns which limit of it was met, if one was. ``begun`` hears of each point before it is tried. ``population``: where its
    trials begin, instead, if they are one. ``folder``: where Tune keeps notes of its own. ``before``: trials of the same sweep
    that are over: the budget is of all."""
    # Tune writes what its searcher and its callbacks refer to in the sweep's folder, and a job has passwords
    sweep, pool = job.sweep, job.pool
    spent = BudgetStopper(sweep.budget, pool, before)
    members = {"param_space": _members(sweep, population)} if population else {}
    least = configs.build(job.base).elastic.min_workers

    def room() -> int:
        return concurrent or max(1, ray.get(pool.places.remote()) // least)

    # HyperBand halves a bracket by the trials that it knows, and nobody of a population goes on before all have come as far:
    # they get all, and Ray lets so many run
    knows_all = bool(population) or isinstance(scheduler, HyperBandScheduler)
    points = SearchAdapter(
        search, sweep, spent.unless_lost(begun), (lambda: sweep.budget.trials) if knows_all else room
    )
    here = tune.PlacementGroupFactory([{"CPU": 0, _HEAD: round(0.99 / room(), 3) if knows_all else 0.001}])
    trainable = tune.with_resources(tune.with_parameters(Trial, job=job), here)
    filesystem = None if folder.is_local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(folder.fs))
    tuner = tune.Tuner(
        trainable,
        **members,
        tune_config=tune.TuneConfig(
            search_alg=None if population else points,
            num_samples=1 if population else sweep.budget.trials,
            scheduler=scheduler,
            max_concurrent_trials=sweep.budget.trials,
            reuse_actors=True,
            trial_dirname_creator=_name,
            trial_name_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{secrets.token_hex(4)}",
            storage_path=folder.where("ray"),
            storage_filesystem=filesystem,
            failure_config=tune.FailureConfig(max_failures=_FAILURES),
            callbacks=[ProgressCallback(sweep, points, spent, say, spent.unless_lost(note))],
            stop=spent,
            verbose=0,
        ),
    )
    with contextlib.suppress(tune.TuneError):
        tuner.fit()
    if points.worthless:
        say(points.worthless)
    return spent.over


def _name(trial: Any) -> str:
    return str(trial.custom_trial_name or name_of(trial.config["trial"]["number"]))


def _config(number: int, point: Point) -> dict[str, Any]:
    """A trial's, as Tune has it."""
    return {"trial": {"number": number, "point": point}}
