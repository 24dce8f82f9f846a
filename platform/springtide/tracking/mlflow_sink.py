"""Sends a run's events to MLflow with ``MlflowClient.log_batch``, from a thread of the driver.

Training never waits: events go into a queue of at most ``_MOST_UNSENT``. A full queue drops its oldest event and counts it. If
the server is down, the thread retries. When the server is back, dropped events are read from the journal. Events that were
unsent when a driver ended are read from the journal when the run is next started. Two tags, written in the same request as the
metrics, record the last step and the last evaluation that were sent. Events up to the recorded steps are not sent again, so no
point is written twice and steps never go backwards.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from springtide.config.inherit import is_named
from springtide.errors import SpringtideError, printable, redacted
from springtide.events import Evaluated, Event, Rejected, Saved, Started, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS, grouped_name
from springtide.storage import Folder
from springtide.storage.errors import is_full
from springtide.tracking.mlflow_client import (
    NAME_LENGTH,
    RUN_FILE,
    RUN_NOTE,
    Settings,
    client_of,
    digest_of_url,
    experiment_of,
    log_batch,
    mark_of,
    metric_name,
    metrics_of,
    read_run_note,
    tag_text,
    valid_name,
    write_run_note,
)

_STEP_MARK, _EVAL_MARK = "springtide.step_sent", "springtide.eval_sent"
_RUN, _FOLDER_MARK = "springtide.run", "springtide.folder_digest"
_NAMES, _PRESENT = "springtide.metric_names", "by group and source"
"""A tag of an MLflow run that records how its metrics are named, and the tag's value in a new MLflow run: names as in
``events.metrics``."""
_NAMING: dict[str, Callable[[str], str]] = {
    _PRESENT: metric_name,
    "grouped": lambda name: valid_name(grouped_name(name)),
}
"""Value of the tag ``_NAMES`` -> function from the name of a figure (such as ``loss``) to the name of its MLflow metric. In an
old MLflow run without the tag, figures keep their names, and ``valid_name`` only replaces characters that MLflow refuses."""
_CHECKPOINT, _NODE = "springtide.newest_checkpoint", "springtide.system_metrics_node"
_NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run, in Markdown."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RETRY_S = 5.0
"""Pause before the next request to an MLflow server after a failed request [s]."""
_MOST_UNSENT = 20_000
"""Most events that wait in the queue for the MLflow server, about 20 MB."""
_AT_ONCE = 1000
"""Most events that the thread takes from the queue for one round of requests."""
_METRICS, _TAGS = 750, 80
"""Events are added to a request until it has more than 750 metrics. At most 80 tags are sent with it, plus the tags that record
the last step sent. Both stay below MLflow's limits of 1000 metrics and 100 tags per request."""
_PARAM_LENGTH, _DIGEST_LENGTH = 500, 36
_FULL = "database or disk is full"
"""Error text of sqlite for a full disk. At the end of a run it is not retried, because waiting frees no space."""
_MARKDOWN = re.compile(r"[\\`|<>\r\n]")

_log = logging.getLogger(__name__)


class TrackedDataset(NamedTuple):
    """A dataset that a run trains on or is evaluated on, with the fields that MLflow lists."""

    name: str
    digest: str
    url: str
    context: str
    """``training`` or ``evaluation``."""
    profile: Mapping[str, int]
    """Sizes of the dataset by name, such as ``tokens`` and ``rows``."""


