"""Sweeps over settings: the space (ranges of config fields), the trials (training runs with values from the space), the result.
Rules: no Ray in this package. A space is checked against the config's types before anything runs. Only ``folder`` reads and
writes the files of a sweep."""

from springtide.tune.folder import Chosen, SweepFolder, TrialEnd
from springtide.tune.population import Generation, check_population, clamped, point_at, shares, with_takeover
from springtide.tune.rank import Finalist, SweepResult, finalists, rank_trials, words
from springtide.tune.search import SEARCHES, PointList, Search, draw, grid_points, random_points, search_of
from springtide.tune.space import Budget, Point, Range, Sweep, applied, read, read_file, read_space
from springtide.tune.trial import Rung, TrialOutcome, member_config, name_of, number_of, other_seed, trial_config

__all__ = [
    "SEARCHES",
    "Budget",
    "Chosen",
    "Finalist",
    "Generation",
    "Point",
    "PointList",
    "Range",
    "Rung",
    "Search",
    "Sweep",
    "SweepFolder",
    "SweepResult",
    "TrialEnd",
    "TrialOutcome",
    "applied",
    "check_population",
    "clamped",
    "draw",
    "finalists",
    "grid_points",
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
    "with_takeover",
    "words",
]
