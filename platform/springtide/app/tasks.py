"""Evaluate a checkpoint on tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from springtide.app.train import mlflow_uri
from springtide.errors import ConfigError, explain
from springtide.run.folder import Run
from springtide.run.task_scores import TaskScore, TaskScores, write_task_scores
from springtide.track.mlflow_sink import send_scores

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
) -> tuple[TaskScores, list[str]]:
    """Evaluate a checkpoint on tasks of lm-evaluation-harness, in this process, in fp32. Nothing is fetched.

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

    Returns:
        The scores of this evaluation, and remarks for the user.

    Raises:
        ConfigError: lm-evaluation-harness is missing, a task is not known, cannot be used or names code that is not trusted,
            a number is not positive, or as ``Run.generate``.
        CheckpointError: bytes of the checkpoint are bad.
    """
    if not tasks:
        raise ConfigError(explain("tasks", "", "names no task", "give names, with commas between them"))
    for name, value, least in (("limit", limit, 0), ("batch_size", batch_size, 1)):
        if value < least:
            raise ConfigError(explain(name, value, f"must be at least {least}", "give a positive number"))
    checkpoint = run.checkpoint_at(step)
    with _offline():
        try:
            from springtide.generation import harness
        except ImportError as error:
            problem = f"needs lm-evaluation-harness, which cannot be imported ({error})"
            remedy = "pip install 'springtide[evaluate]'"
            raise ConfigError(explain("tasks", ",".join(tasks), problem, remedy)) from None
        from springtide.run.text import text_model

        ready = harness.Tasks(tasks, task_files, trust_code)
        scored = ready.score(text_model(run, step, trust_code), limit, batch_size)
    now_s = time.time()
    found = TaskScores(
        checkpoint=checkpoint,
        tasks={
            task: TaskScore(**one._asdict(), limit=limit, harness=harness.VERSION, time_s=now_s)
            for task, one in scored.items()
        },
    )
    write_task_scores(run.folder, found)
    run.write_report()
    problem = send_scores(run.folder, mlflow_uri(run.config, tracking_uri), found.figures(), found.step, now_s)
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
