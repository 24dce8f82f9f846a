"""Scores of a checkpoint on tasks of lm-evaluation-harness: ``<run>/tasks/step-<step>.json``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from springtide.checkpoint.format import step_of
from springtide.store import Folder

TASKS = "tasks"
_FILE = re.compile(r"(step-\d+)\.json")
_Figure = Annotated[float, Field(allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1, max_length=300)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskScore(_Record):
    """The scores of a task, or of a group of tasks."""

    metrics: dict[_Name, _Figure]
    """Metric -> score; the name of a filter, unless it is ``none``, follows after a slash."""
    errors: dict[_Name, _Figure] = {}
    """Metric -> standard error, where there is one."""
    samples: int = Field(0, ge=0)
    """Number of documents; 0 for a group."""
    limit: int = Field(0, ge=0)
    """Most documents of each task that were asked for; 0: all."""
    version: str = Field("", max_length=100)
    """The task's own version."""
    harness: str = Field("", max_length=100)
    """The version of lm-evaluation-harness."""
    time_s: _Figure = 0.0
    """When it was evaluated, seconds since 1970."""


class TaskScores(_Record):
    """The scores of a checkpoint."""

    checkpoint: str = Field(pattern=r"^step-\d+$")
    tasks: dict[_Name, TaskScore]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return step_of(self.checkpoint) or 0

    def figures(self) -> dict[str, float]:
        """Return the scores by their names in MLflow, ``task/<task>/<metric>``."""
        return {
            f"task/{task}/{name}": one for task, scores in self.tasks.items() for name, one in scores.metrics.items()
        }

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield step, task, metric, score with its standard error, and number of documents, as text."""
        for task, scores in self.tasks.items():
            for name, figure in scores.metrics.items():
                error = f" ± {scores.errors[name]:.4f}" if name in scores.errors else ""
                yield str(self.step), task, name, f"{figure:.4f}{error}", str(scores.samples or "")


_SCORES = TypeAdapter(TaskScores)


def read_task_scores(run: Folder) -> list[TaskScores]:
    """Return the scores of a run's checkpoints, by step. Raises DamagedFile, which names the file."""
    folder = run / TASKS
    names = [name for name in folder.names() if _FILE.fullmatch(name)]
    return sorted((folder.read_as(name, _SCORES) for name in names), key=lambda one: one.step)


def write_task_scores(run: Folder, scores: TaskScores) -> TaskScores:
    """Write the scores of a checkpoint, and return them with those that it already has on other tasks."""
    folder, name = run / TASKS, f"{scores.checkpoint}.json"
    before = folder.read_as(name, _SCORES).tasks if folder.exists(name) else {}
    together = TaskScores(checkpoint=scores.checkpoint, tasks={**before, **scores.tasks})
    folder.write_json(name, together.model_dump(mode="json"))
    return together
