"""What an MLflow run says beside its metrics: experiment, description, datasets, the driver's node. Within MLflow's limits."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from springtide.errors import legible, redacted
from springtide.events import Started
from springtide.events.metrics import tracked_name
from springtide.store import Folder

NOTE = "mlflow.note.content"
"""The tag that the page of an MLflow run shows as its description, in Markdown."""
SYSTEM_NODE = "springtide.system_metrics_node"
TAG_LENGTH = 2000
_NAME_LENGTH = 250
_DIGEST_LENGTH = 36
_CELL_LENGTH = 250
_KIND, _MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow refuses in the name of a metric or a tag."""
_MARKDOWN = re.compile(r"[\\`|<>\r\n]")

Settings = Mapping[str, Any]
"""Dotted name -> value of every setting, without passwords: others can read the server."""


class TrackedDataset(NamedTuple):
    """A dataset that a run trains or is evaluated on, as MLflow lists it."""

    name: str
    digest: str
    url: str
    context: str
    """``training`` or ``evaluation``."""
    profile: Mapping[str, int]
    """Its sizes by name, such as ``tokens`` and ``rows``."""


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


def tag_text(value: object) -> str:
    """Return the value of a tag: redacted, and cut to what MLflow accepts."""
    return redacted(str(value))[:TAG_LENGTH]


def experiment_of(client: Any, settings: Settings, uri: str) -> str:
    """Return the id of the experiment that the settings name; create it if there is none. Its kind is model training,
    unless its users chose another."""
    name, root = settings["track.experiment"], Folder(settings["run.root"])
    if experiment := client.get_experiment_by_name(name):
        if _KIND not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, _KIND, _MODEL_TRAINING)
        return str(experiment.experiment_id)
    artifacts = root.where("mlartifacts") if uri.startswith("sqlite") and root.is_local else None
    return str(client.create_experiment(name, artifacts, tags={_KIND: _MODEL_TRAINING}))


def log_datasets(client: Any, run_id: str, datasets: Iterable[TrackedDataset]) -> None:
    """List the datasets of a run. One that the run has already is not listed twice."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for one in datasets:
        where = redacted(one.url)
        kind, _, rest = where.partition("://")
        profile = json.dumps(dict(one.profile), allow_nan=False)
        dataset = Dataset(
            one.name[:_NAME_LENGTH],
            one.digest[:_DIGEST_LENGTH],
            kind if rest else "local",
            json.dumps({"uri": where}, allow_nan=False),
            profile=profile,
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", one.context)]))
    if inputs:
        client.log_inputs(run_id, inputs)


def description(settings: Settings, folder: Folder, started: Started) -> str:
    """Return what a run trains and where to look at it, in Markdown.

    Args:
        settings: of the run.
        folder: of the run.
        started: the event of the worker group that trains.
    """
    model = settings["model.source"] or (
        f"{settings['model.num_layers']} layers of width {settings['model.dim']}, "
        f"{settings['model.num_heads']} heads, sequences of {settings['shards.sequence_length']} tokens"
    )
    size = f"**{started.num_parameters:,} parameters**" if started.num_parameters else "A model"
    total, least, most = (settings[name] for name in ("train.total", "elastic.min_workers", "elastic.max_workers"))
    here, at = (_cell(redacted(one)) for one in (folder.url, folder.where("report.html") if folder.is_local else ""))
    rows = {
        "model": _cell(str(model)),
        "precision, strategy": f"{_cell(str(settings['parallel.precision']))}, {settings['parallel.strategy']}",
        "folder": f"`{here}`",
        "where time and money went": f"`springtide report {here}`",
        "proof of what it trained on": f"`springtide verify {here}`",
        "checkpoints": f"`{here}/checkpoints`; MLflow has their place, not their bytes",
    }
    if at:
        rows["page"] = f"`{at}`, at the end of training"
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    trains = (
        f"{size} on {int(total):,} tokens, with {least} to {most} workers; {started.world_size} at the first start."
    )
    return f"{trains}\n\n| | |\n|---|---|\n{table}\n"[:TAG_LENGTH]


def _cell(text: str) -> str:
    return _MARKDOWN.sub("_", legible(text))[:_CELL_LENGTH]


class NodeMetrics:
    """Load of the driver's node: CPU, memory, disk, network and, with ``nvidia-ml-py``, its GPUs. MLflow's monitors measure it,
    when they are asked: there is no thread, and nothing to keep while no server takes it."""

    def __init__(self, every_s: float = 60.0) -> None:
        self.node = platform.node()
        self._every_s, self._last_s, self._step = every_s, time.monotonic(), 0
        self._monitors: list[Any] = []
        with contextlib.suppress(Exception):  # without psutil
            from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
            from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
            from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

            self._monitors += [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
            self._monitors[0].collect_metrics()  # utilisation is measured since the last call; the first says 0
            self._monitors[0].clear_metrics()
        with contextlib.suppress(Exception):  # without a GPU, or NVIDIA's package
            from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

            self._monitors.append(GPUMonitor())

    def due(self, step: int) -> dict[str, float]:
        """Return a measurement by MLflow's names; empty if the last is not a minute old, or is of this step."""
        now = time.monotonic()
        if now - self._last_s < self._every_s or step <= self._step:
            return {}
        self._last_s, self._step = now, step
        found: dict[str, float] = {}
        for monitor in self._monitors:
            with contextlib.suppress(Exception):  # a device that is gone
                monitor.collect_metrics()
                found |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                monitor.clear_metrics()
        return found
