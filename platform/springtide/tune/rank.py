"""The result of a sweep: all trials, which trial is best, and what the trials cost."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from springtide.errors import printable
from springtide.tune.space import Budget, Sweep
from springtide.tune.trial import TrialOutcome

_NEARLY_ALL = 0.9
"""Trials are compared at an evaluation that at least this share of the evaluated trials has reached."""


class Finalist(NamedTuple):
    """One of a sweep's best points, trained with several seeds."""

    number: int
    """Number of the trial that trained the point first, with the seeds of the sweep."""
    values: tuple[float, ...]
    mean: float
    deviation: float
    """Sample standard deviation of the values [the objective's unit]."""


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """The result of all trials of a sweep."""

    outcomes: tuple[TrialOutcome, ...]
    """The outcomes of all trials, in order of trial number."""
    best: TrialOutcome | None
    """The best of the trials that reached the latest evaluation. Once all finalists have trained with all their seeds, it is
    instead the finalist with the best mean over its seeds. None if no trial was evaluated."""
    worker_s: float
    dollars: float
    tokens: int
    front: tuple[TrialOutcome, ...] = ()
    """The Pareto front of the two objectives, sorted by the first objective, best first; empty without a second objective."""
    finals: tuple[Finalist, ...] = ()
    """The finalists (best trials, repeated with other seeds) that have values for several seeds, best mean first."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for ``result.json``."""
        return {
            "best": self.best.name if self.best else None,
            "front": [one.name for one in self.front],
            "finals": [one._asdict() for one in self.finals],
            "worker_s": self.worker_s,
            "dollars": self.dollars,
            "tokens": self.tokens,
            "trials": [{"name": one.name, "value": one.value, **dataclasses.asdict(one)} for one in self.outcomes],
        }

    def _repr_html_(self) -> str:
        fields = list(dict.fromkeys(field for one in self.outcomes for field in one.point))
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in ("trial", "value", "tokens", *fields, "state"))
        rows = ""
        for one in sorted(self.outcomes, key=lambda one: (one != self.best, -one.tokens, one.number)):
            point = (_short(one.point[field]) if field in one.point else "" for field in fields)
            cells = (one.name, f"{one.value:.4f}" if one.rungs else "", f"{one.tokens:,}", *point, one.state)
            weight = ' style="font-weight: bold"' if one == self.best else ""
            rows += f"<tr{weight}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        costs = f"{self.worker_s:,.0f} worker-seconds" + (f", ${self.dollars:,.2f}" if self.dollars else "")
        head = f"<p>{len(self.outcomes)} trials, {self.tokens:,} tokens, {costs}; the best first</p>"
        return printable(f"{head}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")


def rank_trials(sweep: Sweep, outcomes: Sequence[TrialOutcome], chosen: Sequence[int] = ()) -> SweepResult:
    """Return the result of a sweep. A trial that was stopped early is not compared with trials that were trained longer.
    ``chosen``: trial numbers of the finalists that are repeated with other seeds. Once all repeats have ended, the best trial
    is the finalist with the best mean over its seeds. Until then it is the trial with the best value."""
    furthest = finalists(sweep, [one for one in outcomes if one.repeats < 0])
    entered = {*chosen, *(one.repeats for one in outcomes)}
    entrants = [one for one in furthest if one.number in entered]
    values = {one.number: _values_of_seeds(sweep, one, outcomes) for one in entrants}
    best = next(iter(furthest), None)
    if entrants and all(_has_all_seeds(sweep, one, outcomes) for one in entrants):
        best = max(entrants, key=lambda one: sweep.promise(statistics.fmean(values[one.number])))
    return SweepResult(
        tuple(sorted(outcomes, key=lambda one: one.number)),
        best,
        sum(one.worker_s for one in outcomes),
        sum(one.dollars for one in outcomes),
        sum(one.tokens for one in outcomes),
        _front(sweep, furthest),
        _finals(sweep, values),
    )


