"""Trials under Ray Tune: it says which go on, each is a run of its own. The only file that imports Tune.

A trial's state is its run's folder, not a checkpoint of Tune's: one that is paused, lost or resumed goes on from there, and
what it has told before is read from its journal and told again, so that a scheduler that begins anew hears the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow.fs
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from springtide import config as configs
from springtide.config import Config
from springtide.elastic import Interrupt
from springtide.elastic.book import Claim
from springtide.errors import ConfigError, RunExists, SpringtideError, explain
from springtide.on_ray.trainer import ask
from springtide.store import Folder
from springtide.sweep import Budget, Point, Search, Sweep, name_of, trial_config
from springtide.track.events import Evaluated, Event, StepDone, Stopped
from springtide.track.journal import read_journal
from springtide.track.ledger import Prices, ledger

_ASK_AGAIN_S = 0.5
_LOOK_S = 2.0
_FREE_S = 60.0
_SAVED_S = 300.0
"""How long a trial that is stopped may take to bring its state to safety."""
_FAILURES = 3
"""Of a trial's process, not of its training, before it is given up."""
_DRIVERS = {"CPU": 0, "node:__internal_head__": 0.001}
"""Trials are driven from the head, which stays; their workers are wherever the pool has room."""

Say = Callable[[str], None]
Note = Callable[[int, str, str], None]
"""Writes down that a trial, by number, is not to go on: how it ended, and why."""

SCHEDULERS = ("none", "asha", "hyperband", "median")


@dataclasses.dataclass(frozen=True)
class Job:
    """What all trials have in common."""

    base: dict[str, Any]
    """Their config, but for the point, as plain data."""
    sweep: Sweep
    pool: Any
    train: Callable[..., Any]
    """``springtide.api.train``."""
    decided: frozenset[int]
    """Numbers of trials that are not to go on, as an earlier start of the sweep found."""


