"""A trial's process: it trains in a thread while Tune waits for its rungs.

A trial's state is its run's folder, not a checkpoint of Tune's. A trial that was paused, lost or resumed continues from there:
it reads its earlier results from its journal and reports them again, so that a restarted scheduler gets the same ones. A
trial of a population that takes over another's state continues in a new run, its next generation.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ray import tune

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import committed, name_of
from springtide.config import Config
from springtide.elastic import Interrupt
from springtide.elastic.scaling import speeds
from springtide.errors import RunExists, SpringtideError
from springtide.events import Evaluated, Event, StepDone, Stopped
from springtide.on_ray.train.worker_lender import WorkerLender
from springtide.on_ray.tune.worker_pool import WorkerPoolClient
from springtide.store import Folder
from springtide.track.journal import read_journal
from springtide.track.ledger import Prices, costs, ledger
from springtide.track.mlflow_sink import RUN_FILE
from springtide.tuning import Generation, Point, Sweep, lineage_of, member_config, number_of, trial_config, turned

_ASK_AGAIN_S = 0.5
_LOOK_S = 0.5
_FREE_S = 60.0
_SAVED_S = 300.0
"""How long a trial may take to save its state [s]."""


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """What all trials have in common."""

    base: dict[str, Any]
    """Their config without the point, as plain data."""
    sweep: Sweep
    folder: str
    """URL of the sweep's folder."""
    pool: Any
    train: Callable[..., Any]
    """``springtide.app.train.train``."""
    report: Callable[[Folder], None]
    """Function that writes the page of the run in a folder."""
    decided: frozenset[int]
    """Numbers of trials that an earlier start of the sweep has ended: they must not continue."""
    population: bool = False
    """Whether trials take over each other's state."""
    told: int = 0
    """The step up to which an earlier start of a population has the results of all its trials."""
    lease: int = 0
    """The term of the driver's lease on the sweep."""


