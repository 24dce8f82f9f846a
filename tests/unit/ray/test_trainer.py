"""The driver's side of a run, with its mailbox faked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train import WorkerGroupError

from springtide.config import Config
from springtide.errors import StoppedWaiting, StoreLost, TrainingFailed, TrainingInterrupted, redacted
from springtide.ray._ray_private import CONTROLLER_LOG, WorkerHealthCheckFailedError
from springtide.ray.train import ray_adapter, trainer
from springtide.ray.train.job import TrainJob
from springtide.ray.train.process_pool import StartCancelledError
from springtide.ray.train.worker_lender import WorkerLender
from springtide.storage import Folder


def test_a_killed_mailbox_ends_the_run_with_a_remedy() -> None:
    """A mailbox that was killed ends the run with what happened and what to do."""

    def get() -> object:
        raise ActorDiedError

    mailbox: Any = SimpleNamespace(take=lambda wait_s: SimpleNamespace(get=get))
    with pytest.raises(TrainingInterrupted, match=r"mailbox.*--resume"):
        trainer._pass_on(mailbox, lambda event: None)


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(StoppedWaiting("asked to"), False), (StartCancelledError("asked to"), False), (OSError(), True)],
)
def test_a_stop_that_was_asked_for_leaves_no_stack_trace(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    log, quiet = logging.getLogger(CONTROLLER_LOG), ray_adapter._WithoutStops()
    log.addFilter(quiet)
    log.addHandler(caplog.handler)
    try:
        raise error
    except Exception as raised:
        log.exception("Error in control loop iteration: %s", raised)
    finally:
        log.removeFilter(quiet)
        log.removeHandler(caplog.handler)
    assert bool(caplog.records) is is_logged


def test_an_error_of_a_listener_is_its_own() -> None:
    mailbox: Any = SimpleNamespace(take=lambda wait_s: SimpleNamespace(get=lambda: ["an event"]))

    def fail(event: object) -> None:
        raise ActorDiedError  # an actor of the listener

    with pytest.raises(ActorDiedError):
        trainer._pass_on(mailbox, fail)


def test_ray_shows_no_password_to_workers_without_need(tmp_path: Path) -> None:
    """Ray shows no password and workers get none that they do not need."""
    uri, source = "postgresql://ml:hunter2@db/mlflow", "https://u:hunter2@host/text.jsonl?sig=hunter2"
    needed = {"web": "https://u:needed@host/web?sig=needed", "code": "/data/code"}
    changes = {"track.mlflow_uri": uri, "corpus.source": source, "stream.mixture": needed, "run.id": "mine"}
    config = Config().override({**changes, "run.root": str(tmp_path), "elastic.notices": "off"})
    job = TrainJob(trainer.for_workers(config), mailbox=None, labels={}, owner="me")  # type: ignore[arg-type]
    made = trainer._trainer(Folder(str(tmp_path / "mine")), 1, job, WorkerLender())
    assert job.config.stream.mixture == needed, "a worker reads with it"
    assert (job.config.corpus.source, job.config.track.mlflow_uri) == (redacted(source), redacted(uri))
    assert "hunter2" not in repr(job)
    shown = json.dumps(made.train_loop_config) + repr(made.run_config)
    assert "***@host/web" in shown
    assert "hunter2" not in shown
    assert "needed" not in shown


def test_a_run_that_lacks_a_store_names_it() -> None:
    """A run that ends for want of a store says so by its error."""
    away = ConnectionError("could not connect to the endpoint URL")
    assert isinstance(trainer._explain(WorkerGroupError("", {0: away})), StoreLost)
    for failures in ({0: ValueError("a bug")}, {0: away, 1: ValueError("a bug")}):
        found = trainer._explain(WorkerGroupError("", failures))
        assert type(found) is TrainingFailed
        assert "rank 0 failed" in str(found)


def test_a_failed_run_names_the_process_that_died() -> None:
    """A run that ends says which process died and not which heard of it."""
    died = WorkerHealthCheckFailedError("A worker health check failed.", RuntimeError("it died: killed by SIGSEGV"))
    closed = RuntimeError("Connection closed by peer [10.0.0.4]:41724")
    found = str(trainer._explain(WorkerGroupError("", {0: closed, 3: died})))
    assert found.startswith("rank 3 failed")
    assert "killed by SIGSEGV" in found
