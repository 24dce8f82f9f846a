"""Sends events to MLflow, from a thread of the driver. The only file that imports ``mlflow``.

A server that is down delays nothing: events wait here and are retried. Events unsent when the driver ends are in the
journal, and the next start sends them. One tag, written in the same request as the metrics, records the last step sent;
nothing at or before it is sent again, so steps never go backwards. While a server is down for hours, only the newest events
are kept here; the others are read from the journal when it is back.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, TypeAdapter

from springtide.errors import SpringtideError, redacted
from springtide.events import Evaluated, Event, Rejected, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS
from springtide.store import Folder

RUN_FILE = "mlflow.json"
OFF = "off"
_STEP_MARK, _EVAL_MARK = "springtide.step_sent", "springtide.eval_sent"
_RUN = "springtide.run"
_PARENT = "mlflow.parentRunId"
_FOLDER_MARK = "springtide.folder_digest"
_TAG_LENGTH = 2000
_PARAM_LENGTH = 500
_MOST_UNSENT = 20_000
"""Events that wait here at most, about 20 MB."""
_MOST_EXTRA = 130
_BATCH_METRICS = 900  # MLflow accepts 1000 per request
_NOT_A_METRIC = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow refuses in the name of a metric."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_log = logging.getLogger(__name__)


class _RunNote(BaseModel):
    run_id: Annotated[str, Field(min_length=1, max_length=200)]
    experiment_id: str
    folder: str = ""
    """As ``_mark_of`` the folder that it was written for: a folder may be moved, or copied."""


_NOTE = TypeAdapter(_RunNote)
Settings = Mapping[str, Any]
"""Dotted name -> value of every setting, without passwords: others can read the server."""


def _params(settings: Settings) -> dict[str, str]:
    return {name: str(value)[:_PARAM_LENGTH] for name, value in settings.items()}


def _mark_of(folder: Folder) -> str:
    """Return a digest by which a run is found: MLflow's filters cannot escape a quote in a path."""
    return hashlib.sha256(folder.url.encode()).hexdigest()[:32]


def read_run_note(folder: Folder) -> str:
    """Return the id of the MLflow run that ``folder`` has noted; empty if it has none. Raises DamagedFile."""
    return folder.read_as(RUN_FILE, _NOTE).run_id if folder.exists(RUN_FILE) else ""


def write_run_note(folder: Folder, run_id: str, experiment_id: str) -> None:
    """Note in ``folder`` the MLflow run that it reports to."""
    folder.write_json(RUN_FILE, {"run_id": run_id, "experiment_id": experiment_id, "folder": _mark_of(folder)})


def pass_run_on(before: Folder, folder: Folder) -> None:
    """Have ``folder`` report to the MLflow run of ``before``, if that has one."""
    if before.exists(RUN_FILE):
        note = before.read_as(RUN_FILE, _NOTE)
        write_run_note(folder, note.run_id, note.experiment_id)


def default_uri(root: Folder) -> str:
    """Return the URI of a sqlite file next to the runs, or in the working directory if the runs are in an object store."""
    return f"sqlite:///{root.where('mlflow.db')}" if root.is_local else "sqlite:///mlflow.db"


