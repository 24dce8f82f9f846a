"""Requests to MLflow: valid names, size limits, and data that is sent once (the best trial of a sweep, scores of a checkpoint,
an exported model). The note is the file ``mlflow.json`` in a run's folder, with the id of its MLflow run. The events of
a run are sent by ``mlflow_sink``."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from springtide.errors import CommandFailed, ConfigError, explain, redacted
from springtide.events.metrics import tracked_name
from springtide.storage import Folder

RUN_FILE = "mlflow.json"
OFF = "off"
_KIND, _MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
NAME_LENGTH, TAG_LENGTH = 250, 2000
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)
_MODEL_NAME = re.compile(r"[\w\-. ]{1,200}", re.ASCII)

Settings = Mapping[str, Any]
"""Dotted name of every setting -> its value, without passwords, because other users can read the MLflow server."""

_log = logging.getLogger(__name__)


class _RunNote(BaseModel):
    run_id: Annotated[str, Field(min_length=1, max_length=200)]
    experiment_id: str
    folder: str = ""
    """Digest (``mark_of``) of the URL of the folder for which this note was written. After the folder was moved or copied, it
    differs from the digest of the folder's present URL."""


RUN_NOTE = TypeAdapter(_RunNote)


@functools.lru_cache(4096)
def valid_name(name: str) -> str:
    """Return the name of a metric or a tag as MLflow accepts it.

    >>> valid_name("task/x@y/f1")
    'task/x_y/f1'
    """
    found = _NOT_IN_A_NAME.sub("_", name)[:NAME_LENGTH].strip("/") or "_"
    return "/".join("_" if part in ("", ".", "..") else part for part in found.split("/"))


@functools.lru_cache(4096)
def metric_name(name: str) -> str:
    """Return the name of the MLflow metric for a figure of an event.

    >>> metric_name("heldout_loss"), metric_name("objective/a+b")
    ('heldout/loss', 'train/objective/a_b')
    """
    return valid_name(tracked_name(name))


def read_run_note(folder: Folder) -> str:
    """Return the id of the MLflow run that ``folder`` reports to. It is read from the note (``mlflow.json``) in the folder;
    empty if there is no note. Raises DamagedFile."""
    return folder.read_as(RUN_FILE, RUN_NOTE).run_id if folder.exists(RUN_FILE) else ""


def write_run_note(folder: Folder, run_id: str, experiment_id: str) -> None:
    """Write a note (``mlflow.json``) into ``folder`` with the id of the MLflow run that the folder reports to."""
    folder.write_json(RUN_FILE, {"run_id": run_id, "experiment_id": experiment_id, "folder": mark_of(folder)})


def pass_run_on(before: Folder, folder: Folder) -> None:
    """Let ``folder`` report to the same MLflow run as the folder ``before``, if ``before`` has a note with an MLflow run."""
    if before.exists(RUN_FILE):
        note = before.read_as(RUN_FILE, RUN_NOTE)
        write_run_note(folder, note.run_id, note.experiment_id)


def default_uri(root: Folder) -> str:
    """Return the URI of an sqlite file: in ``root``, the folder of the runs; in the working directory if ``root`` is in an
    object store."""
    return f"sqlite:///{root.where('mlflow.db')}" if root.is_local else "sqlite:///mlflow.db"


def client_of(uri: str) -> Any:
    """Return an MLflow client for the server at ``uri``. The first call takes seconds, because it imports MLflow."""
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # INFO would log every database table that MLflow creates
    for name in ("mlflow.store", "mlflow.system_metrics"):  # these log every retry; our own code logs a failure once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def experiment_of(client: Any, settings: Settings, uri: str) -> str:
    """Return the id of the experiment ``track.experiment``; create the experiment if there is none. Set its kind in MLflow to
    model training, unless it has a kind already."""
    name, root = settings["track.experiment"], Folder(settings["run.root"])
    if experiment := client.get_experiment_by_name(name):
        if _KIND not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, _KIND, _MODEL_TRAINING)
        return str(experiment.experiment_id)
    artifacts = root.where("mlartifacts") if uri.startswith("sqlite") and root.is_local else None
    return str(client.create_experiment(name, artifacts, tags={_KIND: _MODEL_TRAINING}))


def metrics_of(figures: Mapping[str, float], time_s: float, step: int) -> list[Any]:
    """Return figures (name -> value) as MLflow metrics, all with the given time and step."""
    from mlflow.entities import Metric

    return [Metric(name, float(figure), int(time_s * 1000), step) for name, figure in figures.items()]


def log_batch(
    client: Any,
    run_id: str,
    metrics: Sequence[Any] = (),
    params: Sequence[tuple[str, str]] = (),
    tags: Sequence[tuple[str, str]] = (),
) -> None:
    """Send metrics, params and tags, split into requests within MLflow's limits."""
    from mlflow.entities import Param, RunTag

    values, marks = [Param(*one) for one in params], [RunTag(*one) for one in tags]
    while metrics or values or marks:
        client.log_batch(run_id, metrics[:1000], values[:100], marks[:100], synchronous=True)
        metrics, values, marks = metrics[1000:], values[100:], marks[100:]


