"""The table of metrics for Prometheus: name, kind, unit and meaning of each metric, and the event that sets it. Pure: no I/O.

The driver's listener (``springtide.ray.train.trainer``) is built from the table, and the files in deploy/monitoring/ use only
its metrics. Names follow Prometheus: base units at the end, ``_total`` for counters. Each metric has the label ``run``; a few
have one more label, with a fixed set of values.
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
"""Prefix of a metric's name as Ray exports it."""
RUN = "run"
"""The label that every metric has; its value is the run's name."""
CAUSES = (
    *("lost nodes", "unfit node", "store", "failed workers", "out of memory", "start-up", "hung", "given up"),
    "other",
)
"""The allowed values of the metric label ``cause``."""


class PrometheusMetric(NamedTuple):
    """A row of the table of metrics: a metric, and an event that sets it."""

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    meaning: str
    event: type[Event]
    value: Callable[[Any], float]
    """Function from the event to the gauge's new value, or to the increase of the counter."""
    label: str = ""
    """Name of the second label; empty for none."""
    label_of: Callable[[Any], str] = lambda event: ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the metric's labels."""
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
"""A metric that several events set has several rows, with the same name, kind, unit and labels. Only its first row states the
meaning."""


def rows() -> list[PrometheusMetric]:
    """Return the first row of each metric, in the order of ``PROMETHEUS``.

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
    """Yield (metric, its labels without the run, value) of each metric that an event sets. Values that are not finite, and
    counters that would not grow, are left out.

    Args:
        event: any event of a run.
    """
    for one in PROMETHEUS:
        if isinstance(event, one.event):
            value = float(one.value(event))
            if math.isfinite(value) and (value or one.kind == "gauge"):
                yield one, {one.label: one.label_of(event)} if one.label else {}, value
