"""Sends a run's events to MLflow with ``MlflowClient.log_batch``, from a thread of the driver. Only this file imports MLflow.

Training never waits: events go into a queue of at most ``_MOST_UNSENT``. A full queue drops its oldest event and counts it. A
server that is down is tried again. When it is back, dropped events are read from the journal, and so are, at the next start,
those that were unsent when a driver ended. Two tags, written in the same request as the metrics, record the last step and
evaluation sent; nothing at or before them is sent again, so no point is written twice and steps never go backwards.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import logging
import math
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, Field, TypeAdapter

from springtide.errors import CommandFailed, ConfigError, SpringtideError, explain, legible, redacted
from springtide.events import Evaluated, Event, Rejected, Saved, Started, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS, tracked_name
from springtide.store import Folder

RUN_FILE = "mlflow.json"
OFF = "off"
_STEP_MARK, _EVAL_MARK = "springtide.step_sent", "springtide.eval_sent"
_RUN, _FOLDER_MARK = "springtide.run", "springtide.folder_digest"
_NAMES, _GROUPED = "springtide.metric_names", "grouped"
"""Tag of a run whose metrics have the names of ``events.metrics``; an earlier run keeps the names that it began with."""
_CHECKPOINT, _NODE = "springtide.newest_checkpoint", "springtide.system_metrics_node"
_NOTE = "mlflow.note.content"
"""The tag that the page of an MLflow run shows as its description, in Markdown."""
_KIND, _MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_UNSENT = 20_000
"""Most events in the queue, about 20 MB."""
_AT_ONCE = 1000
"""Most events that are taken from the queue at once."""
_METRICS, _TAGS = 750, 80
"""Most of each per request, apart from one event's metrics and our marks; MLflow accepts 1000 and 100."""
_NAME_LENGTH, _PARAM_LENGTH, _TAG_LENGTH, _DIGEST_LENGTH = 250, 500, 2000, 36
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)
_MODEL_NAME = re.compile(r"[\w\-. ]{1,200}", re.ASCII)
_MARKDOWN = re.compile(r"[\\`|<>\r\n]")

Settings = Mapping[str, Any]
"""Dotted name -> value of every setting, without passwords: others can read the server."""

_log = logging.getLogger(__name__)


class TrackedDataset(NamedTuple):
    """A dataset that a run trains or is evaluated on, as MLflow lists it."""

    name: str
    digest: str
    url: str
    context: str
    """``training`` or ``evaluation``."""
    profile: Mapping[str, int]
    """Its sizes by name, such as ``tokens`` and ``rows``."""


class _RunNote(BaseModel):
    run_id: Annotated[str, Field(min_length=1, max_length=200)]
    experiment_id: str
    folder: str = ""
    """As ``_mark_of`` the folder that it was written for: a folder may be moved, or copied."""


_READ_NOTE = TypeAdapter(_RunNote)


@functools.lru_cache(4096)
def valid_name(name: str) -> str:
    """Return the name of a metric or a tag as MLflow accepts it.

    >>> valid_name("task/x@y/f1")
    'task/x_y/f1'
    """
    found = _NOT_IN_A_NAME.sub("_", name)[:_NAME_LENGTH].strip("/") or "_"
    return "/".join("_" if part in ("", ".", "..") else part for part in found.split("/"))


@functools.lru_cache(4096)
def metric_name(name: str) -> str:
    """Return the name in MLflow of a figure of an event.

    >>> metric_name("heldout_loss"), metric_name("objective/a+b")
    ('heldout/loss', 'objective/a_b')
    """
    return valid_name(tracked_name(name))


def read_run_note(folder: Folder) -> str:
    """Return the id of the MLflow run that ``folder`` has noted; empty if it has none. Raises DamagedFile."""
    return folder.read_as(RUN_FILE, _READ_NOTE).run_id if folder.exists(RUN_FILE) else ""


def write_run_note(folder: Folder, run_id: str, experiment_id: str) -> None:
    """Note in ``folder`` the MLflow run that it reports to."""
    folder.write_json(RUN_FILE, {"run_id": run_id, "experiment_id": experiment_id, "folder": _mark_of(folder)})


