"""Choose the points of a sweep. For each trial, the driver requests a point (field values) from a search, and later reports the
trial's result to it. A resumed sweep reports the same results again, then requests the remaining points.

The search ``tpe``, the importance of fields, and the estimate of how much better a point can be use Optuna. Only this file
imports ``optuna``, when it is first needed. Each computation uses a new Optuna study of the trials so far. Its result depends
only on these trials, the seed and the trial's number, so that a resumed sweep continues as if uninterrupted.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, explain, look_up
from springtide.tune.rank import comparable, fences
from springtide.tune.space import Point, Range, Sweep
from springtide.tune.trial import TrialOutcome, name_of, trial_config

SEARCHES = ("random", "grid", "tpe")
DRAWS = 100
"""Most random draws for one trial, to find a point that the config and WHERE (the sweep's filter) accept."""
_STEPS = 3
"""Number of values that a grid has per range of a field."""


class Search(Protocol):
    """A way to choose the points (field values) of a sweep's trials."""

    first: int
    """The number of the first trial."""

    def ask(self, number: int) -> Point | None:
        """Return the point of trial ``number``; None when no points are left. Raises ConfigError if the search finds no point
        that the config and WHERE (the sweep's filter) accept."""

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        """Report the objectives of trial ``number`` to the search; None for a failed trial."""


def search_of(
    name: str, sweep: Sweep, base: Config, seed: int, known: Sequence[Point], distinct: bool = True
) -> Search:
    """Return the search ``name``. ``known``: points of the trials that an earlier start of the sweep began; ``distinct``: avoid
    points of earlier trials. Raises ConfigError for an unknown name, or a space without a point that the config accepts."""
    if name not in SEARCHES:
        raise ConfigError(explain("--search", name, "is not known", configs.nearest(name, SEARCHES)))
    if name == "tpe":
        return Tpe(sweep, base, seed, known)
    points = {"random": lambda: random_points(sweep, base, seed, distinct), "grid": lambda: grid_points(sweep, base)}
    return PointList(look_up(points, "--search", name)())


class PointList:
    """A search that returns the points of a fixed list, one per trial."""

    def __init__(self, points: Sequence[Point], first: int = 0) -> None:
        self.first, self._points = first, points

    def ask(self, number: int) -> Point | None:
        return self._points[number - self.first] if number - self.first < len(self._points) else None

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        return None


def random_points(sweep: Sweep, base: Config, seed: int, distinct: bool = True) -> list[Point]:
    """Return one random point per trial of the budget, each redrawn until the config and WHERE (the sweep's filter) accept it.
    Raises ConfigError when no point is found.

    ``distinct``: redraw a point that an earlier trial has, because a second trial would only repeat its training. If no other
    point is found, the point is used again.
    """
    points = list[Point]()
    for number in range(sweep.budget.trials):
        points.append(draw_point(sweep, base, f"{seed} {number}", points if distinct else ()))
    return points


def grid_points(sweep: Sweep, base: Config) -> list[Point]:
    """Return the points of a grid of all choices and three values of each range. Points that the config or WHERE (the sweep's
    filter) rejects are left out. At most one point per trial of the budget is returned. Raises ConfigError when no point is
    left."""
    fields = [one.field for one in sweep.space]
    combinations = itertools.product(*(_values(one) for one in sweep.space))
    points = (dict(zip(fields, values, strict=True)) for values in combinations)
    found = list(itertools.islice((point for point in points if is_good(sweep, base, point)), sweep.budget.trials))
    if not found:
        raise ConfigError(explain("SPACE", fields, "has no point that the config and WHERE accept", "widen it"))
    return found


def draw_point(sweep: Sweep, base: Config, seed: str, drawn: Sequence[Point] = ()) -> Point:
    """Return a random point that the config and WHERE (the sweep's filter) accept and that is not in ``drawn``. If no other
    point is found, return a point of ``drawn``. Raises ConfigError if no point is found."""
    chance, again = random.Random(seed), None
    for _ in range(DRAWS):
        point = {one.field: draw(one, chance) for one in sweep.space}
        if point in drawn:
            again = again or point
        elif is_good(sweep, base, point):
            return point
    if again is not None:
        return again
    fields = ", ".join(one.field for one in sweep.space)
    raise ConfigError(
        explain("SPACE", fields, f"gave no point in {DRAWS} draws that the config and WHERE accept", "widen it")
    )


def draw(one: Range, chance: random.Random) -> Any:
    """Draw a value of a field at random from its range or choices."""
    return chance.choice(one.values) if one.kind == "choice" else one.at(chance.random())


def _values(one: Range) -> list[Any]:
    if one.kind == "choice":
        return list(one.values)
    return list(dict.fromkeys(one.at(step / (_STEPS - 1)) for step in range(_STEPS)))


def is_good(sweep: Sweep, base: Config, point: Point) -> bool:
    """Return whether WHERE, the sweep's filter, accepts ``point``, and the config with these values is valid."""
    if sweep.where is not None and not sweep.where(point):
        return False
    try:
        trial_config(base, sweep.budget, name_of(0), point)
    except ConfigError:
        return False
    return True


_LEAST_POINTS = 4
_REACH = 1.5
_SEED = 0


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011), a search that samples near good points."""

    first = 0

    def __init__(self, sweep: Sweep, base: Config, seed: int, known: Sequence[Point]) -> None:
        """Raise ConfigError if optuna is not installed. The arguments are those of ``search_of``."""
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                explain("--search", "tpe", "needs optuna", "pip install 'springtide[ray]', or use random")
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._base, self._seed = sweep, base, seed
        fields = {one.field: one for one in sweep.space}
        self._known = [{field: fields[field].known(value) for field, value in point.items()} for point in known]
        self._trials: dict[int, tuple[Point, Sequence[float] | None]] = {}
        """Trial number -> its point and its objectives, which are None while the trial runs. Failed trials are removed."""

    def ask(self, number: int) -> Point | None:
        """Return the point of trial ``number``: the point that an earlier start of the sweep chose, else a point from Optuna's
        sampler. If the config or WHERE (the sweep's filter) rejects all draws of the sampler, the point is random. None when no
        trials are left. Raises ConfigError if no point is found."""
        if number >= self._sweep.budget.trials:
            return None
        point = self._known[number] if number < len(self._known) else self._suggest(number)
        self._trials[number] = point, None
        return dict(point)

    def tell(self, number: int, values: Sequence[float] | None) -> None:
        point, _ = self._trials.pop(number, ({}, None))
        if point and values is not None and all(map(math.isfinite, values)):
            self._trials[number] = point, values

    def _suggest(self, number: int) -> Point:
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        seed = random.Random(f"{self._seed} {number}").getrandbits(32)
        sampler = TPESampler(seed=seed, multivariate=True, constant_liar=True)
        secondary = [self._sweep.secondary.mode] if self._sweep.secondary else []
        trials = (self._trials[each] for each in sorted(self._trials))
        study = _study(self._sweep, [self._sweep.mode, *secondary], trials, sampler)
        for _ in range(DRAWS):
            trial = study.ask(_distributions(self._sweep))
            point = {one.field: _value(one, trial.params[one.field]) for one in self._sweep.space}
            if is_good(self._sweep, self._base, point):
                return point
            study.tell(trial, state=TrialState.FAIL)
        return draw_point(self._sweep, self._base, f"{self._seed} {number}")


def importance(sweep: Sweep, outcomes: Sequence[TrialOutcome]) -> dict[str, float]:
    """Return the share of the objective's variance that each field explains alone, from 0 to 1, in the order of the space.

    Computed with Optuna's fANOVA (Hutter et al., 2014): a random forest learns the objective from the points. Noise also gets a
    share. Trials are compared at the evaluation that ``comparable`` chooses. Values are clipped to Tukey's inner fences (limits
    for outliers), so that one diverged trial does not outweigh all other trials. Empty when fewer than four points differ, or
    all values are equal.
    """
    from optuna.importance import FanovaImportanceEvaluator

    values = comparable(sweep.budget, outcomes)
    compared = [one for one in sorted(outcomes, key=lambda one: one.number) if one.number in values]
    found = np.array([values[one.number] for one in compared])
    if len({repr(one.point) for one in compared}) < _LEAST_POINTS or not found.any():
        return {}
    found = np.clip(found, *fences(found.tolist(), _REACH))
    found = found / np.abs(found).max()  # scaled, because the square of a huge value overflows
    if np.ptp(found) < 1e-12:
        return {}
    study = _study(sweep, [sweep.mode], zip((one.point for one in compared), found[:, None].tolist(), strict=True))
    shares = FanovaImportanceEvaluator(seed=_SEED).evaluate(study)
    return {each.field: float(shares.get(each.field, 0.0)) for each in sweep.space}


def possible_improvement(sweep: Sweep, trials: Sequence[tuple[Point, float]]) -> float:
    """Return by how much a point of the space could still be better than the best trial, in the objective's unit.

    Computed as Optuna's upper bound on the regret (Makarova et al., 2022), for a confidence of 90%. Infinity while there are
    fewer than four different points with a finite value.

    Args:
        sweep: the space and the objective.
        trials: point and objective of each trial that reached the latest evaluation of any trial.
    """
    from optuna.exceptions import ExperimentalWarning
    from optuna.terminator import RegretBoundEvaluator

    known = [(point, value) for point, value in trials if math.isfinite(value)]
    least, _ = fences([sweep.promise(value) for _, value in known]) if known else (0.0, 0.0)
    known = [(point, value) for point, value in known if sweep.promise(value) >= least]  # leave out diverged trials
    if len({repr(point) for point, _ in known}) < _LEAST_POINTS:
        return math.inf
    study = _study(sweep, [sweep.mode], [(point, [value]) for point, value in known])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        bound = RegretBoundEvaluator(seed=_SEED)
    return float(bound.evaluate(study.trials, study.direction))


def _study(
    sweep: Sweep, modes: Sequence[str], trials: Iterable[tuple[Point, Sequence[float] | None]], sampler: Any = None
) -> Any:
    """Return an in-memory Optuna study of ``trials``. Each is a point and its objectives, which are None while the trial
    runs."""
    import optuna

    ways: dict[str, Any] = {"min": "minimize", "max": "maximize"}
    study = optuna.create_study(directions=[ways[mode] for mode in modes], sampler=sampler)
    for point, values in trials:
        state = optuna.trial.TrialState.RUNNING if values is None else optuna.trial.TrialState.COMPLETE
        params = {one.field: _param(one, point[one.field]) for one in sweep.space}
        study.add_trial(
            optuna.trial.create_trial(state=state, params=params, distributions=_distributions(sweep), values=values)
        )
    return study


def _distributions(sweep: Sweep) -> dict[str, Any]:
    return {one.field: _distribution(one) for one in sweep.space}


def _distribution(one: Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.kind == "choice":
        return CategoricalDistribution(range(len(one.values)))  # indices: Optuna warns of tuples as choices
    (low, high), is_log = one.values, one.kind == "log_uniform"
    return IntDistribution(low, high, is_log) if one.is_whole else FloatDistribution(low, high, is_log)


def _param(one: Range, value: Any) -> Any:
    """Return Optuna's parameter for ``value``, which may be from a file: the index of a choice, or a number. Numbers are
    clamped, because a rounded number may be outside of its range."""
    return one.values.index(one.known(value)) if one.kind == "choice" else one.clamped(value)


def _value(one: Range, param: Any) -> Any:
    return one.values[param] if one.kind == "choice" else param
