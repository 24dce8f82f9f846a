"""Where the next point comes from. The driver asks a search for points by trial number and reports their results. A resumed
sweep reports the same results again, then asks for the remaining points."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, explain, look_up
from springtide.tuning.space import Point, Range, Sweep
from springtide.tuning.trial import name_of, trial_config

SEARCHES = ("random", "grid", "tpe")
_DRAWS = 100
_STEPS = 3
"""Number of values per range in a grid."""


class Search(Protocol):
    """A way to choose points."""

    first: int
    """The number of the first trial."""

    def ask(self, number: int) -> Point | None:
        """Return the point of trial ``number``; None when none is left. Raises ConfigError if none is found that the config
        and WHERE accept."""

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        """Report the objectives of a trial; None for a failed one."""


def search_of(
    name: str, sweep: Sweep, base: Config, seed: int, known: Sequence[Point], distinct: bool = True
) -> Search:
    """Return the search ``name``. ``known``: points that an earlier start of the sweep asked for; ``distinct``: see
    ``random_points``. Raises ConfigError for an unknown name, or a space without a point that the config accepts."""
    if name not in SEARCHES:
        raise ConfigError(explain("--search", name, "is not known", configs.nearest(name, SEARCHES)))
    if name == "tpe":
        return Tpe(sweep, base, seed, known)
    points = {"random": lambda: random_points(sweep, base, seed, distinct), "grid": lambda: grid_points(sweep, base)}
    return PointList(look_up(points, "--search", name)())


class PointList:
    """A search over a fixed list of points."""

    def __init__(self, points: Sequence[Point], first: int = 0) -> None:
        self.first, self._points = first, points

    def ask(self, number: int) -> Point | None:
        return self._points[number - self.first] if number - self.first < len(self._points) else None

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        return None


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011), which searches near good points. The only class
    that imports ``optuna``."""

    def __init__(self, sweep: Sweep, base: Config, seed: int, known: Sequence[Point]) -> None:
        """Raise ConfigError if optuna is not installed."""
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                explain("--search", "tpe", "needs optuna", "pip install 'springtide[sweep]', or use random")
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.first, self._sweep, self._base, self._seed = 0, sweep, base, seed
        fields = {one.field: one for one in sweep.space}
        self._known = [{field: fields[field].known(value) for field, value in point.items()} for point in known]
        self._ranges = {one.field: _distribution(optuna.distributions, one) for one in sweep.space}
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        ways = {"min": optuna.study.StudyDirection.MINIMIZE, "max": optuna.study.StudyDirection.MAXIMIZE}
        modes = [sweep.mode, *([sweep.secondary.mode] if sweep.secondary else [])]
        self._study = optuna.create_study(directions=[ways[mode] for mode in modes], sampler=sampler)
        self._failed = optuna.trial.TrialState.FAIL
        self._trials: dict[int, Any] = {}

    def ask(self, number: int) -> Point | None:
        """Return a known point, else the sampler's, or a random one where its draws are all refused. Raises as ``Search``."""
        if number >= self._sweep.budget.trials:
            return None
        if number < len(self._known):
            return self._take(number, self._known[number])
        for _ in range(_DRAWS):
            trial = self._study.ask(self._ranges)
            if _is_good(self._sweep, self._base, trial.params):
                self._trials[number] = trial
                return dict(trial.params)
            self._study.tell(trial, state=self._failed)
        return self._take(number, _draw(self._sweep, self._base, f"{self._seed} {number}", ()))

    def _take(self, number: int, point: Point) -> Point:
        """Begin trial ``number`` at ``point``, which is not the sampler's."""
        self._study.enqueue_trial(point)
        trial = self._trials[number] = self._study.ask(self._ranges)
        return dict(trial.params)

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        trial = self._trials.pop(number, None)
        if trial is not None and (values is None or not all(map(math.isfinite, values))):
            self._study.tell(trial, state=self._failed)
        elif trial is not None:
            self._study.tell(trial, values)


def _distribution(kinds: Any, one: Range) -> Any:
    if one.kind == "choice":
        return kinds.CategoricalDistribution(one.values)
    low, high = one.values
    kind = kinds.IntDistribution if one.is_whole else kinds.FloatDistribution
    return kind(low, high, log=one.kind == "log_uniform")


def random_points(sweep: Sweep, base: Config, seed: int, distinct: bool = True) -> list[Point]:
    """Return one point per trial of the budget, each redrawn until the config accepts it. Raises ConfigError when none is
    found.

    ``distinct``: redraw a point that another trial has, too, as long as others are found. A trial of the same point is the same
    training again.
    """
    points = list[Point]()
    for number in range(sweep.budget.trials):
        points.append(_draw(sweep, base, f"{seed} {number}", points if distinct else ()))
    return points


def grid_points(sweep: Sweep, base: Config) -> list[Point]:
    """Return the combinations of all choices and three values of each range that the config accepts, at most the number of
    trials in the budget. Raises ConfigError when there is none."""
    fields = [one.field for one in sweep.space]
    combinations = itertools.product(*(_values(one) for one in sweep.space))
    points = (dict(zip(fields, values, strict=True)) for values in combinations)
    found = list(itertools.islice((point for point in points if _is_good(sweep, base, point)), sweep.budget.trials))
    if not found:
        raise ConfigError(explain("SPACE", fields, "has no point that the config and WHERE accept", "widen it"))
    return found


def _draw(sweep: Sweep, base: Config, seed: str, drawn: Sequence[Point]) -> Point:
    """Return a good point that is not in ``drawn``, or one of ``drawn`` if only these are found."""
    chance, again = random.Random(seed), None
    for _ in range(_DRAWS):
        point = {one.field: draw(one, chance) for one in sweep.space}
        if point in drawn:
            again = again or point
        elif _is_good(sweep, base, point):
            return point
    if again is not None:
        return again
    fields = ", ".join(one.field for one in sweep.space)
    raise ConfigError(
        explain("SPACE", fields, f"gave no point in {_DRAWS} draws that the config and WHERE accept", "widen it")
    )


def draw(one: Range, chance: random.Random) -> Any:
    """Draw a value from the range."""
    return chance.choice(one.values) if one.kind == "choice" else one.at(chance.random())


def _values(one: Range) -> list[Any]:
    if one.kind == "choice":
        return list(one.values)
    return list(dict.fromkeys(one.at(step / (_STEPS - 1)) for step in range(_STEPS)))


def _is_good(sweep: Sweep, base: Config, point: Point) -> bool:
    if sweep.where is not None and not sweep.where(point):
        return False
    try:
        trial_config(base, sweep.budget, name_of(0), point)
    except ConfigError:
        return False
    return True
