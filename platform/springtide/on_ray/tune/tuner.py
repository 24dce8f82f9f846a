"""A sweep under Ray Tune, which decides which trials continue and where. Only this file and ``trial.py`` import Tune."""

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
"""Failures of a trial's process, not of its training, before the trial is given up."""
_HEAD = "node:__internal_head__"
"""Trials run there, because it stays; their workers are wherever the pool has room."""

Say = Callable[[str], None]
Note = Callable[[int, str, str], Any]
"""Function that records that a trial, by number, must not continue: how it ended, and why."""

SCHEDULERS = ("none", "asha", "hyperband", "median", "pbt", "pb2")
POPULATIONS = ("pbt", "pb2")
"""Schedulers under which trials take over each other's state."""


class SearchAdapter(Searcher):
    """Our search as one of Tune's."""

    def __init__(
        self, search: Search, sweep: Sweep, note: Callable[[int, Point], bool], room: Callable[[], int]
    ) -> None:
        """``note(number, point)``: records a point before it is tried, returns False if it may not; ``room()``: the number of
        trials that may run now."""
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self._search, self._sweep, self._note, self._room = search, sweep, note, room
        self._numbers: dict[str, int] = {}
        self.live = 0
        """Number of trials that run or are about to; paused ones leave their room to others."""
        self._results: dict[str, dict[str, Any]] = {}
        self.worthless = ""
        """Why no other trial is started; empty if there is no reason."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's number and point; None while there is no room for one, FINISHED after the last."""
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
        """Report an ended trial to the search, and check whether another one is worth its price."""
        failed = error or not result or "failed" in result or "held" in result
        values = None
        if not failed and result is not None:
            secondary = [result[self._sweep.secondary.metric]] if self._sweep.secondary else []
            values = [result[self._sweep.metric], *secondary]
        self._search.tell(self._numbers[trial_id], values)
        self._results[trial_id] = result or {}
        self.worthless = self._is_worthless()

    def _is_worthless(self) -> str:
        """Return why another trial is not worth its price, by the results of complete trials and the cost of all; empty if it
        is."""
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
            else f"another trial is expected to gain {worth:.3g} per {what}; min_improvement_per_dollar is {least:g}"
        )

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a resumed sweep gets its results again."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, likewise."""