def pass_run_on(before: Folder, folder: Folder) -> None:
    """Have ``folder`` report to the MLflow run of ``before``, if that has one."""
    if before.exists(RUN_FILE):
        note = before.read_as(RUN_FILE, _READ_NOTE)
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
        self._earlier, self._datasets = earlier, datasets
        self._queue: collections.deque[Event] = collections.deque(maxlen=_MOST_UNSENT)
        self._changed, self._leaving, self._give_up_s = threading.Condition(), threading.Event(), math.inf
        self.num_dropped = 0
        """Events that the full queue dropped; they are in the journal."""
        self._num_recovered = -1
        """``num_dropped`` when the journal was last sent; -1 before the first time."""
        self._client: Any = None
        self._run_id = ""
        self._marks = {_STEP_MARK: 0, _EVAL_MARK: -1}
        self._known: dict[str, str] = {}
        """Tags that the server has."""
        self._names: Callable[[str], str] = valid_name
        """From the name of a figure to that in MLflow."""
        self._monitor: Any = None
        """MLflow's own, of the load of the driver's node."""
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
        if not self._delivered:  # the thread may still be retrying, or have given up
            _log.warning(
                "MLflow at %s did not receive everything; the next --resume sends the rest", redacted(self._uri)
            )

    def __call__(self, event: Event) -> None:
        """Queue one event; returns at once."""
        with self._changed:
            self.num_dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(event)
            self._changed.notify()

    def _work(self) -> None:
        unsent, is_last = list[Event](), False
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
            except Exception as error:  # no error of a server or its client may stop training
                self._warn("cannot be reached", error, "training continues, metrics are kept")
                self._end_monitor()  # which ends at its first failed request, and is started anew
                retry_s = float(self._settings["track.retry"])
                if self._leaving.wait(retry_s):
                    time.sleep(max(0.0, min(retry_s, 1.0, self._give_up_s - time.monotonic())))
                if time.monotonic() > self._give_up_s:
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
        """Log the first problem with the server; the same one comes back every few seconds."""
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
        client = _client(self._uri)  # the import takes seconds; training does not wait for it
        self._run_id = self._noted(client) or self._create(client)
        found = client.get_run(self._run_id).data
        self._marks = {mark: int(found.tags.get(mark, start)) for mark, start in self._marks.items()}
        self._known = dict(found.tags)
        self._names = metric_name if found.tags.get(_NAMES) == _GROUPED else valid_name
        self._log_settings(client, found.params)
        _log_datasets(client, self._run_id, self._datasets)
        client.update_run(self._run_id, status="RUNNING")
        self._client = client

    def _log_settings(self, client: Any, known: dict[str, str]) -> None:
        """Send the settings that the run lacks, as a run does that was just created, and the tags that differ."""
        params = [one for one in _params(self._settings).items() if one[0] not in known]
        now = self._now(known)
        tags = [(name, value) for name, value in now.items() if self._known.get(name) != value]
        _log_batch(client, self._run_id, params=params, tags=tags)
        self._known |= now

    def _noted(self, client: Any) -> str:
        """Return the id of the run that the folder reports to; empty if it has none, or is a copy of a folder that reports to
        it."""
        if not self._folder.exists(RUN_FILE):
            return ""
        note = self._folder.read_as(RUN_FILE, _READ_NOTE)
        if note.folder not in ("", _mark_of(self._folder)):
            first = client.get_run(note.run_id).data.tags.get(_RUN, "")
            with contextlib.suppress(SpringtideError, OSError):  # it was moved, or is out of reach
                if read_run_note(Folder(first)) == note.run_id:
                    _log.warning("%s is a copy of %s: it gets an MLflow run of its own", self._folder.url, first)
                    return ""
            write_run_note(self._folder, note.run_id, note.experiment_id)
        return note.run_id

    def _create(self, client: Any) -> str:
        experiment_id = _experiment_of(client, self._settings, self._uri)
        # a start that died after creating the run, before writing down its id, left a run with our tag
        mark = _mark_of(self._folder)
        same = client.search_runs([experiment_id], f"tags.`{_FOLDER_MARK}` = '{mark}'", max_results=1)
        if same:
            run_id = same[0].info.run_id
        else:
            tags = {**self._now({}), _FOLDER_MARK: mark, _NAMES: _GROUPED}
            if parent := self._settings["track.parent"]:
                tags["mlflow.parentRunId"] = parent
            run_id = client.create_run(experiment_id, tags=tags, run_name=self._settings["run.id"]).info.run_id
        write_run_note(self._folder, run_id, experiment_id)
        return str(run_id)

    def _now(self, params: dict[str, str]) -> dict[str, str]:
        """Return the tags as they should be: the links, and the settings that changed since MLflow got its params."""
        settings = {key: (f"springtide.now.{key}", value) for key, value in _params(self._settings).items()}
        changed = [one for key, one in settings.items() if params.get(key, one[1]) != one[1] or one[0] in self._known]
        now = {**self._tags, _RUN: self._folder.url, _NODE: platform.node(), **dict(changed)}
        return {valid_name(name): _tag_text(value) for name, value in now.items()}

    def _send(self, events: Iterable[Event]) -> None:
        """Send what the server does not have yet."""
        metrics, tags, marks = list[Any](), dict[str, str](), dict(self._marks)
        for event in events:
            self._last = event
            mark = _STEP_MARK if isinstance(event, StepDone) else _EVAL_MARK
            if not isinstance(event, StepDone | Evaluated):
                self._note(event, tags)
            elif event.step > marks[mark]:
                marks[mark] = event.step
                named = {self._names(name): figure for name, figure in _figures(event).items()}
                metrics += _metrics(named, event.time_s, event.step)
                if len(metrics) > _METRICS:
                    self._log(metrics, marks, tags)
                    metrics, tags = [], {}
        if metrics or tags:
            self._log(metrics, marks, tags)

    def _note(self, event: Event, tags: dict[str, str]) -> None:
        """Put what an event says of the whole run into ``tags``: what trains, where its newest checkpoint is."""
        if isinstance(event, Rejected):
            tags[valid_name(f"springtide.rejected.{event.name}")] = _tag_text(event.reason)
            if tags.get(_CHECKPOINT, self._known.get(_CHECKPOINT, "")).endswith(f"/{event.name}"):
                tags[_CHECKPOINT] = "none: the newest was rejected"
        elif isinstance(event, Saved):
            tags[_CHECKPOINT] = _tag_text((self._folder / "checkpoints" / event.name).url)
        elif isinstance(event, Started) and _NOTE not in self._known:  # a text of the user's own stays
            tags.setdefault(_NOTE, _description(self._settings, self._folder, event))

    def _log(self, metrics: list[Any], marks: dict[str, int], tags: dict[str, str]) -> None:
        """Send one request. A batch that the server refuses for what it holds is skipped: waiting does not mend it."""
        from mlflow import MlflowException

        new = [(name, value) for name, value in tags.items() if self._known.get(name) != value][-_TAGS:]
        new += [(name, str(mark)) for name, mark in marks.items()]
        try:
            _log_batch(self._client, self._run_id, metrics, tags=new)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            _log_batch(self._client, self._run_id, tags=new[-len(marks) :])
            steps = f"from step {self._marks[_STEP_MARK] + 1} to {marks[_STEP_MARK]}"
            self._warn(f"refuses metrics {steps}", error, "they are in the journal; later ones are sent")
        self._marks = dict(marks)
        self._known |= dict(new)


