"""A space, a trial, a verdict. Law: no Ray here; a space is checked against the config's own types before anything runs."""

from springtide.sweep.population import (
    POINTS,
    Generation,
    check_population,
    clamped,
    lineage_of,
    point_at,
    shares,
    turned,
)
from springtide.sweep.search import SEARCHES, Listed, Search, draw, grid_points, random_points, search_of
from springtide.sweep.space import Budget, Point, Range, Sweep, applied, read, read_file, read_space
from springtide.sweep.trial import Outcome, Rung, member_config, name_of, number_of, other_seed, trial_config
from springtide.sweep.verdict import Final, Verdict, finalists, judge, words
from springtide.sweep.worth import expected_gain

__all__ = [
    "POINTS",
    "SEARCHES",
    "Budget",
    "Final",
    "Generation",
    "Listed",
    "Outcome",
    "Point",
    "Range",
    "Rung",
    "Search",
    "Sweep",
    "Verdict",
    "applied",
    "check_population",
    "clamped",
    "draw",
    "expected_gain",
    "finalists",
    "grid_points",
    "judge",
    "lineage_of",
    "member_config",
    "name_of",
    "number_of",
    "other_seed",
    "point_at",
    "random_points",
    "read",
    "read_file",
    "read_space",
    "search_of",
    "shares",
    "trial_config",
    "turned",
    "words",
]