class Trial(tune.Trainable):
    """A trial as Tune's Trainable: a step of Tune's is from one evaluation to the next."""

    def setup(self, config: dict[str, Any], job: TrialJob) -> None:
        """Prepare the trial; Tune calls this in the trial's process."""
        self._job = job
        self._base, self._sweep_folder = configs.build(job.base), Folder(job.folder)
        self._share = WorkerPoolClient(job.pool)
        self._workers = WorkerLender(self._share)
        self._reports: threading.Thread | None = None
        self._take_on(config)

    def _take_on(self, config: dict[str, Any]) -> None:
        self._number = number_of(str(self.trial_name))  # the config may be another trial's, with its state
        self._point: Point = config["trial"]["point"]
        self._of: str = config["trial"].get("of", "")
        self._lineage: list[Generation] = []
        self._reported, self._last = self._job.told, dict[str, Any]()
        self._steps: dict[int, StepDone] = {}
        self._thread: threading.Thread | None = None

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation; return its metrics, with ``done`` if it is the last.

        Tune sets ``done``, too, for a trial that it stops; ``over`` is only ours. The last result is returned after the run
        has ended: Tune stops the trial on it, and a worker lost just before would leave steps to train again. ``held``
        marks a trial with a sweep or a run that another driver holds: nothing may be recorded for it."""
        if not self._lineage:
            try:
                self._begin()
            except RunExists as error:
                return self._held(error)
        last: Evaluated | None = None
        while True:
            try:
                told = self._told.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self._share.closed():
                    continue
                told = None
            if isinstance(told, Evaluated):
                if told.step >= self._config.num_steps:
                    last = told
                elif told.step > self._reported:
                    return self._result(told)
            elif told is None:
                return {**(self._result(last) if last else self._last), "done": True, "over": True}
            elif isinstance(told, RunExists):
                return self._held(told)
            elif isinstance(told, SpringtideError):  # it would fail again: the trial ends, and reports why
                worst = self._job.sweep.worst
                return {**self._last, self._job.sweep.metric: worst, "failed": str(told)[:500], "done": True}
            else:
                raise told

    def _held(self, error: RunExists) -> dict[str, Any]:
        return {**self._last, self._job.sweep.metric: self._job.sweep.worst, "held": str(error)[:500], "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Stop the run with everything saved; Tune calls this to pause the trial. Returns the last reported step."""
        self._stop()
        self._lineage = []
        return {"reported": self._reported}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Continue after the last reported step."""
        self._reported = (checkpoint or {}).get("reported", self._job.told)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial, in the same process."""
        self._stop()
        self._take_on(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the run and end its workers; Tune calls this before it ends this process."""
        self._stop()
        self._workers.end()
        if self._reports is not None:
            self._reports.join(_SAVED_S)

    def _stop(self) -> None:
        """Stop the run, with everything saved."""
        deadline = time.monotonic() + _SAVED_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._workers.ask(Interrupt.STOP)  # repeated: the run may not listen yet
            self._thread.join(_ASK_AGAIN_S)

    def _begin(self) -> None:
        self._told: queue.Queue[Evaluated | BaseException | None] = queue.Queue()
        if self._job.lease:
            leases.check(self._sweep_folder, self._job.lease)
        self._config = self._generation()
        self._folder = Folder(self._config.run.root) / self._config.run.id
        self._reported = max(self._reported, branch.first_step(self._config.train))
        events = read_journal(self._folder) if self._folder.exists(configs.RUN_CONFIG) else []
        if self._job.population:  # another may take over a member's state: where it was not saved, evaluate again
            saved = max(committed(self._folder), default="")
            events = [one for one in events if not (isinstance(one, Evaluated) and name_of(one.step) > saved)]
        for event in events:
            self._hear(event)
        ended = [event for event in events if isinstance(event, Stopped)]
        if self._number in self._job.decided or (ended and ended[-1].status == "finished"):
            self._told.put(None)
            return
        self._thread = threading.Thread(target=self._train, name="springtide-trial", daemon=True)
        self._thread.start()

    def _generation(self) -> Config:
        """Return the config of the trial's current run: its last one, or a new one that continues from another trial's."""
        budget, number = self._job.sweep.budget, self._number
        self._lineage = lineage_of(self._sweep_folder, number, self._point)
        if not self._job.population:
            return trial_config(self._base, budget, self._lineage[-1].run, self._point)
        trials = Folder(self._base.run.root)
        if self._of not in ("", self._lineage[-1].of):
            run, name = branch.split(self._of)
            if name in committed(run):
                before = trials / self._lineage[-1].run
                self._lineage = turned(self._sweep_folder, number, self._lineage, self._point, self._of)
                if before.exists(RUN_FILE):  # one MLflow run per trial, over all generations
                    (trials / self._lineage[-1].run).write_json(RUN_FILE, before.read_json(RUN_FILE))
        now = self._lineage[-1]
        return member_config(self._base, budget, now.run, now.point, now.of)

    def _train(self) -> None:
        config = self._config
        try:
            self._workers.claim(config)
            self._train_when_free(config)
            self._told.put(None)
        except BaseException as error:  # raised or reported in Tune's thread
            self._told.put(error)
        finally:
            self._workers.free()
            if self._folder.exists(configs.RUN_CONFIG):  # the next trial does not wait for this one's page
                self._reports = threading.Thread(target=self._job.report, args=(self._folder,), daemon=True)
                self._reports.start()

    def _train_when_free(self, config: Config) -> None:
        """Train; retry while the processes of a killed driver still hold the run."""
        train, workers = self._job.train, self._workers
        deadline = time.monotonic() + _FREE_S
        while True:
            resume = self._folder.exists(configs.RUN_CONFIG)
            try:
                train(config, resume=resume, listen=self._hear, dashboard=False, workers=workers)
                return
            except RunExists:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ASK_AGAIN_S)

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._steps[event.step] = event
        elif isinstance(event, Evaluated) and event.step:
            self._told.put(event)

    def _result(self, found: Evaluated) -> dict[str, Any]:
        prices = Prices(self._config.track.price, self._config.track.spot_price)
        root = Folder(self._config.run.root)
        books = [ledger(read_journal(root / one.run), prices) for one in self._lineage]
        self._reported = found.step
        self._last = {
            "heldout_loss": found.heldout_loss,
            "heldout_bits_per_byte": found.heldout_bits_per_byte,
            "loss": self._steps[found.step].loss if found.step in self._steps else found.heldout_loss,
            **costs(self._steps.values()),
            "step": found.step,
            "rung": found.step // self._config.train.eval_every,
            "tokens": self._config.tokens_after(found.step),
            "worker_s": sum(book.held for book in books),
            "dollars": sum(sum(book.dollars.values()) for book in books),
            "of": self._lineage[-1].of,
            "state": f"{self._folder.url}/checkpoints/{name_of(found.step)}",
        }
        promise = self._job.sweep.promise(self._last[self._job.sweep.metric])
        self._share.set_priority(promise, speeds((one.world_size, one.tokens_per_s) for one in self._steps.values()))
        return {**self._last, "done": False, "over": False}
