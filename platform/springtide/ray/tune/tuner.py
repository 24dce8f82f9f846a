"""A sweep under Ray Tune, which decides which trials continue and where."""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, cast

import pyarrow.fs
import ray
from ray import tune
from ray.tune.schedulers import HyperBandScheduler, TrialScheduler
from ray.tune.search import Searcher

from springtide.elastic.patience import MOST_STORE_FAILURES, store_pause_s
from springtide.errors import ConfigError, RunExists, TrainingInterrupted
from springtide.ray._ray_private import HEAD
from springtide.ray.cluster.session import without_tune_signals
from springtide.ray.train.process_pool import last_line
from springtide.ray.tune.messages import TrialJob, TrialParameters, TrialResult, TrialSpec, value_of
from springtide.ray.tune.schedulers import known_as
from springtide.ray.tune.trial import Trial
from springtide.ray.tune.trial_runner import SAVED_S
from springtide.ray.tune.worker_pool import WorkerPoolHandle
from springtide.storage.errors import may_pass
from springtide.tune import (
    Budget,
    Point,
    Search,
    Sweep,
    SweepFolder,
    TrialOutcome,
    name_of,
    number_of,
    shares,
)
from springtide.tune.search import possible_improvement

if TYPE_CHECKING:
    from ray.tune.experiment import Trial as TuneTrial

_FAILURES = 3
"""How often Tune restarts a failed trial: its process died, or a service that its training needs was down. After that the trial
stays ended until the sweep is resumed."""

Say = Callable[[str], None]
BeginTrial = Callable[[int, Point], bool]
"""Function that records a trial's number and point (its settings) before the trial starts; returns False if the trial may not
start."""
EndTrial = Callable[[int, str, str], bool]
"""Function that records that a trial must not continue: its number, how it ended, and why. Returns False if nothing could be
recorded."""
_P = ParamSpec("_P")