class MlflowSink:
    """An event listener that sends events to MLflow. Use it in a ``with`` block: on exit it waits up to ``grace_s`` seconds
    until all events are sent."""

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
        """``earlier``: function that returns the events in the run's journal, because MLflow may lack events from before a
        restart. ``tags``: tags of the MLflow run, which link data, code and checkpoints. ``datasets``: listed in MLflow as the
        run's inputs."""
        self._settings, self._folder, self._uri, self._tags, self._grace_s = settings, run, uri, tags, grace_s
        self._earlier, self._datasets = earlier, datasets
        self._queue: collections.deque[Event] = collections.deque(maxlen=_MOST_UNSENT)
        self._changed, self._leaving, self._give_up_s = threading.Condition(), threading.Event(), math.inf
        self._trains = False
        """True after the first step. The thread waits for it, because the import of MLflow uses a CPU core for seconds."""
        self.num_dropped = 0
        """Number of events that the full queue dropped. They are read from the journal later."""
        self._num_recovered = -1
        """``num_dropped`` when events were last read again from the journal; -1 before that. If ``num_dropped`` differs, events
        were dropped since, and the journal must be read again."""
        self._client: Any = None
        self._run_id = ""
        self._marks = {_STEP_MARK: 0, _EVAL_MARK: -1}
        self._known: dict[str, str] = {}
        """Name -> value of the tags that the MLflow run has on the server."""
        self._names: Callable[[str], str] = valid_name
        """Function from the name of a figure (such as ``loss``) to the name of its MLflow metric."""
        self._monitor: Any = None
        """MLflow's monitor of CPU, memory, disk, network and GPUs of the driver's node."""
        self._last: Event | None = None
        """The last event that was sent."""
        self._warned = self._delivered = False
        self._thread = threading.Thread(target=self._work, name="springtide-mlflow", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._give_up_s = time.monotonic() + self._grace_s
            self._leaving.set()
            self._changed.notify()
        self._thread.join(self._grace_s)
        if not self._delivered:  # events are unsent: the thread still retries, or has given up
            _log.warning(
                "MLflow at %s did not receive everything; the next --resume sends the rest", redacted(self._uri)
            )

    def __call__(self, event: Event) -> None:
        """Queue one event; returns at once."""
        with self._changed:
            self._trains = self._trains or isinstance(event, StepDone)
            self.num_dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(event)
            self._changed.notify()

    def _work(self) -> None:
        unsent, is_last = list[Event](), False
        with self._changed:
            self._changed.wait_for(lambda: self._trains or self._leaving.is_set())
        while True:
            try:
                self._connect()
                if (dropped := self.num_dropped) != self._num_recovered:
                    self._send(self._earlier())
                    self._num_recovered = dropped
                self._send(unsent)
                unsent = []
                if is_last:
                    self._end_monitor()
                    if isinstance(self._last, Stopped):
                        self._client.set_terminated(self._run_id, _STATUS[self._last.status])
                    self._delivered = True
                    return
                self._monitor = self._monitor or _monitor(self._run_id, self._uri)
            except Exception as error:  # an error of the MLflow server or client must never stop training
                self._warn("cannot be reached", error, "training continues, metrics are kept")
                self._end_monitor()  # MLflow's monitor stops after a failed request: start a new one later
                if self._leaving.wait(_RETRY_S):
                    time.sleep(max(0.0, min(_RETRY_S, 1.0, self._give_up_s - time.monotonic())))
                is_hopeless = self._leaving.is_set() and (is_full(error) or _FULL in str(error))
                if is_hopeless or time.monotonic() > self._give_up_s:
                    return
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._leaving.is_set())
                unsent = [self._queue.popleft() for _ in range(min(len(self._queue), _AT_ONCE))]
                is_last = self._leaving.is_set() and not self._queue

    def _end_monitor(self) -> None:
        if self._monitor:
            self._monitor.finish()
            self._monitor = None

    def _warn(self, what: str, error: Exception, then: str) -> None:
        """Log a problem with the MLflow server, but only the first one. The same problem returns every few seconds, at each
        retry."""
        if self._warned:
            return
        self._warned = True
        said = " ".join(str(error).split())
        if any(code in said for code in ("error code 401", "error code 403")):
            then = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; {then}"
        _log.warning("%s; %s", redacted(f"MLflow at {self._uri} {what} ({said})"[:500]), then)

    def _connect(self) -> None:
        if self._client is not None:
            return
        client = client_of(self._uri)  # importing MLflow takes seconds: in this thread, so that training does not wait
        self._run_id = self._noted(client) or self._create(client)
        found = client.get_run(self._run_id).data
        self._marks = {mark: int(found.tags.get(mark, start)) for mark, start in self._marks.items()}
        self._known = dict(found.tags)
        self._names = _NAMING.get(found.tags.get(_NAMES), valid_name)
        self._log_settings(client, found.params)
        _log_datasets(client, self._run_id, self._datasets)
        client.update_run(self._run_id, status="RUNNING")
        self._client = client

    def _log_settings(self, client: Any, known: dict[str, str]) -> None:
        """Send the settings that the MLflow run does not have yet, as params, and the tags whose values have changed."""
        params = [one for one in _params(self._settings).items() if one[0] not in known]
        now = self._now(known)
        tags = [(name, value) for name, value in now.items() if self._known.get(name) != value]
        log_batch(client, self._run_id, params=params, tags=tags)
        self._known |= now

    def _noted(self, client: Any) -> str:
        """Return the id of the MLflow run from the note in the run's folder. Empty if there is no note, or if this folder is a
        copy and the original folder still exists: the MLflow run in the note then belongs to the original."""
        if not self._folder.exists(RUN_FILE):
            return ""
        note = self._folder.read_as(RUN_FILE, RUN_NOTE)
        if note.folder not in ("", mark_of(self._folder)):
            first = client.get_run(note.run_id).data.tags.get(_RUN, "")
            # ``first`` is the original folder's URL, from a tag. Anybody who can write to the MLflow server can change the tag,
            # and could make us read from a host of their choice. So compare the URL with the digest in the note first
            is_known = digest_of_url(first) == note.folder or is_named(first, self._folder.url)
            with contextlib.suppress(SpringtideError, OSError):  # if it moved or is unreachable, keep its MLflow run
                if is_known and read_run_note(Folder(first)) == note.run_id:
                    _log.warning("%s is a copy of %s: the copy gets its own MLflow run", self._folder.url, first)
                    return ""
            write_run_note(self._folder, note.run_id, note.experiment_id)
        return note.run_id

    def _create(self, client: Any) -> str:
        experiment_id = experiment_of(client, self._settings, self._uri)
        # an earlier start may have ended after it created the MLflow run, before it wrote the note: search the run by its tag
        mark = mark_of(self._folder)
        same = client.search_runs([experiment_id], f"tags.`{_FOLDER_MARK}` = '{mark}'", max_results=1)
        if same:
            run_id = same[0].info.run_id
        else:
            tags = {**self._now({}), _FOLDER_MARK: mark, _NAMES: _PRESENT}
            if parent := self._settings["track.parent"]:
                tags["mlflow.parentRunId"] = parent
            run_id = client.create_run(experiment_id, tags=tags, run_name=self._settings["run.id"]).info.run_id
        write_run_note(self._folder, run_id, experiment_id)
        return str(run_id)

    def _now(self, params: dict[str, str]) -> dict[str, str]:
        """Return the tags that the MLflow run should have: links to data, code and checkpoints, and each setting that has
        changed since it was sent as a param, because MLflow's params cannot be changed. ``params``: name -> value of the
        params that MLflow has."""
        settings = {key: (f"springtide.now.{key}", value) for key, value in _params(self._settings).items()}
        unmarked = {key: str(value)[:_PARAM_LENGTH] for key, value in self._settings.items()}  # what old versions sent
        changed = [
            one
            for key, one in settings.items()
            if params.get(key, one[1]) not in (one[1], unmarked[key]) or one[0] in self._known
        ]
        now = {**self._tags, _RUN: self._folder.url, _NODE: platform.node(), **dict(changed)}
        return {valid_name(name): tag_text(value) for name, value in now.items()}

    def _send(self, events: Iterable[Event]) -> None:
        """Send the steps, evaluations and other facts in ``events``. Steps and evaluations that MLflow has are left out."""
        metrics, tags, marks = list[Any](), dict[str, str](), dict(self._marks)
        for event in events:
            self._last = event
            mark = _STEP_MARK if isinstance(event, StepDone) else _EVAL_MARK
            if not isinstance(event, StepDone | Evaluated):
                self._note(event, tags)
            elif event.step > marks[mark]:
                marks[mark] = event.step
                figures = _figures(event)
                if (
                    self._names is _NAMING[_PRESENT] and figures.get("loss_scale") == 1.0
                ):  # leave out a constant 1.0: only fp16 training scales the loss
                    del figures["loss_scale"]
                named = {self._names(name): figure for name, figure in figures.items()}
                metrics += metrics_of(named, event.time_s, event.step)
                if len(metrics) > _METRICS:
                    self._log(metrics, marks, tags)
                    metrics, tags = [], {}
        if metrics or tags:
            self._log(metrics, marks, tags)

    def _note(self, event: Event, tags: dict[str, str]) -> None:
        """Add to ``tags`` what an event says about the whole run: the run's description, its newest checkpoint, or a damaged
        checkpoint that was rejected."""
        if isinstance(event, Rejected):
            tags[valid_name(f"springtide.rejected.{event.name}")] = tag_text(event.reason)
            if tags.get(_CHECKPOINT, self._known.get(_CHECKPOINT, "")).endswith(f"/{event.name}"):
                tags[_CHECKPOINT] = "none: the newest was rejected"
        elif isinstance(event, Saved):
            tags[_CHECKPOINT] = tag_text((self._folder / "checkpoints" / event.name).url)
        elif isinstance(event, Started) and _NOTE not in self._known:  # never replace a description that the user wrote
            tags.setdefault(_NOTE, _description(self._settings, self._folder, event))

    def _log(self, metrics: list[Any], marks: dict[str, int], tags: dict[str, str]) -> None:
        """Send metrics and tags in one request. If the server refuses the values as invalid, log a warning and send only the
        tags that mark these steps as sent: a retry would be refused again."""
        from mlflow import MlflowException

        new = [(name, value) for name, value in tags.items() if self._known.get(name) != value][-_TAGS:]
        new += [(name, str(mark)) for name, mark in marks.items()]
        try:
            log_batch(self._client, self._run_id, metrics, tags=new)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            log_batch(self._client, self._run_id, tags=new[-len(marks) :])
            steps = f"from step {self._marks[_STEP_MARK] + 1} to {marks[_STEP_MARK]}"
            self._warn(f"refuses metrics {steps}", error, "they are in the journal; later ones are sent")
        self._marks = dict(marks)
        self._known |= dict(new)