class MlflowSink:
    """A listener that sends. Use it as a context manager: on exit it waits up to ``grace_s`` for unsent events."""

    def __init__(
        self,
        settings: Settings,
        run: Folder,
        uri: str,
        earlier: Callable[[], Iterable[Event]],
        tags: dict[str, str],
        grace_s: float = 15.0,
    ) -> None:
        """``earlier`` reads the run's journal: MLflow may lack events of earlier starts. ``tags`` link data, code and
        checkpoints."""
        self._settings, self._folder, self._uri, self._tags, self._grace_s = settings, run, uri, tags, grace_s
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._earlier, self._lacks_earlier = earlier, True
        self._marks = {_STEP_MARK: 0, _EVAL_MARK: -1}
        self._client: Any = None
        self._run_id = ""
        self._leaving = threading.Event()
        self._warned = False
        self._delivered = False
        self._last: Event | None = None
        """The last event that was sent."""
        self._thread = threading.Thread(target=self._work, name="springtide-mlflow", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._inbox.put(None)
        self._leaving.set()
        self._thread.join(self._grace_s)
        if not self._delivered:  # the thread may still be retrying, or have given up
            _log.warning(
                "MLflow at %s did not receive everything; the next --resume sends the rest", redacted(self._uri)
            )

    def __call__(self, event: Event) -> None:
        """Queue one event; returns at once."""
        self._inbox.put(event)

    def _work(self) -> None:
        unsent = self._try([], until_sent=False)
        while True:
            event = self._inbox.get()
            ended = event is None
            while event is not None:
                unsent.append(event)
                try:
                    event = self._inbox.get_nowait()
                    ended = event is None
                except queue.Empty:
                    break
            if len(unsent) > _MOST_UNSENT:
                unsent, self._lacks_earlier = unsent[-_MOST_UNSENT // 2 :], True
            unsent = self._try(unsent, until_sent=ended)
            if ended:
                self._delivered = not unsent
                return

    def _try(self, events: list[Event], until_sent: bool) -> list[Event]:
        deadline = time.monotonic() + self._grace_s
        while True:
            try:
                self._connect()
                if self._lacks_earlier:
                    self._last = self._send(self._earlier())
                    self._lacks_earlier = False
                self._last = self._send(events) or self._last
                if isinstance(self._last, Stopped) and (events or until_sent):
                    self._client.set_terminated(self._run_id, _STATUS[self._last.status])
                return []
            except Exception as error:  # no error of a server or its client may stop training
                if not self._warned:
                    problem = redacted(f"MLflow at {self._uri} cannot be reached ({error})")
                    _log.warning("%s; training continues, metrics are kept", problem)
                    self._warned = True
            self._leaving.wait(float(self._settings["track.retry"]))
            if not until_sent or time.monotonic() > deadline:
                return events

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient  # the import takes seconds; training does not wait for it

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table it creates
        client = MlflowClient(tracking_uri=self._uri)
        self._run_id = self._noted(client) or self._create(client)
        found = client.get_run(self._run_id).data
        self._marks = {mark: int(found.tags.get(mark, start)) for mark, start in self._marks.items()}
        for name, value in self._now(found.params).items():
            if found.tags.get(name) != value:
                client.set_tag(self._run_id, name, value)
        client.update_run(self._run_id, status="RUNNING")
        self._client = client

    def _noted(self, client: Any) -> str:
        """Return the id of the run that the folder reports to; empty if it has none, or is a copy of a folder that reports to
        it."""
        if not self._folder.exists(RUN_FILE):
            return ""
        note = self._folder.read_as(RUN_FILE, _NOTE)
        if note.folder not in ("", _mark_of(self._folder)):
            first = client.get_run(note.run_id).data.tags.get(_RUN, "")
            with contextlib.suppress(SpringtideError, OSError):  # it was moved, or is out of reach
                if read_run_note(Folder(first)) == note.run_id:
                    _log.warning("%s is a copy of %s: it gets an MLflow run of its own", self._folder.url, first)
                    return ""
            write_run_note(self._folder, note.run_id, note.experiment_id)
        return note.run_id

    def _now(self, params: dict[str, str]) -> dict[str, str]:
        """Return the tags as they should be: the links, and the settings that changed since MLflow got its params."""
        settings = _params(self._settings)
        changed = {f"springtide.now.{key}": value for key, value in settings.items() if params.get(key, value) != value}
        now = {**self._tags, _RUN: self._folder.url, **changed}
        return {name: redacted(value)[:_TAG_LENGTH] for name, value in now.items()}

    def _create(self, client: Any) -> str:
        experiment_id = _experiment(client, self._settings, self._uri)
        # a start that died after creating the run, before writing down its id, left a run with our tag
        mark = _mark_of(self._folder)
        same = client.search_runs([experiment_id], f"tags.`{_FOLDER_MARK}` = '{mark}'", max_results=1)
        if same:
            run_id = same[0].info.run_id
        else:
            tags = {**self._now({}), _FOLDER_MARK: mark}
            if parent := self._settings["track.parent"]:
                tags[_PARENT] = parent
            run_id = client.create_run(experiment_id, tags=tags, run_name=self._settings["run.id"]).info.run_id
            for key, value in _params(self._settings).items():
                client.log_param(run_id, key, value)
        write_run_note(self._folder, run_id, experiment_id)
        return str(run_id)

    def _send(self, events: Iterable[Event]) -> Event | None:
        """Send what the server does not have yet; return the last event."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        marks, event = dict(self._marks), None
        for event in events:
            if isinstance(event, Rejected):
                self._client.set_tag(
                    self._run_id, f"springtide.rejected.{event.name}", redacted(event.reason)[:_TAG_LENGTH]
                )
            if isinstance(event, StepDone) and event.step > marks[_STEP_MARK]:
                mark, names = _STEP_MARK, STEP_METRICS
            elif isinstance(event, Evaluated) and event.step > marks[_EVAL_MARK]:
                mark, names = _EVAL_MARK, EVAL_METRICS
            else:
                continue
            marks[mark] = event.step
            at_ms = int(event.time_s * 1000)
            figures = {name: getattr(event, name) for name in names if getattr(event, name) is not None}
            metrics += [Metric(name, float(figure), at_ms, event.step) for name, figure in figures.items()]
            if isinstance(event, StepDone):
                metrics += [Metric(name, figure, at_ms, event.step) for name, figure in event.extra.items()]
            if isinstance(event, Evaluated) and len(event.corpora) > 1:
                each = event.corpora.items()
                metrics += [Metric(f"heldout_bits_per_byte/{name}", bits, at_ms, event.step) for name, bits in each]
                each = event.losses.items()
                metrics += [Metric(f"heldout_loss/{name}", loss, at_ms, event.step) for name, loss in each]
            if isinstance(event, Evaluated):
                each = event.forgetting.items()
                metrics += [Metric(f"forgetting/{name}", worse, at_ms, event.step) for name, worse in each]
            if len(metrics) + len(STEP_METRICS) + _MOST_EXTRA > _BATCH_METRICS:
                self._log(metrics, marks, RunTag)
                metrics = []
        if metrics:
            self._log(metrics, marks, RunTag)
        return event

    def _log(self, metrics: list[Any], marks: dict[str, int], tag: Any) -> None:
        self._client.log_batch(self._run_id, metrics, tags=[tag(name, str(mark)) for name, mark in marks.items()])
        self._marks = dict(marks)


def send_scores(folder: Folder, uri: str, scores: Mapping[str, float], step: int, time_s: float) -> str:
    """Send scores of a checkpoint to the MLflow run that the run of ``folder`` reports to.

    Args:
        scores: by their names.
        step: of the checkpoint.
        time_s: seconds since 1970.

    Returns:
        Why they were not sent; empty if they were, or if MLflow is off.
    """
    if uri == OFF:
        return ""
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        if not (run_id := read_run_note(folder)):
            return f"{folder.url} reports to no MLflow run: the scores are not in MLflow"
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        metrics = [Metric(_NOT_A_METRIC.sub("_", name), one, int(time_s * 1000), step) for name, one in scores.items()]
        client = MlflowClient(tracking_uri=uri)
        for begin in range(0, len(metrics), _BATCH_METRICS):
            client.log_batch(run_id, metrics[begin : begin + _BATCH_METRICS])
    except Exception as error:  # no error of a server or its client may lose the scores, which are in the run's folder
        return redacted(f"MLflow at {uri} did not receive the scores ({error})")
    return ""


class SweepSink:
    """The one MLflow run of a sweep, the parent of its trials' runs. If the server is down there is none, and the sweep
    continues."""

    def __init__(self, settings: Settings, folder: Folder, uri: str) -> None:
        """Find or create the run; ``id`` is empty if that failed."""
        self.id, self._client = "", None
        try:
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri=uri)
            self.id = read_run_note(folder)
            if not self.id:
                tags = {"springtide.tuning": redacted(folder.url)}
                experiment_id = _experiment(client, settings, uri)
                self.id = str(client.create_run(experiment_id, tags=tags, run_name=folder.name).info.run_id)
                write_run_note(folder, self.id, experiment_id)
            client.update_run(self.id, status="RUNNING")
            self._client = client
        except Exception as error:  # no error of a server or its client may stop the sweep
            _log.warning("%s; the sweep continues without it", redacted(f"MLflow at {uri} cannot be reached ({error})"))

    def end(self, best: dict[str, Any], figures: dict[str, float]) -> None:
        """Record the best trial's point and the sweep's figures."""
        if self._client is None:
            return
        try:
            for name, value in best.items():
                self._client.set_tag(self.id, f"springtide.best.{name}", redacted(str(value))[:_TAG_LENGTH])
            for name, figure in figures.items():
                self._client.log_metric(self.id, name, figure)
            self._client.set_terminated(self.id, "FINISHED")
        except Exception as error:
            _log.warning("MLflow did not receive the end of the sweep: %s", redacted(str(error)))


def _experiment(client: Any, settings: Settings, uri: str) -> str:
    """Return the id of the experiment that the settings name; create it if there is none."""
    name, root = settings["track.experiment"], Folder(settings["run.root"])
    if experiment := client.get_experiment_by_name(name):
        return str(experiment.experiment_id)
    artifacts = root.where("mlartifacts") if uri.startswith("sqlite") and root.is_local else None
    return str(client.create_experiment(name, artifacts))
