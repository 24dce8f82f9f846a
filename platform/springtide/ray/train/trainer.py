"""The driver's side of a run: start Ray Train, take its events, pass on requests, report how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow.fs
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.config import Config, redact
from springtide.distributed import backend, gpu_environment
from springtide.elastic import GroupRequest
from springtide.elastic.policy import Bounds
from springtide.errors import SpringtideError, StoppedWaiting, StoreLost, TrainingFailed, TrainingInterrupted
from springtide.events import Evaluated, Event, Saved, Stopped
from springtide.faults import armed
from springtide.ray.cluster.nodes import may_be_taken_away
from springtide.ray.cluster.stop_signals import stop_signals
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.names import name_of
from springtide.ray.train.adapter import SpringtideTrainer
from springtide.ray.train.failure_policy import fatal, first_failure, only_stores
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import MailboxClient, NoticeSender, Reply
from springtide.ray.train.process_pool import last_line
from springtide.ray.train.snapshot_client import snapshot_servers_follow
from springtide.ray.train.snapshot_saver import OrphanedRun
from springtide.ray.train.worker import work
from springtide.ray.train.worker_lender import WorkerLender
from springtide.storage import Folder
from springtide.tracking.prometheus import PREFIX, PROMETHEUS, RUN, observed
from springtide.training.compile_cache import key_of
from springtide.training.evaluate import evaluate_checkpoint

_POLL_S = 0.5
_END_S = 10.0
"""How long Ray Train's controller may take to see that all its workers are gone [s]."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def train(
    config: Config,
    run: Folder,
    term: int,
    labels: dict[str, str],
    owner: str,
    listen: Callable[[Event], None],
    workers: WorkerLender | None = None,
    begun_s: float = 0.0,
) -> None:
    """Train ``config`` to its end on the cluster that this process is connected to. ``listen`` receives every event. ``owner``
    is the id under which the run was claimed. ``workers`` are those of an earlier run; they train this run, and are kept for
    the next. ``begun_s``: when the run was first started, seconds since 1970, if it has a deadline.

    SIGINT and SIGTERM ask for a checkpoint and stop; a second one raises KeyboardInterrupt at once. A worker's
    SpringtideError is raised as itself, any other error as TrainingFailed with its rank and trace.
    """
    if place := may_be_taken_away(ray.get_runtime_context().get_node_id()):
        _log.warning(
            "the driver is on spot node %s: if the node goes, the run stops and must be resumed; start the driver on a node "
            "that stays",
            place,
        )
    last, workers = workers is None, workers or WorkerLender()
    mailbox = workers.open_mailbox(config)
    job = TrainJob(for_workers(config), mailbox, labels, owner, armed(), begun_s, key_of(run, config))
    trainer = _trainer(run, term, job, workers)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # raised again below, in the caller's thread
            failure.append(error)
        finally:
            mailbox.post([])  # wakes the caller's thread, which waits for events

    thread = threading.Thread(target=fit, name="springtide-fit", daemon=True)
    follows = snapshot_servers_follow(run, mailbox, OrphanedRun(for_workers(config), run.url, owner))
    with follows, async_evaluations(config, run, listen) as on_event, stop_signals() as asked:
        thread.start()
        try:
            while thread.is_alive():
                _pass_on(mailbox, on_event)
                if asked.is_set():
                    asked.clear()
                    _answer(mailbox.ask(GroupRequest.STOP))
        except BaseException:
            workers.processes.close()
            thread.join(_END_S)
            workers.end()
            raise
        workers.processes.drop_unready()
        _pass_on(mailbox, on_event, wait_s=0.0)
        if last:
            workers.end()
        if failure and not isinstance(fatal(failure[0]), StoppedWaiting):
            raise _explain(failure[0]) from failure[0]


def _pass_on(mailbox: MailboxClient, on_event: Callable[[Event], None], wait_s: float = _POLL_S) -> None:
    for event in _answer(mailbox.take(wait_s)):
        on_event(event)


def _answer(reply: Reply[T]) -> T:
    """Wait for the mailbox's reply. Raises TrainingInterrupted if the mailbox's process has ended: its events are lost, but the
    run is not."""
    try:
        return reply.get()
    except RayActorError as error:
        raise TrainingInterrupted(
            "the run's mailbox, a process on the driver's node, has ended, perhaps for want of memory there: "
            f"{last_line(error)}; events that it held are lost, the trained state is not: resume with --resume"
        ) from error


def for_workers(config: Config) -> Config:
    """Return the config without the secrets that no worker needs: workers read no corpus and report to no MLflow."""
    shown = redact(config)
    return config.model_copy(update={"corpus": shown.corpus, "track": shown.track})


