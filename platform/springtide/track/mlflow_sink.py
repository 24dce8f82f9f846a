"""Sends events to MLflow, from a thread of the driver.

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
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, TypeAdapter

from springtide.errors import SpringtideError, redacted
from springtide.events import Evaluated, Event, Rejected, Saved, Started, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS
from springtide.store import Folder
from springtide.track.mlflow_run import (
    NOTE,
    SYSTEM_NODE,
    NodeMetrics,
    Settings,
    TrackedDataset,
    description,
    experiment_of,
    log_datasets,
    metric_name,
    tag_text,
    valid_name,
)

RUN_FILE = "mlflow.json"
OFF = "off"
_STEP_MARK, _EVAL_MARK = "springtide.step_sent", "springtide.eval_sent"
_RUN = "springtide.run"
_PARENT = "mlflow.parentRunId"
_FOLDER_MARK = "springtide.folder_digest"
_NAMES, _GROUPED = "springtide.metric_names", "grouped"
"""Tag of a run whose metrics have the names of ``events.metrics``; an earlier run keeps the names that it began with."""
_CHECKPOINT = "springtide.newest_checkpoint"
_PARAM_LENGTH = 500
_PARAMS_PER_REQUEST = 100
_MOST_UNSENT = 20_000
"""Events that wait here at most, about 20 MB."""
_MOST_EXTRA = 130
_MOST_TAGS = 80  # MLflow accepts 100 per request
PER_REQUEST = 900
"""Metrics per request; MLflow accepts 1000."""
_MOST_SAID = 500
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_log = logging.getLogger(__name__)


class _RunNote(BaseModel):
    run_id: Annotated[str, Field(min_length=1, max_length=200)]
    experiment_id: str
    folder: str = ""
    """As ``_mark_of`` the folder that it was written for: a folder may be moved, or copied."""


_NOTE = TypeAdapter(_RunNote)


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
        datasets: Sequence[TrackedDataset] = (),
    ) -> None:
        """``earlier`` reads the run's journal: MLflow may lack events of earlier starts. ``tags`` link data, code and
        checkpoints; ``datasets`` are listed as the run's inputs."""
        self._settings, self._folder, self._uri, self._tags, self._grace_s = settings, run, uri, tags, grace_s
        self._datasets = datasets
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._earlier, self._lacks_earlier = earlier, True
        self._marks = {_STEP_MARK: 0, _EVAL_MARK: -1}
        self._client: Any = None
        self._run_id = ""
        self._known: dict[str, str] = {}
        """Tags that the server has."""
        self._names: Callable[[str], str] = valid_name
        """From the name of a figure to that in MLflow."""
        self._node: NodeMetrics | None = None
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
                with contextlib.suppress(Exception):  # a measurement of the node is not sent again
                    self._send_node_metrics()
                return []
            except Exception as error:  # no error of a server or its client may stop training
                self._warn("cannot be reached", error, "training continues, metrics are kept")
            pause_s = float(self._settings["track.retry"])
            if self._leaving.wait(pause_s) and until_sent:  # at the end soon again, but not at once
                time.sleep(max(0.0, min(pause_s, 1.0, deadline - time.monotonic())))
            if not until_sent or time.monotonic() > deadline:
                return events

    def _warn(self, what: str, error: Exception, then: str) -> None:
        """Log the first problem with the server; the same one comes back every few seconds."""
        if self._warned:
            return
        self._warned = True
        said = " ".join(str(error).split())
        if any(code in said for code in ("error code 401", "error code 403")):
            then = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; {then}"
        _log.warning("%s; %s", redacted(f"MLflow at {self._uri} {what} ({said})"[:_MOST_SAID]), then)

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient  # the import takes seconds; training does not wait for it

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table it creates
        logging.getLogger("mlflow.store").setLevel(
            logging.CRITICAL
        )  # and a traceback at every try, of what is said here once
        client = MlflowClient(tracking_uri=self._uri)
        self._run_id = self._noted(client) or self._create(client)
        found = client.get_run(self._run_id).data
        self._marks = {mark: int(found.tags.get(mark, start)) for mark, start in self._marks.items()}
        self._known = dict(found.tags)
        self._names = metric_name if found.tags.get(_NAMES) == _GROUPED else valid_name
        self._log_settings(client, found.params)
        log_datasets(client, self._run_id, self._datasets)
        client.update_run(self._run_id, status="RUNNING")
        self._node = self._node or NodeMetrics()
        self._client = client

    def _log_settings(self, client: Any, known: dict[str, str]) -> None:
        """Send the settings that the run lacks, as a run does that was just created, and the tags that differ."""
        from mlflow.entities import Param, RunTag

        params = [Param(name, value) for name, value in _params(self._settings).items() if name not in known]
        now = self._now(known)
        tags = [RunTag(name, value) for name, value in now.items() if self._known.get(name) != value]
        for begin in range(0, max(len(params), len(tags)), _PARAMS_PER_REQUEST):
            part = slice(begin, begin + _PARAMS_PER_REQUEST)
            client.log_batch(self._run_id, params=params[part], tags=tags[part])
        self._known |= now

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
        names = {key: f"springtide.now.{key}" for key in settings}
        changed = {
            names[key]: value
            for key, value in settings.items()
            if params.get(key, value) != value or names[key] in self._known
        }
        now = {**self._tags, _RUN: self._folder.url, **changed}
        return {valid_name(name): tag_text(value) for name, value in now.items()}

    def _create(self, client: Any) -> str:
        experiment_id = experiment_of(client, self._settings, self._uri)
        # a start that died after creating the run, before writing down its id, left a run with our tag
        mark = _mark_of(self._folder)
        same = client.search_runs([experiment_id], f"tags.`{_FOLDER_MARK}` = '{mark}'", max_results=1)
        if same:
            run_id = same[0].info.run_id
        else:
            tags = {**self._now({}), _FOLDER_MARK: mark, _NAMES: _GROUPED}
            if parent := self._settings["track.parent"]:
                tags[_PARENT] = parent
            run_id = client.create_run(experiment_id, tags=tags, run_name=self._settings["run.id"]).info.run_id
        write_run_note(self._folder, run_id, experiment_id)
        return str(run_id)

    def _send(self, events: Iterable[Event]) -> Event | None:
        """Send what the server does not have yet; return the last event."""
        from mlflow.entities import Metric

        metrics: list[Any] = []
        marks, tags, event, of = dict(self._marks), dict[str, str](), None, self._names
        names: Iterable[str]
        for event in events:
            if isinstance(event, StepDone) and event.step > marks[_STEP_MARK]:
                mark, names = _STEP_MARK, STEP_METRICS
            elif isinstance(event, Evaluated) and event.step > marks[_EVAL_MARK]:
                mark, names = _EVAL_MARK, EVAL_METRICS
            else:
                self._note(event, tags)
                continue
            marks[mark] = event.step
            at_ms = int(event.time_s * 1000)
            figures = {name: getattr(event, name) for name in names if getattr(event, name) is not None}
            figures |= _figures_by_name(event)
            metrics += [Metric(of(name), float(figure), at_ms, event.step) for name, figure in figures.items()]
            if len(metrics) + len(STEP_METRICS) + _MOST_EXTRA > PER_REQUEST:
                self._log(metrics, marks, tags)
                metrics, tags = [], {}
        if metrics or tags:
            self._log(metrics, marks, tags)
        return event

    def _note(self, event: Event, tags: dict[str, str]) -> None:
        """Put what an event says of the whole run into ``tags``: what trains, where its newest checkpoint is."""
        if isinstance(event, Rejected):
            tags[valid_name(f"springtide.rejected.{event.name}")] = tag_text(event.reason)
            if tags.get(_CHECKPOINT, self._known.get(_CHECKPOINT, "")).endswith(f"/{event.name}"):
                tags[_CHECKPOINT] = "none: the newest was rejected"
        elif isinstance(event, Saved):
            tags[_CHECKPOINT] = tag_text((self._folder / "checkpoints" / event.name).url)
        elif isinstance(event, Started) and NOTE not in self._known:  # a text of the user's own stays
            tags.setdefault(NOTE, description(self._settings, self._folder, event))

    def _log(self, metrics: list[Any], marks: dict[str, int], tags: dict[str, str]) -> None:
        """Send one request. A batch that the server refuses for what it holds is skipped: waiting does not mend it."""
        from mlflow import MlflowException
        from mlflow.entities import RunTag

        new = {name: value for name, value in tags.items() if self._known.get(name) != value}
        new = dict(list(new.items())[-_MOST_TAGS:]) | {name: str(mark) for name, mark in marks.items()}
        sent = [RunTag(name, value) for name, value in new.items()]
        try:
            self._client.log_batch(self._run_id, metrics, tags=sent)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            self._client.log_batch(self._run_id, tags=sent[-len(marks) :])
            steps = f"from step {self._marks[_STEP_MARK] + 1} to {marks[_STEP_MARK]}"
            self._warn(f"refuses metrics {steps}", error, "they are in the journal; later ones are sent")
        self._marks = dict(marks)
        self._known |= new

    def _send_node_metrics(self) -> None:
        """Send the load of this node, at the step that was sent last."""
        from mlflow.entities import Metric, RunTag

        step = self._marks[_STEP_MARK]
        if self._node is None or not (found := self._node.due(step)):
            return
        at_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, at_ms, step) for name, value in found.items()]
        self._client.log_batch(self._run_id, metrics, tags=[RunTag(SYSTEM_NODE, tag_text(self._node.node))])


def _figures_by_name(event: StepDone | Evaluated) -> dict[str, float]:
    """Return the figures that only some runs tell, such as those of each source."""
    if isinstance(event, StepDone):
        return event.extra
    found = {f"forgetting/{name}": worse for name, worse in event.forgetting.items()}
    if len(event.corpora) > 1:
        found |= {f"heldout_bits_per_byte/{name}": bits for name, bits in event.corpora.items()}
        found |= {f"heldout_loss/{name}": loss for name, loss in event.losses.items()}
    return found
