"""Define a sweep: the config fields to vary, the objective and the budget, read from a file such as those in
``tune_spaces/``."""

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
METRICS = ("heldout_loss", "heldout_bits_per_byte", "heldout_bits_per_byte_mean", "loss")
"""Possible objectives of a sweep. ``heldout_*`` objectives average over the held-out sets, weighted like the training mixture.
With the suffix ``_mean``, all held-out sets have equal weight. ``loss`` is the training loss of the last step."""
_OF_MIXTURE = ("heldout_loss", "heldout_bits_per_byte")
COSTS = ("step_worker_s", "memory_bytes")
"""Possible second objectives of a sweep: worker-seconds per step; peak memory of a worker's device [bytes]."""

WEIGHT = "stream.weights."
"""Prefix of a field that is the weight of a corpus in the data mixture; the corpus name follows."""
Point = dict[str, Any]
"""Config field -> value, for each field that a sweep varies."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a sweep's space allows for one config field."""

    field: str
    kind: str
    values: tuple[Any, ...]
    """The low and the high end of the range, or the choices."""

    @property
    def is_whole(self) -> bool:
        """Whether the values of the range or choices are integers."""
        return all(isinstance(end, int) for end in self.values)

    def at(self, share: float) -> Any:
        """Return the value at ``share`` (0 to 1) of the way from the low end to the high end; for ranges, not choices."""
        low, high = self._ends
        value = low + (high - low) * share
        value = math.exp(value) if self.kind == "log_uniform" else value
        return round(value) if self.is_whole else float(f"{value:.6g}")

    def known(self, value: Any) -> Any:
        """Return the field's value for a ``value`` that was read from a JSON file. For choices this is the choice that was
        written as ``value``, because JSON turns a tuple into a list. For a range it is ``value`` itself. Raises ValueError for
        an unknown choice."""
        if self.kind != "choice":
            return value
        return self.values[list(map(_plain, self.values)).index(_plain(value))]

    def clamped(self, value: float) -> float:
        """Return the value of the range that is nearest to ``value``; for ranges, not choices."""
        inside = min(max(value, self.values[0]), self.values[1])
        return round(inside) if self.is_whole else float(inside)

    def place(self, value: Any) -> float:
        """Return the position of ``value`` in the range: 0 at the low end, 1 at the high end, on a log scale for log_uniform.
        Choices are spread evenly: two choices are at 0.25 and 0.75. Raises ValueError for an unknown choice."""
        if self.kind == "choice":
            return (self.values.index(self.known(value)) + 0.5) / len(self.values)
        low, high = self._ends
        return float(((math.log(value) if self.kind == "log_uniform" else value) - low) / (high - low))

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = map(math.log, self.values) if self.kind == "log_uniform" else self.values
        return low, high


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a sweep may spend; for a limit, 0 means unlimited."""

    trials: int
    tokens_per_trial: int
    rungs: int = 4
    """Number of evaluations of a trial (rungs), evenly spaced; a scheduler may stop the trial at each of them."""
    reduction: int = 2
    """For ASHA and HyperBand: the best 1 / ``reduction`` of the trials continue beyond an evaluation. The next evaluation that
    stops trials comes after ``reduction`` times as many tokens."""
    tokens: float = 0.0
    """Limit on the tokens of all trials together."""
    worker_hours: float = 0.0
    dollars: float = 0.0
    finalists: int = 0
    """Number of best trials to repeat with other seeds when all trials are done, to see which differences are noise."""
    seeds: int = 3
    """Number of seeds with which each finalist (one of the best trials) is trained, including its first."""
    min_improvement_per_dollar: float = 0.0
    """Minimum gain of the objective per dollar, or per worker-hour if no price is set. When further trials are unlikely to gain
    so much, no more trial is started."""


class SecondaryObjective(NamedTuple):
    """A second objective of a sweep, such as memory."""

    metric: str
    mode: Literal["min", "max"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The checked definition of a sweep: its space, objectives, budget and filter."""

    space: tuple[Range, ...]
    metric: str
    mode: Literal["min", "max"]
    budget: Budget
    where: Callable[[Point], bool] | None = None
    """Function that returns whether to train at a point (WHERE); None: all points are accepted."""
    secondary: SecondaryObjective | None = None
    """Second objective, for the Pareto front; schedulers ignore it."""

    @property
    def worst(self) -> float:
        """The worst possible objective, which is assigned to a failed trial."""
        return math.inf if self.mode == "min" else -math.inf

    def better(self, one: float, other: float) -> bool:
        """Return whether the objective value ``one`` is better than ``other``."""
        return one < other if self.mode == "min" else one > other

    def promise(self, value: float) -> float:
        """Return the objective ``value`` as a score: higher is better, whatever the mode."""
        return -value if self.mode == "min" else value


def applied(base: Config, point: Point) -> Config:
    """Return ``base`` with the values of ``point``. If ``point`` has weights of corpora in the data mixture, all other corpora
    get weight 1."""
    weights = {field.removeprefix(WEIGHT): value for field, value in point.items() if field.startswith(WEIGHT)}
    changes = {field: value for field, value in point.items() if not field.startswith(WEIGHT)}
    for name, value in weights.items():
        if name not in base.stream.mixture:
            remedy = configs.nearest(name, base.stream.mixture)
            raise ConfigError(explain(f"{WEIGHT}{name}", value, "names no corpus of stream.mixture", remedy))
    if weights:
        changes["stream.weights"] = [{"shares": {**dict.fromkeys(base.stream.mixture, 1.0), **weights}}]
    return base.override(changes)