class SweepSink:
    """The one MLflow run of a sweep, the parent of its trials' runs. If the server is down there is none, and the sweep
    continues."""

    def __init__(self, settings: Settings, folder: Folder, uri: str) -> None:
        """Find or create the run; ``id`` is empty if that failed."""
        self.id, self._uri = "", uri
        try:
            client, run_id = _client(uri), read_run_note(folder)
            if not run_id:
                experiment_id, tags = _experiment_of(client, settings, uri), {"springtide.tuning": redacted(folder.url)}
                run_id = str(client.create_run(experiment_id, tags=tags, run_name=folder.name).info.run_id)
                write_run_note(folder, run_id, experiment_id)
            self.id = run_id
            client.update_run(run_id, status="RUNNING")
        except Exception as error:  # no error of a server or its client may stop the sweep
            _log.warning("%s; the sweep continues without it", redacted(f"MLflow at {uri} cannot be reached ({error})"))

    def end(self, best: dict[str, Any], figures: dict[str, float]) -> None:
        """Record the best trial's point and the sweep's figures."""
        if not self.id:
            return
        try:
            client, found = _client(self._uri), {metric_name(name): figure for name, figure in figures.items()}
            tags = [(valid_name(f"springtide.best.{name}"), _tag_text(value)) for name, value in best.items()]
            _log_batch(client, self.id, _metrics(found, time.time(), 0), tags=tags)
            client.set_terminated(self.id, "FINISHED")
        except Exception as error:
            _log.warning("MLflow did not receive the end of the sweep: %s", redacted(str(error)))


