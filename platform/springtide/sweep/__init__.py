"""A space, a trial, a verdict. Law: no Ray here; a space is checked against the config's own types before anything runs."""

from springtide.sweep.expected_improvement import expected_improvement
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
from springtide.sweep.rank import Finalist, SweepResult, finalists, rank_trials, words
from springtide.sweep.search import SEARCHES, PointList, Search, draw, grid_points, random_points, search_of
from springtide.sweep.space import Budget, Point, Range, Sweep, applied, read, read_file, read_space
from springtide.sweep.trial import Rung, TrialOutcome, member_config, name_of, number_of, other_seed, trial_config

__all__ = [
    "POINTS",
    "SEARCHES",
    "Budget",
    "Finalist",
    "Generation",
    "Point",
    "PointList",
    "Range",
    "Rung",
    "Search",
    "Sweep",
    "SweepResult",
    "TrialOutcome",
    "applied",
    "check_population",
    "clamped",
    "draw",
    "expected_improvement",
    "finalists",
    "grid_points",
    "lineage_of",
    "member_config",
    "name_of",
    "number_of",
    "other_seed",
    "point_at",
    "random_points",
    "rank_trials",
    "read",
    "read_file",
    "read_space",
    "search_of",
    "shares",
    "trial_config",
    "turned",
    "words",
]
