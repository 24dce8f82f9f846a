"""Which fields mattered: a forest predicts the objective from the points; how much worse is it without each field?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from springtide.tuning.space import Budget, Sweep
from springtide.tuning.trial import TrialOutcome

_NEARLY_ALL = 0.9
"""Trials are compared at a rung that this share of the trials with values reached."""
_LEAST_POINTS = 4
_REACH = 1.5
_TREES, _SHUFFLES, _SEED = 100, 20, 0


def importance(sweep: Sweep, outcomes: Sequence[TrialOutcome]) -> dict[str, float]:
    """Return the share of the objective's variance that each field explains, from 0 to 1, in the order of the space.

    A random forest learns the objective from the points. A field's importance is the accuracy lost when its values are
    shuffled among the trials (permutation importance; Breiman, Random Forests, 2001). The shares add up to the out-of-bag
    R², where each tree predicts trials it was not trained on: the rest is chance, or needs more trials. A value beyond
    Tukey's inner fence counts as the fence, so that one diverged trial does not outweigh all others.

    Trials are compared after equally long training: at the last rung that nearly all of them reached. A later rung would
    exclude the stopped trials, which were the worst and show most of the fields' effect; an earlier one is further from the
    goal of the sweep. What matters there may still differ from what matters at the end. A trial's value at that rung counts
    whatever happened to the trial later. Empty when fewer than four points differ, all values are equal, or the fields
    predict nothing.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    values = comparable(sweep.budget, outcomes)
    compared = [one for one in sorted(outcomes, key=lambda one: one.number) if one.number in values]
    points = np.array([[each.place(one.point[each.field]) for each in sweep.space] for one in compared])
    if not compared or len(np.unique(points, axis=0)) < _LEAST_POINTS:
        return {}
    found = np.array([values[one.number] for one in compared])
    found = np.clip(found, *fences(found.tolist(), _REACH))
    found = found / np.abs(found).max() if found.any() else found  # the square of a huge value overflows
    if np.ptp(found) < 1e-12:
        return {}
    chosen = [column for column, each in enumerate(sweep.space) if each.kind == "choice"]
    encode = ColumnTransformer([("choices", OneHotEncoder(), chosen)], remainder="passthrough")
    forest = RandomForestRegressor(_TREES, oob_score=True, random_state=_SEED)
    model = make_pipeline(encode, forest).fit(points, found / np.std(found))
    shuffled = permutation_importance(model, points, found / np.std(found), n_repeats=_SHUFFLES, random_state=_SEED)
    lost = np.clip(shuffled.importances_mean, 0.0, None)
    if forest.oob_score_ <= 0 or not lost.any():
        return {}
    shares = forest.oob_score_ * lost / lost.sum()
    return {each.field: float(share) for each, share in zip(sweep.space, shares, strict=True)}


def comparable(budget: Budget, outcomes: Sequence[TrialOutcome]) -> dict[int, float]:
    """Return trial number -> objective at the last rung that nearly all trials with values reached, for the trials that have
    a finite value there."""
    valued = {one.number: _by_rung(budget, one) for one in outcomes}
    valued = {number: rungs for number, rungs in valued.items() if rungs}
    reached = [max(rungs) for rungs in valued.values()]
    for rung in sorted({rung for rungs in valued.values() for rung in rungs}, reverse=True):
        if sum(each >= rung for each in reached) >= _NEARLY_ALL * len(valued):
            return {number: rungs[rung] for number, rungs in valued.items() if rung in rungs}
    return {}


def _by_rung(budget: Budget, one: TrialOutcome) -> dict[int, float]:
    """Return rung -> finite value. Rungs are found by tokens: batch sizes may differ, so a rung may fall between steps."""
    apart = budget.tokens_per_trial / budget.rungs
    return {round(each.tokens / apart): each.value for each in one.rungs if math.isfinite(each.value)}


def fences(values: Sequence[float], reach: float = 3.0) -> tuple[float, float]:
    """Return the limits beyond which a value is an outlier: ``reach`` times the interquartile range beyond the quartiles
    (Tukey, 1977: inner fences at 1.5, outer ones at 3), but never beyond the least and the greatest value. If the quartiles
    are equal: the least and the greatest value."""
    first, third = np.percentile(values, [25, 75])
    beyond = reach * float(third - first) or math.inf
    return max(float(first) - beyond, min(values)), min(float(third) + beyond, max(values))