class SearchAdapter(Searcher):
    """Adapts our ``Search`` to Tune's ``Searcher``."""

    def __init__(self, search: Search, sweep: Sweep, begin: BeginTrial, room: Callable[[], int]) -> None:
        """``room()``: the number of trials that may run now."""
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self._search, self._sweep, self._begin, self._room = search, sweep, begin, room
        self._numbers: dict[str, int] = {}
        self._points: dict[str, Point] = {}
        self.live = 0
        """Number of trials that run or are about to run. Paused trials do not count, so that other trials can run in their
        place."""
        self._results: dict[str, TrialResult] = {}
        self.worthless = ""
        """Why no other trial is started; empty if there is no reason."""
        self._exhausted = ""

    def suggest(self, trial_id: str) -> TrialParameters | str | None:
        """Return the next trial's number and point; None while there is no room for one, FINISHED after the last."""
        number = len(self._numbers)
        if self.live >= self._room():
            return None
        if self.worthless:
            return Searcher.FINISHED
        number += self._search.first
        try:
            point = self._search.ask(number)
        except ConfigError as error:
            if not self._numbers:
                raise
            self.worthless = self._exhausted = str(error)  # the trials that have begun continue
            return Searcher.FINISHED
        if point is None:
            return Searcher.FINISHED
        if not self._begin(number, point):
            return Searcher.FINISHED
        self._numbers[trial_id], self._points[trial_id] = number, point
        self.live += 1
        return {"trial": {"number": number, "point": point}}

    def on_trial_complete(self, trial_id: str, result: TrialResult | None = None, error: bool = False) -> None:
        """Report an ended trial to the search, and check whether another trial is worth its cost."""
        values = None
        if not error and result and "failed" not in result and "held" not in result:
            value = value_of(result, self._sweep.metric)
            if math.isfinite(value):  # otherwise the trial diverged (NaN or infinite), or was never evaluated
                secondary = [value_of(result, self._sweep.secondary.metric)] if self._sweep.secondary else []
                values = [value, *secondary]
        self._search.tell(self._numbers[trial_id], values)
        self._results[trial_id] = result or {}
        self.worthless = self._exhausted or self._is_worthless()

    def _is_worthless(self) -> str:
        """Return why another trial is not worth its cost; empty if it is. Compares the results of complete trials with the cost
        of all trials."""
        least, known = self._sweep.budget.min_improvement_per_dollar, list(self._results.values())
        paid, what = sum(one.get("dollars", 0.0) for one in known), "dollar"
        if not paid:
            paid, what = sum(one.get("worker_s", 0.0) for one in known) / 3600.0, "worker-hour"
        if not least or not paid:
            return ""
        # A complete trial may lack up to half a rung (half the tokens between two evaluations) of its full length: batch sizes
        # differ between trials, and so does the number of tokens at the last step
        furthest = self._sweep.budget.tokens_per_trial * (1.0 - 0.5 / self._sweep.budget.rungs)
        complete = [
            (self._points[trial_id], value_of(one, self._sweep.metric))
            for trial_id, one in self._results.items()
            if one.get("over") and "failed" not in one and one.get("tokens", 0) >= furthest
        ]
        worth = possible_improvement(self._sweep, complete) / (paid / len(known))
        if worth >= least:
            return ""
        return f"another trial can gain at most {worth:.3g} per {what}; min_improvement_per_dollar is {least:g}"

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a resumed sweep reads its trials' results from their journals."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a resumed sweep reads its trials' results from their journals."""


class ProgressCallback(tune.Callback):
    """A callback that reports the progress of trials, and records which ones a scheduler has stopped."""

    def __init__(
        self,
        sweep: Sweep,
        points: SearchAdapter,
        spent: BudgetStopper,
        say: Say,
        end: EndTrial,
        by: str = "the scheduler",
    ) -> None:
        """``by``: name of the scheduler, for messages about trials that it stops."""
        self._by, self._sweep, self._points, self._spent, self._say, self._end = by, sweep, points, spent, say, end
        self._trials = sweep.budget.trials
        self._over: set[str] = set()
        self._best: tuple[float, str] | None = None
        self._of: dict[str, str] = {}

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: object) -> None:
        """Count the trials that run or are about to run; Tune calls this once or more per result."""
        self._points.live = sum(one.status in ("PENDING", "RUNNING") for one in trials)
        self._spent.running = sum(one.status == "RUNNING" for one in trials)

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: TrialResult, **info: object
    ) -> None:
        """Report a trial's evaluation."""
        name = _name(trial)
        if (of := result.get("of", "")) != self._of.get(name, ""):
            self._of[name] = of
            self._say(f"{name}: continued from {of}")
        if "tokens" not in result or "failed" in result or "held" in result:  # without tokens it was never evaluated
            return
        value = value_of(result, self._sweep.metric)
        if self._best is None or self._sweep.better(value, self._best[0]):
            self._best = value, name
        running = sum(one.status == "RUNNING" for one in trials)
        counts = f"{len(self._over)} of {self._trials} done, {running} running"
        figures = f"{self._sweep.metric} {value:.4f} after {result['tokens']:,} tokens"
        self._say(f"{name}: {figures}; best {self._best[0]:.4f} of {self._best[1]}; {counts}")

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: object) -> None:
        """Report an ended trial, and record it if it must not continue."""
        name = _name(trial)
        result = cast("TrialResult", trial.last_result or {})
        self._over.add(name)
        if "held" in result:
            self._say(f"{name}: skipped, another driver holds it: {result['held']}")
        elif "failed" in result:
            self._end(number_of(name), "failed", result["failed"])
            self._say(f"{name}: FAILED, {result['failed']}")
        elif not result.get("over") and not self._spent.over:
            reason = f"by {self._by} at step {result.get('step', 0):,}"
            self._end(number_of(name), "stopped", reason)
            value = value_of(result, self._sweep.metric) if self._sweep.metric in result else math.nan
            self._say(f"{name}: stopped {reason}, {self._sweep.metric} {value:.4f}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: object) -> None:
        """Report a trial that was interrupted too often. No end is recorded for the trial, so that a resumed sweep may continue
        it."""
        self._over.add(_name(trial))
        self._say(f"{_name(trial)}: interrupted {_FAILURES + 1} times, can be resumed; see {trial.path}")


class BudgetStopper(tune.Stopper):
    """Ends the sweep when its budget is spent or its driver is interrupted. Trials save their state first, and may continue
    later."""

    def __init__(
        self, budget: Budget, pool: WorkerPoolHandle, before: Sequence[TrialOutcome], interrupted: threading.Event
    ) -> None:
        """``before``: outcomes of trials from an earlier start of the sweep. Their costs are added at once, because some of
        these trials report no more results, and the others report their costs again only step by step."""
        self._budget, self._pool, self._interrupted = budget, pool, interrupted
        self._by_trial = {one.name: (float(one.tokens), one.worker_s, one.dollars) for one in before}
        self.over = ""
        """Why the sweep ends early; empty if it does not."""
        self.running = 0
        """Number of trials that run."""
        self.failure: OSError | None = None
        """Why the sweep's folder could not be written, after all retries; None if it could."""
        self._over_s = math.inf
        self._lost = False

    def __getstate__(self) -> dict[str, object]:
        """Return the state that Tune pickles into the sweep's folder. The event is left out, because it cannot be pickled; the
        file is never read."""
        return {**self.__dict__, "_interrupted": None, "failure": None}

    def __call__(self, trial_id: str, result: TrialResult) -> bool:
        """Add the costs in a trial's result. Returns False (do not stop this trial), because this stopper ends all trials or
        none. Of each trial, the largest costs reported so far are used: an earlier result may be reported again, and the result
        of a failure has no costs."""
        name = name_of(result["number"])
        tokens, worker_s, dollars = self._by_trial.get(name, (0.0, 0.0, 0.0))
        self._by_trial[name] = (
            max(tokens, float(result.get("tokens", 0))),
            max(worker_s, result.get("worker_s", 0.0)),
            max(dollars, result.get("dollars", 0.0)),
        )
        return False

    def unless_lost(self, write: Callable[_P, None]) -> Callable[_P, bool]:
        """Wrap ``write``, a function that writes to the sweep's folder, in a function that returns True if the write has
        succeeded. If another driver has claimed the sweep, this driver ends its trials. If the store cannot be reached, the
        write is tried again for half an hour; after that the sweep ends."""

        def checked(*arguments: _P.args, **named: _P.kwargs) -> bool:
            failures = 0
            while True:
                try:
                    write(*arguments, **named)
                except RunExists as error:
                    self._lost, self.over = True, str(error)
                    self._pool.close.remote()
                except OSError as error:
                    failures += 1
                    passes = may_pass(error) and failures <= MOST_STORE_FAILURES and self.failure is None
                    if passes and not self._interrupted.wait(store_pause_s(failures)):
                        continue
                    self.failure = error
                return not self._lost and self.failure is None

        return checked

    def stop_all(self) -> bool:
        """Return True if all trials must end now. They end at once if another driver has claimed the sweep. If a limit is met,
        the driver is interrupted or its store cannot be reached, they end when they have saved their state, or after
        ``SAVED_S``. Tune then gives their processes ten seconds."""
        if self._lost:
            return True
        tokens, worker_s, dollars = map(sum, zip(*self._by_trial.values(), (0.0, 0.0, 0.0), strict=True))
        spent = {"tokens": tokens, "worker_hours": worker_s / 3600.0, "dollars": dollars}
        met = [kind for kind, value in spent.items() if 0 < getattr(self._budget, kind) <= value]
        self.over = f"the budget is spent, {met[0]}: {spent[met[0]]:g}" if met else ""
        if self.failure is not None:
            self.over = f"the sweep's folder cannot be written: {self.failure}"
        if self._interrupted.is_set():
            self.over = "interrupted; trials continue from what they have saved"
        if self.over and self._over_s == math.inf:
            self._over_s = time.monotonic()
            self._pool.close.remote()
        return bool(self.over) and (not self.running or time.monotonic() - self._over_s > SAVED_S)


@dataclasses.dataclass(frozen=True)
class TrialTuner:
    """Runs the trials of a sweep under Ray Tune. Each trial trains with one point (a set of settings)."""

    job: TrialJob
    concurrent: int
    """Number of trials at once; 0: as many as fit."""
    say: Say
    interrupted: threading.Event
    """Set when all trials are to save their state and end."""

    def run(
        self,
        search: Search,
        scheduler: TrialScheduler,
        population: Sequence[Point] = (),
        before: Sequence[TrialOutcome] = (),
    ) -> str:
        """Train the points of ``search`` until all are done, the budget is spent or the driver is interrupted. Returns why the
        sweep ended early; empty if it did not. Raises OSError if the sweep's folder could not be written, TrainingInterrupted
        after an error inside Ray Tune.

        Args:
            population: for population-based training: the first point of each trial, used in place of the points of ``search``.
            before: outcomes of the sweep's earlier trials, which count towards the budget.
        """
        # do not pass ``self`` or the job to Tune's searcher and callbacks: Tune saves what they refer to in the sweep's folder,
        # and a job contains passwords
        sweep, held, say = self.job.sweep, self.job.held, self.say
        spent = BudgetStopper(sweep.budget, self.job.pool, before, self.interrupted)
        if spent.stop_all():
            return spent.over
        room = Room(self.job.pool, self.job.base.elastic.min_workers, self.concurrent)
        # HyperBand and populations get all trials at once, and Ray limits how many run: HyperBand must know all trials of a
        # bracket before it halves them, and members of a population wait for each other at each rung (evaluation)
        knows_all = bool(population) or isinstance(scheduler, HyperBandScheduler)
        most = (lambda: sweep.budget.trials) if knows_all else room
        begin = spent.unless_lost(held.begin_trial)
        points = SearchAdapter(search, sweep, lambda number, point: not spent.over and begin(number, point), most)
        progress = ProgressCallback(sweep, points, spent, say, spent.unless_lost(held.end_trial), known_as(scheduler))
        # the trials' processes run on the head node, because it stays; their workers run wherever the pool has room
        here = tune.PlacementGroupFactory([{"CPU": 0, HEAD: round(0.99 / room(), 3) if knows_all else 0.001}])
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(Trial, job=self.job), here),
            param_space=_members(sweep, population) if population else None,
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
                storage_path=held.folder.tune_path,
                storage_filesystem=_filesystem(held.folder),
                failure_config=tune.FailureConfig(max_failures=_FAILURES),
                callbacks=[progress],
                stop=spent,
                verbose=0,
            ),
        )
        try:
            with without_tune_signals():
                tuner.fit()
        except tune.TuneError as error:  # an error of Tune itself, not of a trial; its text is a stack trace
            problem = f"an error inside Ray Tune: {last_line(error)}"
            if not spent.over:
                raise TrainingInterrupted(f"{problem}; resume with --resume") from error
            say(problem)
        if spent.failure is not None:
            raise spent.failure
        if points.worthless:
            say(points.worthless)
        return spent.over


@dataclasses.dataclass(frozen=True)
class Room:
    """A function that returns the number of trials that may run now."""

    pool: WorkerPoolHandle
    least: int
    """Least number of workers that a trial needs."""
    concurrent: int
    """Fixed number of trials that may run; 0: as many as the cluster has room for."""

    def __call__(self) -> int:
        return self.concurrent or max(1, ray.get(self.pool.places.remote()) // self.least)


def _filesystem(folder: SweepFolder) -> pyarrow.fs.FileSystem | None:
    """Return the file system through which Tune reaches the sweep's folder; None for a local folder."""
    root = folder.root
    return None if root.is_local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(root.fs))


def _members(sweep: Sweep, points: Sequence[Point]) -> dict[str, object]:
    """Return the trials of a population as a grid search of Tune's, so that all trials exist from the start."""
    members: list[TrialSpec] = [
        {"number": number, "point": point, "shares": shares(sweep, point)} for number, point in enumerate(points)
    ]
    return {"trial": tune.grid_search(members)}


def _name(trial: TuneTrial) -> str:
    return str(trial.custom_trial_name or name_of(trial.config["trial"]["number"]))
