"""Calibrate a plan (a forecast of time and cost) with a measured run: how near its steps come to the roofline, and how long its
restarts and saves take."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, NamedTuple

from springtide import config as configs
from springtide.config import Config
from springtide.config.cluster_file import ClusterFile, NodeType
from springtide.errors import ConfigError, explain
from springtide.events import Saved, Started
from springtide.planning.arithmetic import ModelSize, model_size, step_time
from springtide.planning.estimate import num_ids

if TYPE_CHECKING:
    from springtide.tracking.timeline import Timeline

_WARM_UP = 3
"""Number of first steps of a worker group that are not measured, because they allocate memory and compile blocks."""
_LEAST = 5
"""Minimum number of measured steps for a calibration."""
_SAME = (
    *("shards.sequence_length", "shards.mask_across_documents", "stream.global_batch", "stream.lanes"),
    *("optim.optimizer", "optim.moments", "optim.source", "optim.groups", "optim.ema_half_life", "train.micro_batch"),
)
"""Settings that change the time of a step. All settings in the sections ``_SECTIONS`` change it too."""
_SECTIONS = ("model", "parallel", "objective")


class Calibration(NamedTuple):
    """Measured figures of one run, which calibrate forecasts of other runs."""

    run: str
    node_type: str
    config: Config
    world_size: int
    num_parameters: int
    num_steps: int
    """Number of steps that were measured."""
    step_s: float
    """Median time of a step [s]."""
    efficiency: float
    """Share of the device's stated speed that the run reached. With this share, the roofline of ``node_type`` predicts
    ``step_s``."""
    restart_s: float | None
    """Median time from the last step of a worker group to training in the next group; None if there was no restart [s]."""
    save_s: float | None
    """Median time that training waited for a save; None if there was no save [s]."""

    def describe(self) -> str:
        """Return a line of text with the efficiency and the run that it was measured in."""
        return (
            f"roofline with an efficiency of {self.efficiency:.2f}, so that run {self.run} ({self.world_size} workers on "
            f"{self.node_type}, median of {self.num_steps} steps: {self.step_s:.4g} s) comes out as measured"
        )

    def is_of(self, config: Config, size: ModelSize, node_type: str, workers: int) -> bool:
        """Return True if a run of ``config`` would do the same steps on the same nodes as the measured run. Then ``step_s`` can
        be used as its step time."""
        changed = [
            name
            for name in configs.difference(self.config, config)
            if name in _SAME or (name.split(".")[0] in _SECTIONS and name != "model.init_seed")
        ]
        same = (node_type, workers, size.num_parameters) == (self.node_type, self.world_size, self.num_parameters)
        return same and not changed


def calibrate(path: str, measured_on: str, file: ClusterFile) -> Calibration:
    """Compute a calibration from a run's config and events.

    Args:
        path: the run's folder.
        measured_on: name of the node type that the run used; empty: the only node type in ``file``, or the node type with the
            run's device.
        file: the cluster file, which lists the node types.

    Raises:
        ConfigError: the run has too few steps, its model is not a plain decoder, or its node type is not known.
    """
    from springtide.run.folder import open_run  # imported late: importing pandas takes longer than a plan
    from springtide.tracking.ledger import ledger

    run = open_run(path)
    config, timeline = run.config, run.timeline
    start, times = _measured(timeline)
    if start is None or len(times) < _LEAST:
        problem = f"has {len(times)} steps after the first {_WARM_UP} of its last worker group, and {_LEAST} are needed"
        raise ConfigError(explain("measured", path, problem, "train it longer, or set measured to another run"))
    if config.model.source or config.model.adapter != "none":
        problem = "trains a model whose size a plan does not know (model.source, model.adapter)"
        raise ConfigError(explain("measured", path, problem, "name a run that trains a plain decoder"))
    node = _node_of(start, measured_on, file, path)
    world_size, step_s = start.world_size, statistics.median(times)
    vocab_size = num_ids(config)
    size = model_size(config.model, vocab_size, config.shards.sequence_length)
    if start.num_parameters:  # the vocabulary may be smaller than configured: compute it from the weights
        ids = (start.num_parameters - size.num_parameters) // (size.tables * config.model.dim) + vocab_size
        size = model_size(config.model, max(1, ids), config.shards.sequence_length)
    efficiency = step_time(config, size, node, world_size).efficiency(step_s)
    restarts = [one.gap_s for one in ledger(timeline.condensed()).restarts]
    stalls = [event.stall_s for event in timeline.events if isinstance(event, Saved)]
    return Calibration(
        run=run.id,
        node_type=node.name,
        config=config,
        world_size=world_size,
        num_parameters=size.num_parameters,
        num_steps=len(times),
        step_s=step_s,
        efficiency=efficiency,
        restart_s=statistics.median(restarts) if restarts else None,
        save_s=statistics.median(stalls) if stalls else None,
    )


def _measured(timeline: Timeline) -> tuple[Started | None, list[float]]:
    """Return the start event of the newest worker group with enough steps, or of the last group if none has enough. Also return
    the group's step times, without its first ``_WARM_UP`` steps [s]. Groups are separated by start events, because one driver
    may start groups of different sizes."""
    steps, end, last = timeline.tries["step_time_s"], None, None
    for before, event in reversed(timeline.placed):
        if isinstance(event, Started):
            found = event, steps[before:end][_WARM_UP:].tolist()
            if len(found[1]) >= _LEAST:
                return found
            end, last = before, last or found
    return last or (None, [])


def _node_of(start: Started, measured_on: str, file: ClusterFile, path: str) -> NodeType:
    """Return the node type that a worker group ran on. Raises ConfigError if neither ``measured_on`` nor the run's device
    identifies it."""
    names = [node.name for node in file.node_types]
    if measured_on:
        if measured_on not in names:
            problem = f"is not a node type of the cluster file: {', '.join(names)}"
            raise ConfigError(explain("measured-on", measured_on, problem, configs.nearest(measured_on, names)))
        return file.node_types[names.index(measured_on)]
    if len(names) == 1:
        return file.node_types[0]
    words = set(re.split(r"[^A-Z0-9]+", start.peak_source.upper()))
    found = [node for node in file.node_types if words.issuperset(node.device.name.upper().split())]
    if len(found) != 1:
        problem = f"does not say on which of {', '.join(names)} it ran ({start.peak_source or 'no device is named'})"
        raise ConfigError(explain("measured", path, problem, "add --measured-on NODE_TYPE"))
    return found[0]
