"""What a sweep looks for, and where: a table of fields, an objective, a budget, as the files of ``tune_spaces/`` have them."""

from __future__ import annotations

import dataclasses
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, explain

_KINDS = ("uniform", "log_uniform", "choice")
METRICS = ("heldout_loss", "heldout_bits_per_byte", "loss")
"""What an objective may be: of the held-out rows, or the last step's."""
COSTS = ("step_worker_s", "memory_bytes")
"""What else a sweep may minimise: worker-seconds of a step, the most that a worker's device held."""

WEIGHT = "stream.weights."
"""What the name of a corpus follows, in a field."""
Point = dict[str, Any]
"""A value for each field of a space."""


@dataclasses.dataclass(frozen=True)
class Range:
    """One field's part of the space."""

    field: str
    kind: str
    values: tuple[Any, ...]
    """Low and high, or the choices."""

    @property
    def is_whole(self) -> bool:
        """Whether its values are integers."""
        return all(isinstance(end, int) for end in self.values)

    def at(self, share: float) -> Any:
        """What lies at a share of the way from the low end to the high one; of a range, not of choices."""
        low, high = self._ends
        value = low + (high - low) * share
        value = math.exp(value) if self.kind == "log_uniform" else value
        return round(value) if self.is_whole else float(f"{value:.6g}")

    def place(self, value: Any) -> float:
        """From 0 at the low end to 1 at the high one, in logs where it is drawn from in logs; a choice is the middle of its
        part. ValueError for a choice that is none."""
        if self.kind == "choice":
            return (list(map(_plain, self.values)).index(_plain(value)) + 0.5) / len(self.values)
        low, high = self._ends
        return float(((math.log(value) if self.kind == "log_uniform" else value) - low) / (high - low))

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = map(math.log, self.values) if self.kind == "log_uniform" else self.values
        return low, high


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a sweep may spend; 0 is no limit."""

    trials: int
    tokens_per_trial: int
    rungs: int = 4
    """Evaluations of a trial, evenly spaced, at which a scheduler may stop it."""
    reduction: int = 2
    """At a rung one trial in so many goes on, by ASHA and HyperBand; the next at which they judge is so many times as late."""
    tokens: float = 0.0
    """Of all trials together."""
    worker_hours: float = 0.0
    dollars: float = 0.0
    finalists: int = 0
    """So many of the best points are trained again when all are done, with other seeds: what differs by less is noise."""
    seeds: int = 3
    """With so many in all."""
    min_improvement_per_dollar: float = 0.0
    """Of the objective, for a dollar, or a worker-hour where no price is set: no trial is begun that promises less."""


class SecondaryObjective(NamedTuple):
    """A second objective."""

    metric: str
    mode: Literal["min", "max"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All of a table, checked."""

    space: tuple[Range, ...]
    metric: str
    mode: Literal["min", "max"]
    budget: Budget
    where: Callable[[Point], bool] | None = None
    """Which points to try, where not all."""
    secondary: SecondaryObjective | None = None
    """What is weighed against the objective; schedulers do not see it."""

    @property
    def worst(self) -> float:
        """What a trial that failed counts as."""
        return math.inf if self.mode == "min" else -math.inf

    def better(self, one: float, other: float) -> bool:
        """Whether the objective ``one`` is better than ``other``."""
        return one < other if self.mode == "min" else one > other

    def promise(self, value: float) -> float:
        """The more the better."""
        return -value if self.mode == "min" else value


def applied(base: Config, point: Point) -> Config:
    """``base`` at ``point``. A field may be the weight of one corpus of the mixture; those that are not named weigh 1."""
    weights = {field.removeprefix(WEIGHT): value for field, value in point.items() if field.startswith(WEIGHT)}
    changes = {field: value for field, value in point.items() if not field.startswith(WEIGHT)}
    for name, value in weights.items():
        if name not in base.stream.mixture:
            remedy = configs.nearest(name, base.stream.mixture)
            raise ConfigError(explain(f"{WEIGHT}{name}", value, "is of no corpus of stream.mixture", remedy))
    if weights:
        changes["stream.weights"] = [{"shares": {**dict.fromkeys(base.stream.mixture, 1.0), **weights}}]
    return base.override(changes)


def _plain(value: Any) -> Any:
    """A tuple comes back from a file as a list."""
    return list(value) if isinstance(value, tuple) else value


