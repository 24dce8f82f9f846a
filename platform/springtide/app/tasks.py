"""Evaluate a checkpoint on tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from springtide.app.train import mlflow_uri
from springtide.checkpoint.format import step_of
from springtide.errors import CheckpointError, ConfigError, explain, redacted
from springtide.events import Stopped
from springtide.run.folder import Run
from springtide.run.task_scores import TaskScore, TaskScores, write_task_scores
from springtide.store.errors import may_pass
from springtide.track.journal_reader import JournalReader
from springtide.track.mlflow_client import send_scores

_LOOK_S = 5.0
"""Time between two looks at a run that trains [s]."""
_log = logging.getLogger(__name__)
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}


def evaluate_tasks(
    run: Run,
    tasks: Sequence[str],
    task_files: str = "",
    step: int | None = None,
    limit: int = 0,
    batch_size: int = 8,
    trust_code: bool = False,
    tracking_uri: str = "",
    processes: int = 1,
) -> tuple[TaskScores, list[str]]:
    """Evaluate a checkpoint on tasks of lm-evaluation-harness, in fp32. Nothing is fetched.

    The scores go to ``<run>/tasks/step-<step>.json``, into the run's report, and to its MLflow run.

    Args:
        run: the run.
        tasks: names of tasks, groups or tags.
        task_files: path of a folder of task files; empty for those of lm-evaluation-harness alone.
        step: step of the checkpoint; None: the newest.
        limit: documents of each task; 0: all.
        batch_size: requests that are computed together.
        trust_code: run the code that task files name, and that of the user's own model.
        tracking_uri: MLflow URI; if empty: the config's, else the environment's.
        processes: number of processes that share the batches, each with a copy of the model; 1: this process computes.

    Returns:
        The scores of this evaluation, and remarks for the user.

    Raises:
        ConfigError: lm-evaluation-harness is missing, a task is not known, cannot be used or names code that is not trusted,
            a number is not positive, or as ``Run.generate``.
        CheckpointError: bytes of the checkpoint are bad.
    """
    _check(tasks, limit, batch_size, processes)
    checkpoint = run.checkpoint_at(step)
    ready = _tasks(tasks, task_files, trust_code)
    return _Evaluation(run, ready, limit, batch_size, trust_code, tracking_uri, processes).score(checkpoint)


def follow_tasks(
    run: Run,
    tasks: Sequence[str],
    task_files: str = "",
    limit: int = 0,
    batch_size: int = 8,
    trust_code: bool = False,
    tracking_uri: str = "",
    processes: int = 1,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[TaskScores, list[str]]]:
    """Evaluate each new checkpoint of a run while it trains, and yield as ``evaluate_tasks`` returns. Of several new ones the
    newest is taken. Each look reads only what is new in the journal. Ends with the run; a run that was stopped may go on, and
    is waited for.

    Args:
        run: the run; its first checkpoint is waited for.
        tasks: as for ``evaluate_tasks``, and so are the arguments that follow.
        wait: sleeps between two looks at the run [s].

    Raises:
        ConfigError: as ``evaluate_tasks``.
        OSError: of a store, if it does not pass by itself. Others are warned of, and the look is tried again.
    """
    _check(tasks, limit, batch_size, processes)
    ready = _tasks(tasks, task_files, trust_code)
    evaluation = _Evaluation(run, ready, limit, batch_size, trust_code, tracking_uri, processes)
    done, journal, end, is_away = "", JournalReader(run.folder), None, False
    while True:
        try:
            journal.read()  # before the last checkpoint is looked for
            for event in journal.new.events:
                if isinstance(event, Stopped) and (end is None or event.term >= end.term):
                    end = event
            newest = (run.checkpoints or [""])[-1]
            found = _scored(evaluation, newest) if newest != done else None
        except OSError as error:
            if not may_pass(error):
                raise
            if not is_away:
                text = redacted(f"{type(error).__name__}: {error}")
                _log.warning("%s: %s; tried again every %g s", redacted(run.folder.url), text, _LOOK_S)
            is_away = True
            wait(_LOOK_S)
            continue
        is_away = False
        if newest != done:
            done = newest
            if found is not None:
                yield found
        elif end is not None and end.status == "finished":
            return
        else:
            wait(_LOOK_S)


def _scored(evaluation: _Evaluation, checkpoint: str) -> tuple[TaskScores, list[str]] | None:
    """Evaluate a checkpoint of a run that trains; None, with a warning, for one that is damaged or was removed meanwhile."""
    try:
        return evaluation.score(checkpoint)
    except CheckpointError as error:
        _log.warning("%s is not evaluated: %s", checkpoint, error)
    except (ConfigError, FileNotFoundError) as error:
        if checkpoint in evaluation.run.checkpoints:
            raise
        _log.warning("%s is not evaluated, it was removed meanwhile: %s", checkpoint, error)
    return None


def _check(tasks: Sequence[str], limit: int, batch_size: int, processes: int) -> None:
    if not tasks:
        raise ConfigError(explain("tasks", "", "names no task", "give names, with commas between them"))
    for name, value, least in (("limit", limit, 0), ("batch_size", batch_size, 1), ("processes", processes, 1)):
        if value < least:
            raise ConfigError(explain(name, value, f"must be at least {least}", "give a positive number"))


def _tasks(names: Sequence[str], task_files: str, trust_code: bool) -> Any:
    """Load the tasks. ConfigError if lm-evaluation-harness is missing, or as ``harness.Tasks``."""
    with _offline():
        try:
            from springtide.generation import harness
        except ImportError as error:
            problem = f"needs lm-evaluation-harness, which cannot be imported ({error})"
            remedy = "pip install 'springtide[evaluate]'"
            raise ConfigError(explain("tasks", ",".join(names), problem, remedy)) from None
        return harness.Tasks(names, task_files, trust_code)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """How the checkpoints of a run are evaluated on loaded tasks; the fields are as for ``evaluate_tasks``."""

    run: Run
    ready: Any
    limit: int
    batch_size: int
    trust_code: bool
    tracking_uri: str
    processes: int

    def score(self, checkpoint: str) -> tuple[TaskScores, list[str]]:
        """Evaluate a checkpoint, and keep its scores."""
        run, step, share = self.run, step_of(checkpoint), None
        with _offline(), contextlib.ExitStack() as stack:
            from springtide.generation import harness
            from springtide.generation.model_pool import model_pool
            from springtide.run.text import open_text, text_model

            model = text_model(run, step, self.trust_code)
            if self.processes > 1:
                open_copy = functools.partial(open_text, run.folder.url, step, self.trust_code)
                share = stack.enter_context(model_pool(open_copy, self.processes))
            scored = self.ready.score(model, self.limit, self.batch_size, share)
        now_s = time.time()
        found = TaskScores(
            checkpoint=checkpoint,
            tasks={
                task: TaskScore(**one._asdict(), limit=self.limit, harness=harness.VERSION, time_s=now_s)
                for task, one in scored.items()
            },
        )
        write_task_scores(run.folder, found)
        run.write_report()
        problem = send_scores(run.folder, mlflow_uri(run.config, self.tracking_uri), found.figures(), found.step, now_s)
        return found, [problem] if problem else []


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Tell Hugging Face's packages, which read it when they are imported, to fetch nothing."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
