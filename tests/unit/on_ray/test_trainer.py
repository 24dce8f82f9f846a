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
from springtide.on_ray._ray_private import CONTROLLER_LOG, WorkerHealthCheckFailedError
from springtide.on_ray.train import trainer
from springtide.on_ray.train.process_pool import StartCancelledError
from springtide.on_ray.train.worker import TrainJob
from springtide.on_ray.train.worker_lender import WorkerLender
from springtide.store import Folder


def test_a_mailbox_that_was_killed_ends_the_run_with_what_happened_and_what_to_do() -> None:
    def get() -> object:
        raise ActorDiedError

    mailbox: Any = SimpleNamespace(take=lambda wait_s: SimpleNamespace(get=get))
    with pytest.raises(TrainingInterrupted, match=r"mailbox, a process on the driver's node, has ended.*--resume"):
        trainer._pass_on(mailbox, lambda event: None)


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(StoppedWaiting("asked to"), False), (StartCancelledError("asked to"), False), (OSError(), True)],
)
def test_a_stop_that_was_asked_for_leaves_no_stack_trace(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    log, quiet = logging.getLogger(CONTROLLER_LOG), trainer._WithoutStops()
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


def test_ray_shows_no_password_and_workers_get_none_that_they_do_not_need(tmp_path: Path) -> None:
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


def test_a_run_that_ends_for_want_of_a_store_says_so_by_its_error() -> None:
    away = ConnectionError("could not connect to the endpoint URL")
    assert isinstance(trainer._explain(WorkerGroupError("", {0: away})), StoreLost)
    for failures in ({0: ValueError("a bug")}, {0: away, 1: ValueError("a bug")}):
        found = trainer._explain(WorkerGroupError("", failures))
        assert type(found) is TrainingFailed
        assert "rank 0 failed" in str(found)


def test_a_run_that_ends_says_which_process_died_and_not_which_heard_of_it() -> None:
    died = WorkerHealthCheckFailedError("A worker health check failed.", RuntimeError("it died: killed by SIGSEGV"))
    closed = RuntimeError("Connection closed by peer [10.0.0.4]:41724")
    found = str(trainer._explain(WorkerGroupError("", {0: closed, 3: died})))
    assert found.startswith("rank 3 failed, and restarts did not help: ")
    assert "killed by SIGSEGV" in found
