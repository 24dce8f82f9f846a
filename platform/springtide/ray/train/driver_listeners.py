"""Listeners of a run's events that need Ray: evaluations in the background, and metrics for Prometheus. Only the driver uses
them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Self

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.config import Config
from springtide.events import Evaluated, Event, Failed, Left, Saved, Stopped
from springtide.ray.names import name_of
from springtide.storage import Folder
from springtide.tracking.prometheus import PREFIX, PROMETHEUS, RUN, observed
from springtide.training.evaluate import evaluate_checkpoint

_log = logging.getLogger(__name__)

# Evaluations in the background of training: one process evaluates committed checkpoints in turn, and no training step waits for
# it.

_NICE = 10
_LONGEST_S = 600.0
"""At the end of a run, the driver waits at most this long for the evaluation of a checkpoint; then it gives up the evaluation
[s]."""


class AsyncEvaluator:
    """The process that evaluates checkpoints, at a lower priority than training, with which it may share cores."""

    def __init__(self, config: Config, run: Folder) -> None:
        self._config, self._run = config, run
        os.nice(_NICE)

    def evaluate(self, name: str) -> Evaluated:
        """Evaluate checkpoint ``name``."""
        return evaluate_checkpoint(self._run, self._config, name, "cuda" if ray.get_gpu_ids() else "cpu")


@contextlib.contextmanager
def async_evaluations(
    config: Config, run: Folder, listen: Callable[[Event], None]
) -> Iterator[Callable[[Event], None]]:
    """Yield ``listen``, or with ``train.eval_async`` a listener that also starts evaluations in the background."""
    train = config.train
    if not (train.eval_async and train.eval_every and train.eval_tokens):
        yield listen
        return
    evaluations = AsyncEvaluations(config, run, listen)
    try:
        yield evaluations
    finally:
        evaluations.end()


class AsyncEvaluations:
    """A listener that passes on each event to ``listen``, and evaluates saved checkpoints in the background. It passes on the
    results too, in the order of their steps."""

    def __init__(self, config: Config, run: Folder, listen: Callable[[Event], None]) -> None:
        self._config, self._run, self._listen = config, run, listen
        self._due = config.train.eval_every
        self._next = ""
        """The checkpoint to evaluate next, empty if none."""
        self._actor: ActorHandle[AsyncEvaluator] | None = None
        self._under_way: tuple[str, ObjectRef[Evaluated]] | None = None
        """The checkpoint that is evaluated now, and the reference to its result."""

    def __call__(self, event: Event) -> None:
        """Pass on one event. If the event is a saved checkpoint that is due (``train.eval_every``), start its evaluation in the
        background."""
        if isinstance(event, Stopped) and event.status != "finished":
            self._give_up()
        elif isinstance(event, Evaluated | Stopped):
            self.settle()
        self._listen(event)
        if isinstance(event, Saved) and self._due <= event.step < self._config.num_steps:
            every = self._config.train.eval_every
            self._next, self._due = event.name, (event.step // every + 1) * every
        self._look(0.0)

    def settle(self) -> None:
        """Wait for the evaluation that runs. If another checkpoint waits to be evaluated, wait for its evaluation too."""
        while self._under_way is not None:
            self._look(_LONGEST_S)

    def end(self) -> None:
        """End the evaluating process."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._under_way = None

    def _give_up(self) -> None:
        """End the evaluations without waiting: a run that is stopped may have only seconds left. A result that has arrived is
        still reported."""
        self._next = ""
        self._look(0.0)
        if self._under_way is not None:
            _log.warning("checkpoint %s is not evaluated: the run stops", self._under_way[0])
        self.end()

    def _look(self, wait_s: float) -> None:
        if self._under_way is not None:
            name, answer = self._under_way
            done, _ = ray.wait([answer], timeout=wait_s)
            if done:
                self._take(name, answer)
            elif wait_s:
                _log.warning("checkpoint %s is not evaluated: it took more than %.0f s", name, wait_s)
                self.end()
        if self._under_way is None and self._next:
            name, self._next = self._next, ""
            self._actor = self._actor or self._started()
            self._under_way = name, self._actor.evaluate.remote(name)

    def _take(self, name: str, answer: ObjectRef[Evaluated]) -> None:
        self._under_way = None
        try:
            self._listen(dataclasses.replace(ray.get(answer), asynchronous=True))
        except (RayError, OSError) as error:  # one evaluation is missing; training goes on
            _log.warning("checkpoint %s is not evaluated: %s", name, str(error).strip().splitlines()[-1])
            self.end()

    def _started(self) -> ActorHandle[AsyncEvaluator]:
        config, gpus = self._config, self._config.train.eval_gpus
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        threads = {"env_vars": {"OMP_NUM_THREADS": str(config.parallel.threads)}} if config.parallel.threads else None
        name = name_of(config.run.id, "evaluator")
        options = {"name": name, "num_cpus": 0, "num_gpus": gpus, "runtime_env": threads}
        actor = ray.remote(AsyncEvaluator).options(**options, scheduling_strategy="DEFAULT" if gpus else here)
        return actor.remote(config, self._run)


# Event listener that sets a run's metrics in Ray, which exports them to Prometheus on every node. Only the driver calls it.
#
# Source: https://docs.ray.io/en/releases-2.60.0/ray-observability/user-guides/add-app-metrics.html

_REFRESH_S = 1.0
"""Ray's shortest report interval: a gauge that is set this often is in every report [s]."""
_RATES = ("tokens_per_second", "step_seconds", "data_wait_seconds", "mfu_ratio", "memory_bytes")
"""Gauges that say how a group trains. They are not set again while no group trains."""
_KNOWN: dict[str, Gauge | Counter] = {}
"""Name -> metric. A process has one metric of each name, however many runs it trains."""


class RayMetrics:
    """An event listener that exports the metrics of one run to Prometheus, until the context manager ends.

    Ray drops a gauge that was not set again within twice its report interval (10 s by default, at least 1 s). The number of
    workers may stay the same for hours, and a step may take a minute. So a thread sets all gauges again every second.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, tuple[Gauge, float]] = {}
        """Name -> gauge, newest value. No gauge has a label besides ``run``."""
        self._lock = threading.Lock()
        """Held while gauges are set, so that no older value is set after a newer one."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="springtide-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, event: Event) -> None:
        """Set the metrics that one event contains. Ray sends them later, from a thread of its own."""
        with self._lock:
            ended = _RATES if isinstance(event, Failed | Left | Stopped) else ()  # nothing trains now
            unset = [
                row.name for row in PROMETHEUS if isinstance(event, row.event)
            ]  # and may not be finite in this event
            for name in (*ended, *unset):
                self._gauges.pop(name, None)
            for metric, labels, value in observed(event):
                known, tags = _metric(metric.name), {RUN: self._run, **labels}
                if isinstance(known, Gauge):
                    known.set(value, tags)
                    self._gauges[metric.name] = known, value
                else:
                    known.inc(value, tags)

    def _refresh(self) -> None:
        while not self._ended.wait(_REFRESH_S):
            with self._lock:
                for gauge, value in self._gauges.values():
                    gauge.set(value, {RUN: self._run})


def _metric(name: str) -> Gauge | Counter:
    if name not in _KNOWN:
        row = next(one for one in PROMETHEUS if one.name == name)
        kind = Gauge if row.kind == "gauge" else Counter
        _KNOWN[name] = kind(PREFIX + name, f"{row.meaning} [{row.unit}]", row.labels)
    return _KNOWN[name]