class Trial(tune.Trainable):
    """One run, trained in a thread; a step of Tune's is from one evaluation to the next."""

    def setup(self, config: dict[str, Any], job: Job) -> None:
        """Called by Tune in the trial's process."""
        self._job = job
        self._take_on(config)

    def _take_on(self, config: dict[str, Any]) -> None:
        self._number, job = config["number"], self._job
        self._config = trial_config(configs.build(job.base), job.sweep.budget, self._number, config["point"])
        self._folder = Folder(self._config.run.root) / self._config.run.id
        self._told: queue.Queue[Evaluated | BaseException | None] = queue.Queue()
        self._reported, self._losses, self._last = 0, dict[int, float](), dict[str, Any]()
        self._thread: threading.Thread | None = None
        self._begun = False

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation; returns its figures, and ``done`` with the last of them."""
        if not self._begun:
            self._begin()
        while True:
            try:
                told = self._told.get(timeout=_LOOK_S)
            except queue.Empty:
                if ray.get(self._job.pool.closed.remote()):
                    return {**self._last, "done": True}
                continue
            if isinstance(told, Evaluated):
                if told.step > self._reported:
                    return self._result(told)
            elif told is None:
                return {**self._last, "done": True}
            elif isinstance(told, SpringtideError):  # it would fail again: the trial is over, and says why
                worst = self._job.sweep.worst
                return {**self._last, self._job.sweep.metric: worst, "failed": str(told)[:500], "done": True}
            else:
                raise told

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """What Tune keeps of a trial: how far it has told."""
        return {"reported": self._reported}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Go on from there."""
        self._reported = (checkpoint or {}).get("reported", 0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Be another trial, in the same process."""
        self.cleanup()
        self._take_on(new_config)
        return True

    def cleanup(self) -> None:
        """Stop, with everything saved."""
        if self._thread is None or not self._thread.is_alive():
            return
        deadline = time.monotonic() + _SAVED_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            ask(self._config.run.id, Interrupt.STOP)  # again and again: it may not have begun to listen
            self._thread.join(_ASK_AGAIN_S)

    def _begin(self) -> None:
        events = read_journal(self._folder) if self._folder.exists(configs.RUN_CONFIG) else []
        for event in events:
            self._hear(event)
        ended = [event for event in events if isinstance(event, Stopped)]
        self._begun = True
        if self._number in self._job.decided or (ended and ended[-1].status == "finished"):
            self._told.put(None)
            return
        self._thread = threading.Thread(target=self._train, name="springtide-trial", daemon=True)
        self._thread.start()

    def _train(self) -> None:
        job, config = self._job, self._config
        elastic = config.elastic
        claim = Claim(config.run.id, elastic.min_workers, elastic.max_workers, cell=max(1, config.parallel.shards))
        try:
            ray.get(job.pool.claim.remote(claim))
            self._train_when_free(config)
            self._told.put(None)
        except BaseException as error:  # raised again, or told, in Tune's thread
            self._told.put(error)
        finally:
            job.pool.release.remote(config.run.id)

    def _train_when_free(self, config: Config) -> None:
        """Processes of a driver that was killed hold their runs until they are gone too."""
        deadline = time.monotonic() + _FREE_S
        while True:
            resume = self._folder.exists(configs.RUN_CONFIG)
            try:
                self._job.train(config, resume=resume, listen=self._hear, dashboard=False, pool=self._job.pool)
                return
            except RunExists:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ASK_AGAIN_S)

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._losses[event.step] = event.loss
        elif isinstance(event, Evaluated) and event.step:
            self._told.put(event)

    def _result(self, found: Evaluated) -> dict[str, Any]:
        prices = Prices(self._config.track.price, self._config.track.spot_price)
        book = ledger(read_journal(self._folder), prices)
        self._reported = found.step
        self._last = {
            "heldout_loss": found.heldout_loss,
            "heldout_bits_per_byte": found.heldout_bits_per_byte,
            "loss": self._losses.get(found.step, found.heldout_loss),
            "step": found.step,
            "tokens": self._config.tokens_after(found.step),
            "worker_s": book.held,
            "dollars": sum(book.dollars.values()),
        }
        promise = self._job.sweep.promise(self._last[self._job.sweep.metric])
        self._job.pool.promise.remote(self._config.run.id, promise)
        return {**self._last, "done": found.step >= self._config.num_steps}


class Points(Searcher):
    """Ours, as one of Tune's."""

    def __init__(self, search: Search, sweep: Sweep, note: Callable[[int, Point], None]) -> None:
        """``note(number, point)``: writes down a point before it is tried."""
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self._search, self._sweep, self._note = search, sweep, note
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """The next trial's number and point."""
        number = len(self._numbers)
        point = self._search.ask(number)
        if point is None:
            return Searcher.FINISHED
        self._note(number, point)
        self._numbers[trial_id] = number
        return {"number": number, "point": point}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A trial is over."""
        failed = error or not result or "failed" in result
        value = None if failed or result is None else result.get(self._sweep.metric)
        self._search.tell(self._numbers[trial_id], value)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep that is resumed is told again."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, likewise."""


class Watch(tune.Callback):
    """Tells what becomes of trials, and notes which a scheduler has stopped."""

    def __init__(self, sweep: Sweep, trials: int, spent: Spent, say: Say, note: Note) -> None:
        self._sweep, self._trials, self._spent, self._say, self._note = sweep, trials, spent, say, note
        self._over: set[str] = set()
        self._best: tuple[float, str] | None = None

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial was evaluated."""
        name, value = _name(trial), result.get(self._sweep.metric)
        if value is None or "failed" in result:
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
        if "failed" in result:
            self._note(trial.config["number"], "failed", result["failed"])
            self._say(f"{name}: FAILED, {result['failed']}")
        elif not result.get("done") and not self._spent.over:
            self._note(trial.config["number"], "stopped", "")
            self._say(f"{name}: stopped, {self._sweep.metric} {result.get(self._sweep.metric, float('nan')):.4f}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process failed too often."""
        self._over.add(_name(trial))
        self._say(f"{_name(trial)}: its process failed {_FAILURES + 1} times; see {trial.path}")


class Spent(tune.Stopper):
    """Ends the sweep where its budget does."""

    def __init__(self, budget: Budget, pool: Any) -> None:
        self._budget, self._pool = budget, pool
        self._by_trial: dict[str, tuple[float, float, float]] = {}
        self.over = ""
        """Which limit was met; empty while none is."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Hear of a result; no trial is stopped for itself."""
        tokens, worker_s = result.get("tokens", 0.0), result.get("worker_s", 0.0)
        self._by_trial[trial_id] = tokens, worker_s, result.get("dollars", 0.0)
        return False

    def stop_all(self) -> bool:
        """Whether one of the limits is met."""
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
    rungs = sweep.budget.rungs
    if name == "asha":
        return ASHAScheduler(max_t=rungs, grace_period=1, reduction_factor=2, stop_last_trials=False, **asked)
    if name == "hyperband":
        return HyperBandScheduler(max_t=rungs, reduction_factor=2, stop_last_trials=False, **asked)
    if name == "median":
        return MedianStoppingRule(time_attr="training_iteration", grace_period=1, **asked)
    return FIFOScheduler()


def run_trials(
    job: Job,
    points: Points,
    folder: Folder,
    scheduler: TrialScheduler,
    concurrent: int,
    say: Say,
    note: Note,
) -> str:
    """Try the points of ``points``, so many at once, 0 as many as there is room for now, until all are done or the budget is;
    returns which limit of it was met, if one was. ``folder``: where Tune keeps notes of its own."""
    spent = Spent(job.sweep.budget, job.pool)
    least = configs.build(job.base).elastic.min_workers
    concurrent = concurrent or max(1, ray.get(job.pool.places.remote()) // least)
    here = tune.PlacementGroupFactory([_DRIVERS])
    trainable = tune.with_resources(tune.with_parameters(Trial, job=job), here)
    filesystem = None if folder.is_local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(folder.fs))
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=points,
            num_samples=job.sweep.budget.trials,
            scheduler=scheduler,
            max_concurrent_trials=concurrent,
            reuse_actors=True,
            trial_dirname_creator=_name,
            trial_name_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{secrets.token_hex(4)}",
            storage_path=folder.where("ray"),
            storage_filesystem=filesystem,
            failure_config=tune.FailureConfig(max_failures=_FAILURES),
            callbacks=[Watch(job.sweep, job.sweep.budget.trials, spent, say, note)],
            stop=spent,
            verbose=0,
        ),
    )
    with contextlib.suppress(tune.TuneError):
        tuner.fit()
    return spent.over


def _name(trial: Any) -> str:
    return name_of(trial.config["number"])
