"""A trial: one point of the space as a run of its own, and what became of it."""

from __future__ import annotations

import dataclasses
import math

from springtide.config import Config
from springtide.tuning.space import Budget, Point, applied


def name_of(number: int) -> str:
    """The id of a trial's run."""
    return f"trial-{number:04d}"


def number_of(name: str) -> int:
    """Of the trial that ``name``, or a file of that name, is of."""
    return int(name.removesuffix(".json").rpartition("-")[2])


def trial_config(base: Config, budget: Budget, run: str, point: Point) -> Config:
    """The config of the run ``run`` of a trial: ``base`` at ``point``, as long as the budget says, evaluated at each rung.
    ConfigError when there is no such config."""
    config = applied(base, point).override({"train.total": budget.tokens_per_trial, "run.id": run})
    return config.override({"train.eval_every": max(1, config.num_steps // budget.rungs)})


def other_seed(base: Config, point: Point, number: int) -> Point:
    """The point with the ``number``-th of other seeds, of weights and of samples."""
    return {**point, "model.init_seed": base.model.init_seed + number, "stream.seed": base.stream.seed + number}


def member_config(base: Config, budget: Budget, run: str, point: Point, of: str) -> Config:
    """The same in a population: it begins with the checkpoint ``of``, if that is not empty, and saves at each rung, for others
    to go on from."""
    config = trial_config(base, budget, run, point)
    every = config.train.eval_every
    return config.override({"train.start_from": of, "train.start_with": "state", "checkpoint.every_steps": every})


@dataclasses.dataclass(frozen=True)
class Rung:
    """A trial at one of its evaluations."""

    step: int
    tokens: int
    value: float
    """Of the objective."""


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial."""

    number: int
    point: Point
    status: str
    """finished, stopped (by a scheduler or the budget), failed, or waiting (never begun)."""
    rungs: tuple[Rung, ...] = ()
    reason: str = ""
    """Why it failed."""
    worker_s: float = 0.0
    """Worker-seconds held."""
    dollars: float = 0.0
    restarts: int = 0
    secondary: float = math.nan
    """Of the second objective, if there is one."""
    repeats: int = -1
    """The number of the trial whose point it is with other seeds; -1 for one of its own."""
    lineage: tuple[str, ...] = ()
    """URLs of the checkpoints of other trials that it went on from, oldest first."""

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def value(self) -> float:
        """Of the objective at the last rung; no number before the first."""
        return self.rungs[-1].value if self.rungs else math.nan

    @property
    def tokens(self) -> int:
        """Trained on until the last rung."""
        return self.rungs[-1].tokens if self.rungs else 0