def _plain(value: Any) -> Any:
    """Turn tuples into lists, as a value that is read back from a JSON file has lists in place of tuples."""
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


def read_file(path: str, base: Config) -> Sweep:
    """Read the sweep that the Python file ``path`` defines: SPACE, OBJECTIVE, BUDGET, and optionally WHERE, a filter of points.
    Raises ConfigError for a missing or wrong entry."""
    if not Path(path).is_file():
        near = sorted(str(one) for one in Path(path).parent.glob("*.py")) if Path(path).parent.is_dir() else []
        raise ConfigError(explain("--space", path, "is not a file", configs.nearest(path, near)))
    try:
        table = runpy.run_path(path)
    except Exception as error:
        raise ConfigError(
            explain("--space", path, f"cannot be run ({type(error).__name__}: {error})", "fix it")
        ) from None
    return read(table, base)


def read(table: Mapping[str, Any], base: Config) -> Sweep:
    """Check the definition of a sweep, given as name -> value. Raises ConfigError for a missing or wrong entry."""
    for name in ("SPACE", "OBJECTIVE", "BUDGET"):
        if not isinstance(table.get(name), Mapping):
            raise ConfigError(explain(name, table.get(name), "is not a table", "see the files of tune_spaces/"))
    space = read_space(table["SPACE"], base)
    if not space:
        raise ConfigError(explain("SPACE", {}, "names no field", "give at least one"))
    metric, mode = _objective("OBJECTIVE", table["OBJECTIVE"], METRICS)
    if metric in _OF_MIXTURE and any(one.field.startswith(WEIGHT) for one in space):
        limit = "weighs held-out sets as the mixture, which differs from trial to trial"
        raise ConfigError(explain("OBJECTIVE.metric", metric, limit, "use heldout_bits_per_byte_mean"))
    secondary = table["OBJECTIVE"].get("secondary")
    if secondary is not None:
        secondary = SecondaryObjective(*_objective("OBJECTIVE.secondary", secondary, COSTS))
    return Sweep(tuple(space), metric, mode, read_budget(table["BUDGET"], base), table.get("WHERE"), secondary)


def _objective(name: str, table: Any, known: Sequence[str]) -> tuple[str, Literal["min", "max"]]:
    if not isinstance(table, Mapping):
        raise ConfigError(explain(name, table, "is not a table", "see the files of tune_spaces/"))
    metric, mode = str(table.get("metric")), table.get("mode")
    if metric not in known:
        there = f"a trial reports {', '.join(known)}"
        raise ConfigError(explain(f"{name}.metric", metric, there, configs.nearest(metric, known)))
    if mode not in ("min", "max"):
        raise ConfigError(explain(f"{name}.mode", mode, "is neither min nor max", "use min if lower is better"))
    return metric, mode


def read_budget(table: Mapping[str, Any], base: Config) -> Budget:
    """Return the budget in ``table``. Raises ConfigError for a wrong entry, or when its tokens are too few for its
    evaluations."""
    limits = [field.name for field in dataclasses.fields(Budget)]
    for name, value in table.items():
        if name not in limits:
            raise ConfigError(explain(f"BUDGET.{name}", value, "is no field of BUDGET", configs.nearest(name, limits)))
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(explain(f"BUDGET.{name}", value, "must be a number, 0 or more", "0 means unlimited"))
    budget = Budget(**{"trials": 0, "tokens_per_trial": 0, **table})
    for name, least in (("trials", 1), ("rungs", 1), ("reduction", 2), ("seeds", 2)):
        if getattr(budget, name) < least:
            raise ConfigError(explain(f"BUDGET.{name}", getattr(budget, name), f"must be {least} or more", "raise it"))
    least = base.tokens_after(1) * budget.rungs
    if budget.tokens_per_trial < least:
        problem = f"is too small for {budget.rungs} rungs of one step each: {least} tokens"
        raise ConfigError(
            explain("BUDGET.tokens_per_trial", budget.tokens_per_trial, problem, "raise it, or lower rungs")
        )
    if 0 < budget.tokens < budget.tokens_per_trial / budget.rungs:
        problem = f"is less than one rung of one trial, {budget.tokens_per_trial // budget.rungs}"
        raise ConfigError(explain("BUDGET.tokens", budget.tokens, problem, "raise it, or lower tokens_per_trial"))
    return budget


def read_space(table: Mapping[str, tuple[Any, ...]], base: Config) -> list[Range]:
    """Return the ranges of ``table`` (field -> kind and values). Each bound and choice is checked by setting it in the config
    ``base``. Raises ConfigError for an unknown field or kind, or an invalid bound."""
    space = []
    for field, (kind, *values) in table.items():
        if kind not in _KINDS:
            raise ConfigError(explain(field, kind, f"kinds are {', '.join(_KINDS)}", configs.nearest(kind, _KINDS)))
        if kind != "choice" and (
            len(values) != 2 or not values[0] < values[1] or (kind == "log_uniform" and values[0] <= 0)
        ):
            raise ConfigError(
                explain(field, values, f"is not a {kind} range", "give low < high, above 0 for log_uniform")
            )
        for value in values:
            applied(base, {field: value})
        space.append(Range(field, kind, tuple(values)))
    return space
