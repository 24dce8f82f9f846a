"""Train a trial's run in a thread, which reports its progress by a queue of messages:

any number of Evaluated, then Finished or Failed

The first messages are the evaluations of an earlier start of the sweep, read from the journal.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable

from springtide import config as configs
from springtide.checkpoint.format import committed, name_of
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import RunExists
from springtide.events import Evaluated, Event, StepDone, Stopped
from springtide.ray.train.worker_lender import WorkerLender
from springtide.ray.tune.messages import TrainFunction
from springtide.storage import Folder
from springtide.tracking.journal import read_journal

_ASK_AGAIN_S = 0.5
_LOOK_S = 0.5
_FREE_S = 60.0
SAVED_S = 300.0
"""How long a trial may take to save its state [s]."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """The run was trained to its end, was stopped after its state was saved, or must not continue."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The run ended with an error."""

    error: BaseException


Message = Evaluated | Finished | Failed


class ReportWriter:
    """Writes the HTML reports of ended runs in a thread, so that the next trial does not wait for them."""

    def __init__(self, report: Callable[[Folder], None]) -> None:
        """``report``: function that writes the HTML report of the run in a folder."""
        self._report = report
        self._thread: threading.Thread | None = None

    def write(self, run: Folder) -> None:
        """Start to write the HTML report of ``run``."""
        self._thread = threading.Thread(target=self._report, args=(run,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the last report."""
        if self._thread is not None:
            self._thread.join(SAVED_S)


class TrialRunner:
    """Trains one run of a trial."""

    def __init__(self, config: Config, train: TrainFunction, workers: WorkerLender, reports: ReportWriter) -> None:
        """``workers``: the workers of this process, which train one run after another."""
        self.config, self.folder = config, Folder(config.run.root) / config.run.id
        self._train, self._workers, self._reports = train, workers, reports
        self._messages: queue.Queue[Message] = queue.Queue()
        self._steps: dict[int, StepDone] = {}
        self.judged_step = 0
        """Evaluations up to this step were used by an earlier start of the sweep to decide whether the trial continues."""
        self._thread: threading.Thread | None = None

    @property
    def steps(self) -> list[StepDone]:
        """The trained steps; a step that was trained again after a restart is listed once."""
        return list(self._steps.values())

    def start(self, *, decided: bool, saved_only: bool) -> None:
        """Put the evaluations of an earlier start of the sweep into the queue again, then train the remaining steps in a
        thread.

        Args:
            decided: whether the sweep has recorded that the trial must not continue.
            saved_only: drop evaluations of steps after the newest checkpoint; these steps are trained and evaluated again. For
                a population, whose members take over each other's saved states.
        """
        events = read_journal(self.folder) if self.folder.exists(configs.RUN_CONFIG) else []
        if saved_only:
            saved = max(committed(self.folder), default="")
            events = [one for one in events if not (isinstance(one, Evaluated) and name_of(one.step) > saved)]
        for event in events:
            self._hear(event)
        ended = [event for event in events if isinstance(event, Stopped)]
        is_over = decided or bool(ended and ended[-1].status == "finished")
        known = sorted({event.step for event in events if isinstance(event, Evaluated)})
        # the newest evaluation may not have been used for a decision: the driver may have ended before it received it
        self.judged_step = max(known if is_over else known[:-1], default=0)
        if is_over or self._closed():
            self._messages.put(Finished())
            return
        self._thread = threading.Thread(target=self._run, name="springtide-trial", daemon=True)
        self._thread.start()

    def next(self) -> Message:
        """Wait for the next message. If the worker pool is closed, save and stop the run, and return Finished."""
        while True:
            try:
                return self._messages.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._closed():
                    self.stop()
                    return Finished()

    def stop(self) -> None:
        """Stop the run after its state is saved."""
        deadline = time.monotonic() + SAVED_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._workers.ask(GroupRequest.STOP)  # repeat: a run that is starting may receive no requests yet
            self._thread.join(_ASK_AGAIN_S)

    def _closed(self) -> bool:
        return self._workers.share is not None and self._workers.share.closed()

    def _run(self) -> None:
        try:
            self._workers.claim(self.config)
            self._train_when_free()
            self._messages.put(Finished())
        except BaseException as error:  # the error is raised or reported in Tune's thread
            self._messages.put(Failed(error))
        finally:
            self._workers.free()
            if self.folder.exists(configs.RUN_CONFIG):
                self._reports.write(self.folder)

    def _train_when_free(self) -> None:
        """Train the run; retry while the processes of a killed driver still hold its lease."""
        deadline = time.monotonic() + _FREE_S
        while True:
            resume = self.folder.exists(configs.RUN_CONFIG)
            try:
                self._train(self.config, resume=resume, listen=self._hear, dashboard=False, workers=self._workers)
                return
            except RunExists:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ASK_AGAIN_S)

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._steps[event.step] = event
        elif isinstance(event, Evaluated) and event.step:
            self._messages.put(event)