def finalists(sweep: Sweep, outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """Return the trials with a value at the latest rung (evaluation) that any trial reached, best first. Rungs are identified
    by the tokens trained on, because trials with different batch sizes reach a rung at different steps."""
    valued = [one for one in outcomes if _has_value(one)]
    furthest = max((_rung(sweep, one) for one in valued), default=0)
    there = [one for one in valued if _rung(sweep, one) == furthest]
    return sorted(there, key=lambda one: (-sweep.promise(one.value), one.number))


def _has_value(one: TrialOutcome) -> bool:
    return bool(one.rungs) and math.isfinite(one.value) and one.status != "failed"


def _rung(sweep: Sweep, one: TrialOutcome) -> int:
    return round(one.tokens * sweep.budget.rungs / sweep.budget.tokens_per_trial)


def _values_of_seeds(sweep: Sweep, first: TrialOutcome, outcomes: Sequence[TrialOutcome]) -> tuple[float, ...]:
    """Return the objectives of a finalist and of its repeats with other seeds. Repeats that were not trained as long as the
    finalist are left out."""
    again = [one for one in outcomes if one.repeats == first.number and _has_value(one)]
    return (first.value, *(one.value for one in again if _rung(sweep, one) == _rung(sweep, first)))


def _has_all_seeds(sweep: Sweep, first: TrialOutcome, outcomes: Sequence[TrialOutcome]) -> bool:
    """Return True if all repeats of a finalist with other seeds were trained as long as the finalist, or failed. Until then no
    means are compared: the finalist's first seed may be lucky, and its single value could beat other finalists' means."""
    again = [one for one in outcomes if one.repeats == first.number]
    done = [one for one in again if one.status == "failed" or _rung(sweep, one) >= _rung(sweep, first)]
    return len(done) >= sweep.budget.seeds - 1


def _finals(sweep: Sweep, values: Mapping[int, tuple[float, ...]]) -> tuple[Finalist, ...]:
    """Return the finalists that have objectives for several seeds, best mean first; ``values``: trial number -> objectives."""
    found = [
        Finalist(number, each, statistics.fmean(each), statistics.stdev(each))
        for number, each in values.items()
        if len(each) > 1
    ]
    return tuple(sorted(found, key=lambda one: -sweep.promise(one.mean)))


def _front(sweep: Sweep, furthest: Sequence[TrialOutcome]) -> tuple[TrialOutcome, ...]:
    if sweep.secondary is None:
        return ()
    sign = 1.0 if sweep.secondary.mode == "max" else -1.0
    front: list[TrialOutcome] = []
    known = [one for one in furthest if math.isfinite(one.secondary)]
    for one in sorted(known, key=lambda one: (-sweep.promise(one.value), -sign * one.secondary)):
        # trials come best first by the first objective, so `one` is on the front only if its second objective beats all before
        if all(sign * one.secondary > sign * other.secondary for other in front):
            front.append(one)
    return tuple(front)


def words(sweep: Sweep, verdict: SweepResult) -> str:
    """Return the result of a sweep as a text table, one line per trial."""
    rows = sorted(
        verdict.outcomes,
        key=lambda one: (-one.tokens, -sweep.promise(one.value) if math.isfinite(one.value) else math.inf),
    )
    lines = [f"{sweep.metric}, {sweep.mode}; {len(rows)} trials, {verdict.worker_s:.0f} worker-seconds"]
    if verdict.dollars:
        lines[0] += f", {verdict.dollars:.2f} $"
    for one in rows:
        point = ", ".join(f"{field.rpartition('.')[2]} {_short(value)}" for field, value in one.point.items())
        mark = "*" if verdict.best is not None and one.number == verdict.best.number else " "
        mark = "+" if mark == " " and one in verdict.front else mark
        value = f"{one.value:8.4f}" if one.rungs else f"{'none yet':>8}"
        lines.append(
            f"{mark} {one.name}  {value}  {one.tokens:>12,} tokens  {one.worker_s:7.0f} s  {point}  {one.state}"
        )
    for final in verdict.finals:
        lines.append(
            f"  trial-{final.number:04d} with {len(final.values)} seeds: {final.mean:.4f} ± {final.deviation:.4f}"
        )
    if sweep.secondary is not None:
        lines.append(f"+ no other is as good in both {sweep.metric} and {sweep.secondary.metric} (Pareto front):")
        lines += [f"  {one.name}  {one.value:.4f}  {one.secondary:.4g}" for one in verdict.front]
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def comparable(budget: Budget, outcomes: Sequence[TrialOutcome]) -> dict[int, float]:
    """Return trial number -> objective at the latest rung (evaluation) that nearly all evaluated trials reached, for the trials
    that have a finite objective there.

    A later rung would exclude the stopped trials, which were the worst and show most of the fields' effect. An earlier rung
    says less about the end of training. A trial's objective at the rung counts even if the trial failed or was stopped later.
    """
    valued = {one.number: _by_rung(budget, one) for one in outcomes}
    valued = {number: rungs for number, rungs in valued.items() if rungs}
    reached = [max(rungs) for rungs in valued.values()]
    for rung in sorted({rung for rungs in valued.values() for rung in rungs}, reverse=True):
        if sum(each >= rung for each in reached) >= _NEARLY_ALL * len(valued):
            return {number: rungs[rung] for number, rungs in valued.items() if rung in rungs}
    return {}


def _by_rung(budget: Budget, one: TrialOutcome) -> dict[int, float]:
    """Return rung (number of an evaluation, from 1) -> objective; objectives that are not finite are left out. The rung follows
    from the tokens trained on, because trials with different batch sizes reach a rung at different steps."""
    apart = budget.tokens_per_trial / budget.rungs
    return {round(each.tokens / apart): each.value for each in one.rungs if math.isfinite(each.value)}


def fences(values: Sequence[float], reach: float = 3.0) -> tuple[float, float]:
    """Return the limits (low, high) beyond which a value is an outlier. They lie ``reach`` times the interquartile range beyond
    the quartiles (Tukey, 1977: inner fences at 1.5, outer fences at 3), but never beyond the least and the greatest value. If
    the quartiles are equal, the limits are the least and the greatest value."""
    first, third = np.percentile(values, [25, 75])
    beyond = reach * float(third - first) or math.inf
    return max(float(first) - beyond, min(values)), min(float(third) + beyond, max(values))