def _trainer(run: Folder, term: int, job: TrainJob, workers: WorkerLender) -> SpringtideTrainer:
    config, elastic = job.config, job.config.elastic
    # for Ray Train's own state. The run's name has the term, because Ray resumes by itself under a name that it has seen
    filesystem = None if run.is_local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(run.fs))
    resources = {"CPU": elastic.cpus_per_worker}
    if elastic.gpus_per_worker:
        resources["GPU"] = elastic.gpus_per_worker
    bounds = Bounds(
        elastic.min_workers,
        elastic.max_workers,
        worker_multiple=max(1, config.parallel.shards),
        settle_s=float(elastic.settle),
        reserve_s=float(elastic.reserve),
        grow=elastic.grow,
        wait_s=float(elastic.wait) or math.inf,
        lanes=config.stream.num_lanes,
        cluster_is_shared=workers.share is not None,
    )
    return SpringtideTrainer(
        functools.partial(work, job),
        job=job,
        bounds=bounds,
        watches=_watches(config, job.mailbox),
        workers=workers,
        # shown by Ray's dashboard; the workers read ``job`` instead
        train_loop_config={"config": redact(config).model_dump(mode="json"), "labels": job.labels, "owner": job.owner},
        torch_config=TorchConfig(backend=backend("cuda" if elastic.gpus_per_worker else "cpu"), timeout_s=600),
        scaling_config=ScalingConfig(
            num_workers=(elastic.min_workers, elastic.max_workers),
            use_gpu=bool(elastic.gpus_per_worker),
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name=f"{config.run.id}-{term}",
            storage_path=run.where("ray"),
            storage_filesystem=filesystem,
            worker_runtime_env=worker_environment(config),
            failure_config=FailureConfig(max_failures=elastic.max_failures),
        ),
    )


def worker_environment(config: Config) -> dict[str, dict[str, str]]:
    """Return the Ray runtime environment of the worker processes, which is set before torch is imported. Ray Train does not
    override it; Ray's own value would have NCCL's watchdog end the processes. Empty without GPUs: a process with a runtime
    environment starts more slowly."""
    if not config.elastic.gpus_per_worker:
        return {}
    return {"env_vars": gpu_environment(config.elastic.env, config.parallel.deterministic)}


def _watches(config: Config, mailbox: MailboxClient) -> PreemptionWatchers | None:
    elastic = config.elastic
    if elastic.notices == "off":
        return None
    where = elastic.metadata_url, elastic.notice_file, elastic.leave_on_rebalance
    return PreemptionWatchers(elastic.notices, *where, NoticeSender(mailbox.name, mailbox.key), config.run.id)


def _explain(error: BaseException) -> BaseException:
    """Return the error to raise for an error of Ray Train. A SpringtideError is returned as itself. Any other becomes
    TrainingFailed with the trace of the rank that caused it, or StoreLost if only a store failed."""
    ours = fatal(error)
    if ours is not None:
        return type(ours)(*ours.args)
    kind = StoreLost if only_stores(error) is not None else TrainingFailed
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, cause = first_failure(failures)
        return kind(f"rank {rank} failed, and restarts did not help: {cause}")
    return error if isinstance(error, SpringtideError | KeyboardInterrupt) else TrainingFailed(str(error))


# Evaluations in the background of training: one process evaluates committed checkpoints in turn, and no step waits.

_NICE = 10
_LONGEST_S = 600.0
"""How long the end of training waits for the evaluation of a checkpoint [s]."""


class AsyncEvaluator:
    """The evaluating process, at a lower priority than training where they share cores."""

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
    """A listener in front of another: passes on events and adds evaluations, in the order of their steps."""

    def __init__(self, config: Config, run: Folder, listen: Callable[[Event], None]) -> None:
        self._config, self._run, self._listen = config, run, listen
        self._due = config.train.eval_every
        self._next = ""
        """The checkpoint to evaluate next, empty if none."""
        self._actor: ActorHandle[AsyncEvaluator] | None = None
        self._under_way: tuple[str, ObjectRef[Evaluated]] | None = None
        """The checkpoint that is evaluated now, and the reference to its result."""

    def __call__(self, event: Event) -> None:
        """Handle one event."""
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
        """Wait for the running evaluation, and the next one."""
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
        except (RayError, OSError) as error:  # one evaluation is missing; training is not affected
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

_KNOWN: dict[str, Gauge | Counter] = {}
"""Name -> metric. A process has one metric of each name, however many runs it trains."""


class RayMetrics:
    """Exports the metrics of one run."""

    def __init__(self, run: str) -> None:
        self._run = run

    def __call__(self, event: Event) -> None:
        """Set the metrics that one event contains. Ray sends them later, from a thread of its own."""
        for metric, labels, value in observed(event):
            known, tags = _metric(metric.name), {RUN: self._run, **labels}
            if isinstance(known, Gauge):
                known.set(value, tags)
            else:
                known.inc(value, tags)


def _metric(name: str) -> Gauge | Counter:
    if name not in _KNOWN:
        row = next(one for one in PROMETHEUS if one.name == name)
        kind = Gauge if row.kind == "gauge" else Counter
        _KNOWN[name] = kind(PREFIX + name, f"{row.meaning} [{row.unit}]", row.labels)
    return _KNOWN[name]
