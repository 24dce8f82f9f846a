"""Results that MLflow gets once: the best trial of a sweep, an exported model."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from springtide.errors import CommandFailed, ConfigError, explain, redacted
from springtide.store import Folder
from springtide.track.mlflow_run import Settings, experiment_of, metric_name, tag_text, valid_name
from springtide.track.mlflow_sink import OFF, read_run_note, write_run_note

_MODEL_NAME = re.compile(r"[\w\-. ]{1,200}", re.ASCII)

_log = logging.getLogger(__name__)


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
                experiment_id = experiment_of(client, settings, uri)
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
                self._client.set_tag(self.id, valid_name(f"springtide.best.{name}"), tag_text(value))
            for name, figure in figures.items():
                self._client.log_metric(self.id, metric_name(name), figure)
            self._client.set_terminated(self.id, "FINISHED")
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
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        MlflowClient(tracking_uri=uri).search_registered_models(max_results=1)
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
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        run_id = read_run_note(run) or None
        experiment_id = client.get_run(run_id).info.experiment_id if run_id else experiment_of(client, settings, uri)
        where = redacted(export)
        tags = {valid_name(f"springtide.{key}"): tag_text(value) for key, value in facts.items()}
        tags |= {"springtide.export": tag_text(where)}
        external = {"mlflow.model.isExternal": "true"}
        model = client.create_logged_model(experiment_id, name, run_id, {**tags, **external}, model_type="causal-lm")
        with tempfile.TemporaryDirectory() as folder:
            _write_model_file(Path(folder), model, run_id, where)
            client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, "READY")
        if not client.search_registered_models(f"name = '{name}'", max_results=1):
            client.create_registered_model(name, description="Exported by springtide; each version says where it is.")
        note = f"An export by springtide, at `{where}`. Load it from there: MLflow has no copy of the weights."
        source = f"models:/{model.model_id}"
        version = client.create_model_version(
            name, source, run_id, tags=tags, description=note, model_id=model.model_id
        )
        return str(version.version)
    except Exception as error:
        problem = f"MLflow at {uri} did not register it as {name} ({error}); the export {export} is complete"
        raise CommandFailed(redacted(f"{problem}: give the same command again when the server can")) from None


def _write_model_file(folder: Path, model: Any, run_id: str | None, where: str) -> None:
    """Write the file from which MLflow reads a model's signature: token ids in, the logits of each next token out."""
    import numpy
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    ids = TensorSpec(numpy.dtype("int64"), (-1, -1), "input_ids")
    logits = TensorSpec(numpy.dtype("float32"), (-1, -1, -1), "logits")
    Model(
        artifact_path=model.artifact_location,
        run_id=run_id,
        model_id=model.model_id,
        model_uuid=model.model_id,
        signature=ModelSignature(Schema([ids]), Schema([logits])),
        metadata={"springtide.export": where},
    ).save(str(folder / "MLmodel"))
    (folder / "export.json").write_text(json.dumps({"uri": where}, allow_nan=False))
