"""Choose the points of a sweep (the config values of its trials). The driver requests the point of each trial number from a
search, and reports the trial's result to it. A resumed sweep reports the same results again, then requests the remaining
points."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, Protocol

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, explain, look_up
from springtide.tune.space import Point, Range, Sweep
from springtide.tune.trial import name_of, trial_config

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
        from springtide.tune.study import Tpe

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