class ProgressCallback(tune.Callback):
    """A callback that reports the progress of trials, and records which ones a scheduler has stopped."""

    def __init__(self, sweep: Sweep, points: SearchAdapter, spent: BudgetStopper, say: Say, note: Note) -> None:
        self._sweep, self._points, self._spent, self._say, self._note = sweep, points, spent, say, note
        self._trials = sweep.budget.trials
        self._over: set[str] = set()
        self._best: tuple[float, str] | None = None
        self._of: dict[str, str] = {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Count the live trials; Tune calls this once or more per result."""
        self._points.live = sum(one.status in ("PENDING", "RUNNING") for one in trials)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Report a trial's evaluation."""
        name, value = _name(trial), result.get(self._sweep.metric)
        if (of := result.get("of", "")) != self._of.get(name, ""):
            self._of[name] = of
            self._say(f"{name}: continued from {of}")
        if value is None or "failed" in result or "held" in result:
            return
        if self._best is None or self._sweep.better(value, self._best[0]):
            self._best = value, name
        running = sum(one.status == "RUNNING" for one in trials)
        counts = f"{len(self._over)} of {self._trials} done, {running} running"
        figures = f"{self._sweep.metric} {value:.4f} after {result['tokens']:,} tokens"
        self._say(f"{name}: {figures}; best {self._best[0]:.4f} of {self._best[1]}; {counts}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report an ended trial, and record it if it must not continue."""
        name, result = _name(trial), trial.last_result or {}
        self._over.add(name)
        if "held" in result:
            self._say(f"{name}: skipped, another driver holds it: {result['held']}")
        elif "failed" in result:
            self._note(number_of(name), "failed", result["failed"])
            self._say(f"{name}: FAILED, {result['failed']}")
        elif not result.get("over") and not self._spent.over:
            self._note(number_of(name), "stopped", "")
            self._say(f"{name}: stopped, {self._sweep.metric} {result.get(self._sweep.metric, float('nan')):.4f}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report a trial with a process that failed too often."""
        self._over.add(_name(trial))
        self._say(f"{_name(trial)}: its process failed {_FAILURES + 1} times; see {trial.path}")


class BudgetStopper(tune.Stopper):
    """A stopper that ends the sweep when its budget is spent."""

    def __init__(self, budget: Budget, pool: Any, before: Sequence[TrialOutcome]) -> None:
        """``before``: ended trials; their results are not reported again."""
        self._budget, self._pool = budget, pool
        self._by_trial = {one.name: (float(one.tokens), one.worker_s, one.dollars) for one in before}
        self.over = ""
        """Which limit was met; empty if none is."""
        self._lost = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Add a trial's result; returns False, because no trial is stopped alone."""
        tokens, worker_s = result.get("tokens", 0.0), result.get("worker_s", 0.0)
        self._by_trial[trial_id] = tokens, worker_s, result.get("dollars", 0.0)
        return False

    def unless_lost(self, write: Callable[..., None]) -> Callable[..., bool]:
        """Wrap ``write`` to return whether it was allowed: if another driver has taken over the sweep, this one ends."""

        def checked(*arguments: Any) -> bool:
            try:
                write(*arguments)
            except RunExists as error:
                self._lost, self.over = True, str(error)
                self._pool.close.remote()
            return not self._lost

        return checked

    def stop_all(self) -> bool:
        """Return whether a limit is met, or another driver holds the sweep."""
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
    """Return Tune's scheduler ``name``, in rungs of the budget. Raises ConfigError for an unknown one."""
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
    """A synchronous PBT that does not wait for ended members."""

    _next_perturbation_sync: float

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        """Handle a result, then move to the next rung: a resumed population starts at a later rung than Tune assumes."""
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
        """Return the config with the place that the state comes from. Tune would restore the state from its own checkpoint, and
        may restore the trial's own one instead, if that was still being written."""
        config, changes = super()._get_new_config(trial, trial_to_clone)
        return {"trial": {**config["trial"], "of": self._trial_state[trial_to_clone].last_result["state"]}}, changes

    def _go_on(self, tune_controller: Any, over: Any = None) -> None:
        """Move to the next rung if all live members have reached this one."""
        live = [one for one in tune_controller.get_live_trials() if one is not over]
        reached = [self._trial_state[one].last_train_time for one in live]
        if reached and min(reached) >= self._next_perturbation_sync:
            self._next_perturbation_sync = max(reached) + self._perturbation_interval


class _SynchronousPB2(_SynchronousPBT, PB2):
    """The same for PB2."""


def _population(name: str, sweep: Sweep, asked: dict[str, Any]) -> TrialScheduler:
    """Return a population's scheduler. Members wait for each other at each rung, so that the result does not depend on which
    of them lost workers. PBT changes the point that is taken over by a fifth, or draws a new one; PB2 takes the next one from
    a Gaussian process (Parker-Holder et al., 2020), along the ranges of the space, in logs where the space uses them."""
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
    """Return a population in Tune's form: all members exist from the start."""
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
    """Try the points of ``search``, ``concurrent`` at once (0: as many as fit), until all are done or the budget is spent.
    Returns which limit of the budget was met, empty if none. ``begun`` is called with each point before it is tried.
    ``population``: the first points of a population's trials, instead of ``search``'s. ``folder``: where Tune keeps its own
    state. ``before``: ended trials of the same sweep, which count for the budget."""
    # not the job: Tune saves what its searcher and callbacks refer to in the sweep's folder, and a job has passwords
    sweep, pool = job.sweep, job.pool
    spent = BudgetStopper(sweep.budget, pool, before)
    members = {"param_space": _members(sweep, population)} if population else {}
    least = configs.build(job.base).elastic.min_workers

    def room() -> int:
        return concurrent or max(1, ray.get(pool.places.remote()) // least)

    # HyperBand halves a bracket by the trials that it knows, and members of a population wait for each other at each rung:
    # these two get all trials at once, and Ray limits how many run
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
    """Return a trial's config in Tune's form."""
    return {"trial": {"number": number, "point": point}}