def check_registry(uri: str, name: str) -> None:
    """Raise ConfigError if no model can be registered as ``name`` at the MLflow server of ``uri``; nothing is written."""
    if not _MODEL_NAME.fullmatch(name) or name != name.strip():
        limit = "must be 1 to 200 letters, digits, '_', '-', '.' or spaces between them"
        raise ConfigError(explain("register", name, limit, "give another name"))
    if uri == OFF:
        remedy = "set track.mlflow_uri, or MLFLOW_TRACKING_URI"
        raise ConfigError(explain("register", name, "needs MLflow, which is off for this run", remedy))
    try:
        _client(uri).search_registered_models(max_results=1)
    except Exception as error:
        limit = f"MLflow at {redacted(uri)} cannot be reached ({error})"
        raise ConfigError(explain("register", name, limit, "start the server, or leave --register out")) from None


def register_export(
    uri: str, name: str, run: Folder, export: str, settings: Settings, facts: Mapping[str, object]
) -> str:
    """Register an export as the next version of a model in MLflow's registry. The weights stay where they are: MLflow gets
    the export's URL, the signature and the facts.

    Args:
        uri: of the MLflow server.
        name: of the model; created if there is none.
        run: folder of the run that the checkpoint is of.
        export: URL of the export.
        settings: of the run.
        facts: what is said of the version, such as ``checkpoint``; tags ``springtide.<name>``.

    Returns:
        The number of the version.

    Raises:
        CommandFailed: the server refused it. The export is complete.
    """
    try:
        client, run_id, where = _client(uri), read_run_note(run) or None, redacted(export)
        experiment_id = client.get_run(run_id).info.experiment_id if run_id else _experiment_of(client, settings, uri)
        tags = {valid_name(f"springtide.{key}"): _tag_text(value) for key, value in facts.items()}
        tags |= {"springtide.export": _tag_text(where)}
        external = {**tags, "mlflow.model.isExternal": "true"}
        model = client.create_logged_model(experiment_id, name, run_id, external, model_type="causal-lm")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "export.json").write_text(json.dumps({"uri": where}, allow_nan=False))
            _model_file(model, run_id, where).save(f"{folder}/MLmodel")
            client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, "READY")
        if not client.search_registered_models(f"name = '{name}'", max_results=1):
            client.create_registered_model(name, description="Exported by springtide; each version says where it is.")
        note = f"An export by springtide, at `{where}`. Load it from there: MLflow has no copy of the weights."
        source = f"models:/{model.model_id}"
        made = client.create_model_version(name, source, run_id, tags=tags, description=note, model_id=model.model_id)
        return str(made.version)
    except Exception as error:
        problem = f"MLflow at {uri} did not register it as {name} ({error}); the export {export} is complete"
        raise CommandFailed(redacted(f"{problem}: give the same command again when the server can")) from None


def _model_file(model: Any, run_id: str | None, where: str) -> Any:
    """Return the file from which MLflow reads a model's signature: token ids in, the logits of each next token out."""
    import numpy
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    ids = Schema([TensorSpec(numpy.dtype("int64"), (-1, -1), "input_ids")])
    logits = Schema([TensorSpec(numpy.dtype("float32"), (-1, -1, -1), "logits")])
    named = {"model_id": model.model_id, "model_uuid": model.model_id, "metadata": {"springtide.export": where}}
    return Model(model.artifact_location, run_id, signature=ModelSignature(ids, logits), **named)


