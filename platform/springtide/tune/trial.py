"""A trial of a sweep: one point of the space (a value for each field), trained as its own run, and its outcome."""

from __future__ import annotations

import dataclasses
import math

from springtide.config import Config
from springtide.errors import ConfigError
from springtide.tune.space import Budget, Point, applied


def name_of(number: int) -> str:
    """Return the id of the run of trial ``number``."""
    return f"trial-{number:04d}"


def number_of(name: str) -> int:
    """Return the number of the trial ``name``, which may also be the name of its JSON file."""
    return int(name.removesuffix(".json").rpartition("-")[2])


def trial_config(base: Config, budget: Budget, run: str, point: Point) -> Config:
    """Return the config of a trial's run with the id ``run``: ``base`` with the values of ``point``, trained for
    ``budget.tokens_per_trial`` tokens and evaluated ``budget.rungs`` times. Raises ConfigError, which names the run, when that
    config is not valid."""
    try:
        config = applied(base, point).override({"train.total": budget.tokens_per_trial, "run.id": run})
        return config.override({"train.eval_every": max(1, config.num_steps // budget.rungs)})
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def other_seed(base: Config, point: Point, number: int) -> Point:
    """Return ``point`` with other seeds of the initial weights and of the data order: the seeds of ``base`` plus ``number``."""
    return {**point, "model.init_seed": base.model.init_seed + number, "stream.seed": base.stream.seed + number}


def member_config(base: Config, budget: Budget, run: str, point: Point, of: str) -> Config:
    """Return ``trial_config`` for a trial of a population: the run starts from the checkpoint ``of`` (if empty, from scratch).
    It saves at each evaluation, so that other trials can continue from its checkpoints."""
    config = trial_config(base, budget, run, point)
    every = config.train.eval_every
    return config.override({"train.start_from": of, "train.start_with": "state", "checkpoint.every_steps": every})


@dataclasses.dataclass(frozen=True)
class Rung:
    """The progress and objective of a trial at one of its evaluations."""

    step: int
    tokens: int
    value: float
    """The value of the sweep's objective."""


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial."""

    number: int
    point: Point
    status: str
    """``finished``, ``stopped`` (by a scheduler or the budget), ``failed``, or ``waiting`` (never started)."""
    rungs: tuple[Rung, ...] = ()
    reason: str = ""
    """Why the trial failed, or by whom and at which step it was stopped."""
    worker_s: float = 0.0
    """Worker-seconds for which the trial held workers."""
    dollars: float = 0.0
    restarts: int = 0
    secondary: float = math.nan
    """The value of the sweep's second objective; NaN if there is none."""
    repeats: int = -1
    """Number of the finalist whose point this trial trains again with other seeds; -1 if it repeats no
    finalist."""
    lineage: tuple[str, ...] = ()
    """URLs of the checkpoints of other trials that the trial continued from, oldest first."""

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def state(self) -> str:
        """The status with its reason, as text."""
        return f"{self.status}: {self.reason}" if self.reason else self.status

    @property
    def value(self) -> float:
        """The objective at the trial's latest evaluation; NaN before its first."""
        return self.rungs[-1].value if self.rungs else math.nan

    @property
    def tokens(self) -> int:
        """Tokens that the trial had trained on at its latest evaluation; 0 before its first."""
        return self.rungs[-1].tokens if self.rungs else 0
