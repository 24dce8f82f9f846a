"""Which points of a space are tried, before any is: the same for a seed, however many there are."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from springtide.config import Config
from springtide.errors import ConfigError, explain
from springtide.sweep.space import Point, Range, Sweep
from springtide.sweep.trial import trial_config

_DRAWS = 100
_STEPS = 3
"""Values of a range in a grid."""


def random_points(sweep: Sweep, base: Config, seed: int) -> list[Point]:
    """As many as the budget has trials, each drawn until the config takes it. ConfigError when none is found."""
    return [_draw(sweep, base, f"{seed} {number}") for number in range(sweep.budget.trials)]


def grid_points(sweep: Sweep, base: Config) -> list[Point]:
    """Every combination of choices, and of three values of each range; the first as many as the budget has trials, of those
    that the config takes."""
    fields = [one.field for one in sweep.space]
    combinations = itertools.product(*(_values(one) for one in sweep.space))
    points = (dict(zip(fields, values, strict=True)) for values in combinations)
    found = list(itertools.islice((point for point in points if _is_good(sweep, base, point)), sweep.budget.trials))
    if not found:
        raise ConfigError(explain("SPACE", fields, "has no point that the config and WHERE take", "widen it"))
    return found


def _draw(sweep: Sweep, base: Config, seed: str) -> Point:
    chance = random.Random(seed)
    for _ in range(_DRAWS):
        point = {one.field: _value(one, chance) for one in sweep.space}
        if _is_good(sweep, base, point):
            return point
    fields = ", ".join(one.field for one in sweep.space)
    raise ConfigError(
        explain("SPACE", fields, f"gave no point in {_DRAWS} draws that the config and WHERE take", "widen it")
    )


def _value(one: Range, chance: random.Random) -> Any:
    if one.kind == "choice":
        return chance.choice(one.values)
    low, high = one.values
    if one.kind == "log_uniform":
        low, high = math.log(low), math.log(high)
    value = chance.uniform(low, high)
    value = math.exp(value) if one.kind == "log_uniform" else value
    whole = all(isinstance(end, int) for end in one.values)
    return round(value) if whole else float(f"{value:.6g}")


def _values(one: Range) -> list[Any]:
    if one.kind == "choice":
        return list(one.values)
    low, high = one.values
    shares = [step / (_STEPS - 1) for step in range(_STEPS)]
    if one.kind == "log_uniform":
        values = [low * (high / low) ** share for share in shares]
    else:
        values = [low + (high - low) * share for share in shares]
    whole = all(isinstance(end, int) for end in one.values)
    return list(dict.fromkeys(round(value) if whole else float(f"{value:.6g}") for value in values))


def _is_good(sweep: Sweep, base: Config, point: Point) -> bool:
    if sweep.where is not None and not sweep.where(point):
        return False
    try:
        trial_config(base, sweep.budget, 0, point)
    except ConfigError:
        return False
    return True