def _client(uri: str) -> Any:
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table it creates
    for name in ("mlflow.store", "mlflow.system_metrics"):  # they log at every try what is said here once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def _experiment_of(client: Any, settings: Settings, uri: str) -> str:
    """Return the id of the experiment that the settings name; create it if there is none. Its kind is model training,
    unless its users chose another."""
    name, root = settings["track.experiment"], Folder(settings["run.root"])
    if experiment := client.get_experiment_by_name(name):
        if _KIND not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, _KIND, _MODEL_TRAINING)
        return str(experiment.experiment_id)
    artifacts = root.where("mlartifacts") if uri.startswith("sqlite") and root.is_local else None
    return str(client.create_experiment(name, artifacts, tags={_KIND: _MODEL_TRAINING}))


def _log_datasets(client: Any, run_id: str, datasets: Iterable[TrackedDataset]) -> None:
    """List the datasets of a run. One that the run has already is not listed twice."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for one in datasets:
        where = redacted(one.url)
        kind = where.partition("://")[0] if "://" in where else "local"
        source, profile = (json.dumps(facts, allow_nan=False) for facts in ({"uri": where}, dict(one.profile)))
        dataset = Dataset(one.name[:_NAME_LENGTH], one.digest[:_DIGEST_LENGTH], kind, source, profile=profile)
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", one.context)]))
    if inputs:
        client.log_inputs(run_id, inputs)


def _description(settings: Settings, folder: Folder, started: Started) -> str:
    """Return what a run trains and how to look at it, in Markdown."""
    size = f"**{started.num_parameters:,} parameters**" if started.num_parameters else "A model"
    total, least, most = (settings[name] for name in ("train.total", "elastic.min_workers", "elastic.max_workers"))
    here = _MARKDOWN.sub("_", legible(redacted(folder.url)))[:_NAME_LENGTH]
    return (
        f"{size} on {int(total):,} tokens, with {least} to {most} workers; {started.world_size} at the first start.\n\n"
        f"Its checkpoints are in `{here}/checkpoints`; MLflow has no copy of them. `springtide report {here}` shows where time "
        f"and money went, `springtide verify {here}` what it was trained on."
    )


def _figures(event: StepDone | Evaluated) -> dict[str, float]:
    """Return the figures of an event by their names, those included that only some runs have, such as those of each source."""
    names = STEP_METRICS if isinstance(event, StepDone) else EVAL_METRICS
    found = {name: getattr(event, name) for name in names if getattr(event, name) is not None}
    if isinstance(event, StepDone):
        return found | event.extra
    found |= {f"forgetting/{name}": worse for name, worse in event.forgetting.items()}
    if len(event.corpora) > 1:
        found |= {f"heldout_bits_per_byte/{name}": bits for name, bits in event.corpora.items()}
        found |= {f"heldout_loss/{name}": loss for name, loss in event.losses.items()}
    return found


def _metrics(figures: Mapping[str, float], time_s: float, step: int) -> list[Any]:
    """Return figures of one time and step as MLflow's metrics."""
    from mlflow.entities import Metric

    return [Metric(name, float(figure), int(time_s * 1000), step) for name, figure in figures.items()]


def _log_batch(
    client: Any,
    run_id: str,
    metrics: Sequence[Any] = (),
    params: Sequence[tuple[str, str]] = (),
    tags: Sequence[tuple[str, str]] = (),
) -> None:
    """Send metrics, params and tags, in as many requests as MLflow's limits ask for."""
    from mlflow.entities import Param, RunTag

    values, marks = [Param(*one) for one in params], [RunTag(*one) for one in tags]
    while metrics or values or marks:
        client.log_batch(run_id, metrics[:1000], values[:100], marks[:100], synchronous=True)
        metrics, values, marks = metrics[1000:], values[100:], marks[100:]


def _monitor(run_id: str, uri: str) -> Any:
    """Start MLflow's monitor of this node: CPU, memory, disk, network and GPUs, once a minute. None without psutil."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    with contextlib.suppress(ImportError):
        found = SystemMetricsMonitor(run_id, sampling_interval=60, resume_logging=True, tracking_uri=uri)
        found.start()
        return found
    return None


def _tag_text(value: object) -> str:
    return redacted(str(value))[:_TAG_LENGTH]


def _params(settings: Settings) -> dict[str, str]:
    return {name: str(value)[:_PARAM_LENGTH] for name, value in settings.items()}


def _mark_of(folder: Folder) -> str:
    """Return a digest by which a run is found: MLflow's filters cannot escape a quote in a path."""
    return hashlib.sha256(folder.url.encode()).hexdigest()[:32]