def tag_text(value: object) -> str:
    """Return ``value`` as the text of an MLflow tag: without passwords, and cut to the length that MLflow accepts."""
    return redacted(str(value))[:TAG_LENGTH]


def mark_of(folder: Folder) -> str:
    """Return a digest of a folder's URL, by which MLflow's search finds the folder's MLflow run. The URL itself may contain a
    quote, which MLflow's search filters cannot escape."""
    return digest_of_url(folder.url)


def digest_of_url(url: str) -> str:
    """Return the digest of a folder's URL."""
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class SweepSink:
    """The MLflow run of a sweep, which is the parent of its trials' MLflow runs. If the server is down, the sweep continues
    without an MLflow run."""

    def __init__(self, settings: Settings, folder: Folder, uri: str) -> None:
        """Find or create the sweep's MLflow run. If that fails, ``id`` is empty and the sweep is not reported to MLflow."""
        self.id, self._uri = "", uri
        try:
            client, run_id = client_of(uri), read_run_note(folder)
            if not run_id:
                experiment_id, tags = experiment_of(client, settings, uri), {"springtide.tuning": redacted(folder.url)}
                run_id = str(client.create_run(experiment_id, tags=tags, run_name=folder.name).info.run_id)
                write_run_note(folder, run_id, experiment_id)
            self.id = run_id
            client.update_run(run_id, status="RUNNING")
        except Exception as error:  # no error of a server or its client may stop the sweep
            _log.warning(
                "%s; the sweep continues without MLflow", redacted(f"MLflow at {uri} cannot be reached ({error})")
            )

    def end(self, best: dict[str, Any], figures: dict[str, float]) -> None:
        """Send the best trial's values of the searched settings and the sweep's figures, and mark the MLflow run finished."""
        if not self.id:
            return
        try:
            client, found = client_of(self._uri), {metric_name(name): figure for name, figure in figures.items()}
            tags = [(valid_name(f"springtide.best.{name}"), tag_text(value)) for name, value in best.items()]
            log_batch(client, self.id, metrics_of(found, time.time(), 0), tags=tags)
            client.set_terminated(self.id, "FINISHED")
        except Exception as error:
            _log.warning("MLflow did not receive the end of the sweep: %s", redacted(str(error)))


def check_registry(uri: str, name: str) -> None:
    """Raise ConfigError if a model cannot be registered as ``name`` at the MLflow server of ``uri``. Registers nothing."""
    if not _MODEL_NAME.fullmatch(name) or name != name.strip():
        limit = "must be 1 to 200 letters, digits, '_', '-', '.' or spaces between them"
        raise ConfigError(explain("register", name, limit, "give another name"))
    if uri == OFF:
        remedy = "set track.mlflow_uri, or MLFLOW_TRACKING_URI"
        raise ConfigError(explain("register", name, "needs MLflow, which is off for this run", remedy))
    try:
        client_of(uri).search_registered_models(max_results=1)
    except Exception as error:
        limit = f"MLflow at {redacted(uri)} cannot be reached ({error})"
        raise ConfigError(explain("register", name, limit, "start the server, or leave --register out")) from None


def register_export(
    uri: str, name: str, run: Folder, export: str, settings: Settings, facts: Mapping[str, object]
) -> str:
    """Register an exported model as the next version of a model in MLflow's registry. MLflow gets no copy of the weights, only
    the export's URL, the model's signature (types of input and output) and the facts.

    Args:
        uri: URI of the MLflow server.
        name: name of the registered model; created if it does not exist.
        run: folder of the run whose checkpoint was exported.
        export: URL of the export.
        settings: settings of the run.
        facts: facts about the model version, such as ``checkpoint``; each becomes a tag ``springtide.<name>``.

    Returns:
        The number of the new model version.

    Raises:
        CommandFailed: the model could not be registered. The export itself is complete.
    """
    try:
        client, run_id, where = client_of(uri), read_run_note(run) or None, redacted(export)
        experiment_id = client.get_run(run_id).info.experiment_id if run_id else experiment_of(client, settings, uri)
        tags = {valid_name(f"springtide.{key}"): tag_text(value) for key, value in facts.items()}
        tags |= {"springtide.export": tag_text(where)}
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
        raise CommandFailed(redacted(f"{problem}: repeat the command when the server can register it")) from None


def _model_file(model: Any, run_id: str | None, where: str) -> Any:
    """Return MLflow's description file of the model. Its signature: token ids in, logits of the next token at each position
    out."""
    import numpy
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    ids = Schema([TensorSpec(numpy.dtype("int64"), (-1, -1), "input_ids")])
    logits = Schema([TensorSpec(numpy.dtype("float32"), (-1, -1, -1), "logits")])
    named = {"model_id": model.model_id, "model_uuid": model.model_id, "metadata": {"springtide.export": where}}
    return Model(model.artifact_location, run_id, signature=ModelSignature(ids, logits), **named)
