"""The driver's side of a run: start Ray Train, take its events, pass on requests, report how it ended."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import TypeVar

import pyarrow.fs
import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from springtide.config import Config, redact
from springtide.distributed import backend, gpu_environment
from springtide.elastic import GroupRequest
from springtide.elastic.policy import Bounds
from springtide.errors import SpringtideError, StoppedWaiting, StoreLost, TrainingFailed, TrainingInterrupted
from springtide.events import Event
from springtide.faults import armed
from springtide.ray.cluster.nodes import may_be_taken_away
from springtide.ray.cluster.stop_signals import stop_signals
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.train.driver_listeners import async_evaluations
from springtide.ray.train.failure_policy import fatal, first_failure, only_stores
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import MailboxClient, NoticeSender, Reply
from springtide.ray.train.process_pool import last_line
from springtide.ray.train.ray_adapter import SpringtideTrainer
from springtide.ray.train.snapshot_client import snapshot_servers_follow
from springtide.ray.train.snapshot_saver import OrphanedRun
from springtide.ray.train.worker import work
from springtide.ray.train.worker_lender import WorkerLender
from springtide.storage import Folder
from springtide.training.compile_cache import key_of

_POLL_S = 0.5
_END_S = 10.0
"""How long Ray Train's controller may take to notice that all its workers are gone [s]."""
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
    is the id under which the run was claimed. ``workers`` are the workers of an earlier run; they train this run, and are kept
    for the next run. ``begun_s``: when the run was first started, seconds since 1970, if it has a deadline.

    SIGINT and SIGTERM ask for a checkpoint and stop; a second signal raises KeyboardInterrupt at once. A worker's
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
    """Return the config without the secrets that workers do not need: workers read no corpus and report to no MLflow."""
    shown = redact(config)
    return config.model_copy(update={"corpus": shown.corpus, "track": shown.track})


def _trainer(run: Folder, term: int, job: TrainJob, workers: WorkerLender) -> SpringtideTrainer:
    config, elastic = job.config, job.config.elastic
    # file system for Ray Train's own state. The run's name below has the lease's number (term), because Ray would resume by
    # itself under a name that it has seen
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
    """Return the Ray runtime environment of the worker processes: variables that are set before torch is imported. Ray Train
    does not override them; with Ray's own value, NCCL's watchdog would end the processes. Empty without GPUs, because a process
    with a runtime environment starts more slowly."""
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