def _log_datasets(client: Any, run_id: str, datasets: Iterable[TrackedDataset]) -> None:
    """List the datasets as inputs of an MLflow run. A restarted run may call this again: MLflow lists a dataset only once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for one in datasets:
        where = redacted(one.url)
        kind = where.partition("://")[0] if "://" in where else "local"
        source, profile = (json.dumps(facts, allow_nan=False) for facts in ({"uri": where}, dict(one.profile)))
        dataset = Dataset(one.name[:NAME_LENGTH], one.digest[:_DIGEST_LENGTH], kind, source, profile=profile)
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", one.context)]))
    if inputs:
        client.log_inputs(run_id, inputs)


def _description(settings: Settings, folder: Folder, started: Started) -> str:
    """Return the description of a run that MLflow shows, in Markdown: its size, and the commands that report on it."""
    size = f"**{started.num_parameters:,} parameters**" if started.num_parameters else "A model"
    total, least, most = (settings[name] for name in ("train.total", "elastic.min_workers", "elastic.max_workers"))
    here = _MARKDOWN.sub("_", printable(redacted(folder.url)))[:NAME_LENGTH]
    return (
        f"{size} on {int(total):,} tokens, with {least} to {most} workers; {started.world_size} at the first start.\n\n"
        f"Its checkpoints are in `{here}/checkpoints`; MLflow has no copy of them. `springtide report {here}` shows where time "
        f"and money went, `springtide verify {here}` what it was trained on."
    )


def _figures(event: StepDone | Evaluated) -> dict[str, float]:
    """Return name -> value of each figure in an event, such as ``loss``. Includes figures that only some runs have, such as the
    loss of each data source."""
    names = STEP_METRICS if isinstance(event, StepDone) else EVAL_METRICS
    found = {name: getattr(event, name) for name in names if getattr(event, name) is not None}
    if isinstance(event, StepDone):
        return found | event.extra
    found |= {f"forgetting/{name}": worse for name, worse in event.forgetting.items()}
    if len(event.corpora) > 1:
        found |= {f"heldout_bits_per_byte/{name}": bits for name, bits in event.corpora.items()}
        found |= {f"heldout_loss/{name}": loss for name, loss in event.losses.items()}
    return found


def _monitor(run_id: str, uri: str) -> Any:
    """Start MLflow's monitor of this node, which sends CPU, memory, disk, network and GPU use once a minute. Return None if it
    cannot start."""
    with contextlib.suppress(Exception):  # such as a missing package psutil: training goes on without the monitor
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        found = SystemMetricsMonitor(run_id, sampling_interval=60, resume_logging=True, tracking_uri=uri)
        found.start()
        return found
    return None


def _params(settings: Settings) -> dict[str, str]:
    return {name: _cut(str(value)) for name, value in settings.items()}


def _cut(text: str) -> str:
    """Cut the value of a setting to the length that MLflow accepts. The end of a cut value says that it was cut."""
    mark = f" ... ({len(text):,} characters; whole in config.yaml)"
    return text if len(text) <= _PARAM_LENGTH else text[: _PARAM_LENGTH - len(mark)] + mark
