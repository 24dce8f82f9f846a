"""The table of metrics for Prometheus: name, kind, unit and meaning of each metric, and the event that sets it. No I/O here.

A listener in the driver (``springtide.ray.train.driver_listeners``) exports the metrics of this table. The dashboard and the
alerts in deploy/monitoring/ use only its metrics. Names follow Prometheus: base units at the end, ``_total`` for counters. Each
metric has the label ``run``; a few have a second label, with a fixed set of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from springtide.events import (
    Commanded,
    Evaluated,
    Event,
    Failed,
    Left,
    RolledBack,
    Saved,
    SaveFailed,
    Spiked,
    Started,
    StepDone,
    Stopped,
    Straggling,
)

PREFIX = "springtide_"
EXPORTED = f"ray_{PREFIX}"
"""Prefix of each metric's name in Prometheus. Ray exports the metrics, and puts ``ray_`` before our prefix."""
RUN = "run"
"""Name of the label that every metric has. Its value is the name of the run."""
CAUSES = (
    *("lost nodes", "unfit node", "store", "failed workers", "out of memory", "start-up", "hung", "given up"),
    "other",
)
"""The allowed values of the metric label ``cause``, which tells why a worker group ended with a failure."""


class PrometheusMetric(NamedTuple):
    """A row of the table of metrics: a metric, and a kind of event that sets it."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    meaning: str
    event: type[Event]
    value: Callable[[Any], float]
    """Function that computes a number from the event: for a gauge its new value, for a counter the amount to add."""
    label: str = ""
    """Name of the metric's second label, besides ``run``; empty if it has only ``run``."""
    label_of: Callable[[Any], str] = lambda event: ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the metric's labels: ``run``, and the second label if there is one."""
        return (RUN, self.label) if self.label else (RUN,)


def _one(event: Event) -> float:
    return 1.0


_Row = PrometheusMetric
PROMETHEUS: tuple[PrometheusMetric, ...] = (
    _Row("step", "gauge", "steps", "last trained step; falls where steps are repeated", StepDone, lambda e: e.step),
    _Row("tokens", "gauge", "tokens", "tokens trained on; falls as step does", StepDone, lambda e: e.tokens),
    _Row("loss", "gauge", "nats/token", "training loss of the step", StepDone, lambda e: e.loss),
    _Row("grad_norm", "gauge", "1", "global gradient norm before clipping", StepDone, lambda e: e.grad_norm),
    _Row("learning_rate", "gauge", "1", "learning rate of the step", StepDone, lambda e: e.learning_rate),
    _Row("tokens_per_second", "gauge", "tokens/s", "of all workers", StepDone, lambda e: e.tokens_per_s),
    _Row("step_seconds", "gauge", "s", "from one step to the next", StepDone, lambda e: e.step_time_s),
    _Row(
        "data_wait_seconds",
        "gauge",
        "s",
        "part of it without data, on the slowest rank",
        StepDone,
        lambda e: e.data_wait_s,
    ),
    _Row("mfu_ratio", "gauge", "ratio", "model FLOPs over the devices' peak", StepDone, lambda e: e.mfu),
    _Row("memory_bytes", "gauge", "bytes", "peak memory of rank 0", StepDone, lambda e: e.memory_bytes),
    _Row("energy_joules_total", "counter", "J", "energy of all workers", StepDone, lambda e: e.energy_j),
    _Row("workers", "gauge", "workers", "workers in the step; 0 while it holds none", StepDone, lambda e: e.world_size),
    _Row("workers", "gauge", "workers", "", Started, lambda e: e.world_size),
    _Row("workers", "gauge", "workers", "", Failed, lambda e: 0.0),
    _Row("workers", "gauge", "workers", "", Left, lambda e: 0.0),
    _Row("workers", "gauge", "workers", "", Stopped, lambda e: 0.0),
    _Row("heldout_loss", "gauge", "nats/token", "loss on held-out rows", Evaluated, lambda e: e.heldout_loss),
    _Row(
        "heldout_bits_per_byte",
        "gauge",
        "bits/byte",
        "the same per byte of text",
        Evaluated,
        lambda e: e.heldout_bits_per_byte,
    ),
    _Row("checkpoint_step", "gauge", "steps", "step of the newest checkpoint", Saved, lambda e: e.step),
    _Row("save_seconds", "gauge", "s", "from the begin of the last save to its commit", Saved, lambda e: e.save_time_s),
    _Row("save_stall_seconds", "gauge", "s", "how long training waited for it", Saved, lambda e: e.stall_s),
    _Row("saves_total", "counter", "saves", "checkpoints committed", Saved, _one),
    _Row("failed_saves_total", "counter", "saves", "saves that failed", SaveFailed, _one),
    _Row("starts_total", "counter", "starts", "worker groups that began to train", Started, _one),
    _Row(
        "failures_total",
        "counter",
        "failures",
        "worker groups that failed",
        Failed,
        _one,
        "cause",
        lambda e: cause(e.cause),
    ),
    _Row("skipped_updates_total", "counter", "steps", "steps without an update", StepDone, lambda e: not e.updated),
    _Row("spikes_total", "counter", "spikes", "steps far above those before", Spiked, _one),
    _Row("rollbacks_total", "counter", "rollbacks", "returns to a checkpoint before a spike", RolledBack, _one),
    _Row("stragglers_total", "counter", "ranks", "ranks that held up the others", Straggling, _one),
    _Row("commands_total", "counter", "commands", "commands to the run", Commanded, _one, "verb", lambda e: e.verb),
)
"""The table of metrics. A metric that several kinds of events set has one row for each. These rows have equal names, kinds,
units and labels, and only the first row states the meaning."""


def rows() -> list[PrometheusMetric]:
    """Return one row of ``PROMETHEUS`` for each metric, the first, in the order of the table.

    Examples:
        >>> [row.name for row in rows()][:3]
        ['step', 'tokens', 'loss']
    """
    found: dict[str, PrometheusMetric] = {}
    for row in PROMETHEUS:
        found.setdefault(row.name, row)
    return list(found.values())


def cause(found: str) -> str:
    """Return the cause ``found`` if it is in ``CAUSES``, else ``other``, so that the label ``cause`` has a fixed set of values.

    Examples:
        >>> cause("hung"), cause("a new cause")
        ('hung', 'other')
    """
    return found if found in CAUSES else "other"


def observed(event: Event) -> Iterator[tuple[PrometheusMetric, dict[str, str], float]]:
    """Yield (metric, its labels except ``run``, value) of each metric that an event sets. Values that are infinite or NaN, and
    counters that would not increase, are left out.

    Args:
        event: any event of a run.
    """
    for one in PROMETHEUS:
        if isinstance(event, one.event):
            value = float(one.value(event))
            if math.isfinite(value) and (value or one.kind == "gauge"):
                yield one, {one.label: one.label_of(event)} if one.label else {}, value