def read_file(path: str, base: Config) -> Sweep:
    """The table in the Python file ``path``: SPACE, OBJECTIVE, BUDGET, and WHERE if it has one, a function of a point.
    ConfigError for what is missing in it or wrong."""
    if not Path(path).is_file():
        near = sorted(str(one) for one in Path(path).parent.glob("*.py")) if Path(path).parent.is_dir() else []
        raise ConfigError(explain("--space", path, "is no file", configs.nearest(path, near)))
    try:
        table = runpy.run_path(path)
    except Exception as error:
        raise ConfigError(
            explain("--space", path, f"cannot be run ({type(error).__name__}: {error})", "mend it")
        ) from None
    return read(table, base)


def read(table: Mapping[str, Any], base: Config) -> Sweep:
    """The same of a table's names and values."""
    for name in ("SPACE", "OBJECTIVE", "BUDGET"):
        if not isinstance(table.get(name), Mapping):
            raise ConfigError(explain(name, table.get(name), "is no table", "see the files of tune_spaces/"))
    space = read_space(table["SPACE"], base)
    if not space:
        raise ConfigError(explain("SPACE", {}, "names no field", "give at least one"))
    metric, mode = _objective("OBJECTIVE", table["OBJECTIVE"], METRICS)
    secondary = table["OBJECTIVE"].get("secondary")
    if secondary is not None:
        secondary = SecondaryObjective(*_objective("OBJECTIVE.secondary", secondary, COSTS))
    return Sweep(tuple(space), metric, mode, read_budget(table["BUDGET"], base), table.get("WHERE"), secondary)


def _objective(name: str, table: Any, known: Sequence[str]) -> tuple[str, Literal["min", "max"]]:
    if not isinstance(table, Mapping):
        raise ConfigError(explain(name, table, "is no table", "see the files of tune_spaces/"))
    metric, mode = str(table.get("metric")), table.get("mode")
    if metric not in known:
        there = f"a trial reports {', '.join(known)}"
        raise ConfigError(explain(f"{name}.metric", metric, there, configs.nearest(metric, known)))
    if mode not in ("min", "max"):
        raise ConfigError(explain(f"{name}.mode", mode, "is neither min nor max", "what is best at its least is min"))
    return metric, mode


def read_budget(table: Mapping[str, Any], base: Config) -> Budget:
    """A budget; ConfigError when it holds less than one rung."""
    limits = [field.name for field in dataclasses.fields(Budget)]
    for name, value in table.items():
        if name not in limits:
            raise ConfigError(explain(f"BUDGET.{name}", value, "is no limit", configs.nearest(name, limits)))
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(explain(f"BUDGET.{name}", value, "must be a number, 0 or more", "0 is no limit"))
    budget = Budget(**{"trials": 0, "tokens_per_trial": 0, **table})
    for name, least in (("trials", 1), ("rungs", 1), ("reduction", 2), ("seeds", 2)):
        if getattr(budget, name) < least:
            raise ConfigError(explain(f"BUDGET.{name}", getattr(budget, name), f"must be {least} or more", "raise it"))
    least = base.tokens_after(1) * budget.rungs
    if budget.tokens_per_trial < least:
        problem = f"holds no {budget.rungs} rungs of a step: {least} tokens"
        raise ConfigError(
            explain("BUDGET.tokens_per_trial", budget.tokens_per_trial, problem, "raise it, or lower rungs")
        )
    if 0 < budget.tokens < budget.tokens_per_trial / budget.rungs:
        problem = f"is less than one rung of one trial, {budget.tokens_per_trial // budget.rungs}"
        raise ConfigError(explain("BUDGET.tokens", budget.tokens, problem, "raise it, or lower tokens_per_trial"))
    return budget


def read_space(table: Mapping[str, tuple[Any, ...]], base: Config) -> list[Range]:
    """The ranges of ``table``, each end tried on ``base``; ConfigError for an unknown field, kind or bound."""
    space = []
    for field, (kind, *values) in table.items():
        if kind not in _KINDS:
            raise ConfigError(explain(field, kind, f"kinds are {', '.join(_KINDS)}", configs.nearest(kind, _KINDS)))
        if kind != "choice" and (
            len(values) != 2 or not values[0] < values[1] or (kind == "log_uniform" and values[0] <= 0)
        ):
            raise ConfigError(explain(field, values, f"is no {kind} range", "give low < high, above 0 for log_uniform"))
        for value in values:
            applied(base, {field: value})
        space.append(Range(field, kind, tuple(values)))
    return space
