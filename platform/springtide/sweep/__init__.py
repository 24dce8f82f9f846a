"""A space, a trial, a verdict. Law: no Ray here; a space is checked against the config's own types before anything runs."""

from springtide.sweep.search import SEARCHES, Search, grid_points, random_points, search_of
from springtide.sweep.space import Budget, Point, Range, Sweep, read, read_file, read_space
from springtide.sweep.trial import Outcome, Rung, name_of, trial_config
from springtide.sweep.verdict import Verdict, judge, words

__all__ = [
    "SEARCHES",
    "Budget",
    "Outcome",
    "Point",
    "Range",
    "Rung",
    "Search",
    "Sweep",
    "Verdict",
    "grid_points",
    "judge",
    "name_of",
    "random_points",
    "read",
    "read_file",
    "read_space",
    "search_of",
    "trial_config",
    "words",
]
