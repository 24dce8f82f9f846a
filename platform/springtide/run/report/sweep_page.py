"""The HTML page of a sweep (hyperparameter search): best point (values of the searched settings), all trials, importance of
each setting, and costs."""

from __future__ import annotations

import dataclasses
import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from springtide.events.metrics import EVAL_METRICS, STEP_METRICS
from springtide.run.report.charts import Bars, Columns, Parallel, Strand, Strands, Ticks, draw, log_values, round_values
from springtide.run.report.html import Cell, Link, cards, grid, page, switch, table
from springtide.tune.rank import SweepResult, fences
from springtide.tune.space import Point, Range, Sweep
from springtide.tune.trial import TrialOutcome

_STATUSES = ("finished", "stopped", "failed", "waiting")
_WIDE = 960.0  # width of the page's charts in pixels
_GAP = 0.08
"""Least distance between two ticks of an axis, as a fraction of the axis, so that labels do not overlap."""
_WORDS = {"min": "least", "max": "greatest"}
_NO_PAGES: Mapping[int, str] = {}
_HEADINGS = (
    *(("trial", False), ("status", False), ("point", False), ("value", True), ("tokens", True)),
    *(("worker-s", True), ("$", True), ("restarts", True)),
)


def render(
    title: str,
    sweep: Sweep,
    verdict: SweepResult,
    importance: Mapping[str, float],
    pages: Mapping[int, str] = _NO_PAGES,
) -> str:
    """Return the HTML page of a sweep. ``importance``: searched setting -> its share of the variance of the objective, from 0
    to 1; empty if unknown. ``pages``: number of a trial -> path of the trial's page, relative to the sweep's page."""
    sections = [f"<p>{html.escape(_searched(sweep))}</p>", cards(figures(sweep, verdict))]
    if verdict.best is not None:
        sections.append(table(f"The best, {verdict.best.name}", _shown(verdict.best.point)))
    height = 340 + 5 * max(len(one.values) for one in sweep.space)
    sections += [
        "<h2>Results of the trials</h2>",
        draw([points_chart(sweep, verdict)], columns=1, size=(_WIDE, height)),
        '<p class="soft">Each line is a trial, colored from orange (worst) to blue. The best is bold; stopped and failed '
        "trials are faint, at the value of their last rung; trials without a value are dashed. Hover over a line to see "
        "its trial.</p>",
    ]
    curves = curves_chart(sweep, verdict)
    beside = [importance_chart(importance)] if importance else []
    if curves.strands or beside:
        shown = [
            draw([one, *beside], 1 + len(beside), size=(_WIDE / (1 + len(beside)), 320)) for one in _scales(curves)
        ]
        sections.append(switch("log", "log scale of the curves", *shown) if len(shown) == 2 else shown[0])
    if not importance:
        sections.append('<p class="soft">These trials do not show which field mattered.</p>')
    if verdict.worker_s or verdict.dollars:
        sections += ["<h2>Cost of the trials</h2>", _costs(verdict)]
    best_first = sorted(
        verdict.outcomes, key=lambda one: (not _is_best(verdict, one), -one.tokens, -_promise(sweep, one))
    )
    rows = [(_row(sweep, verdict, one, pages.get(one.number, "")), _is_best(verdict, one)) for one in best_first]
    sections.append(grid("All trials", [each for each in _HEADINGS if each[0] != "$" or verdict.dollars], rows))
    return page(title, sections)


def label(value: Any) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(label, value)) if isinstance(value, list | tuple) else str(value)


def ticks(one: Range) -> Ticks:
    """Return the ticks of a searched setting's axis: both ends and round values between them, or each choice."""
    if one.kind == "choice":
        return [(one.place(value), label(value)) for value in one.values]
    low, high = map(float, one.values)
    found = [(0.0, label(one.values[0])), (1.0, label(one.values[1]))]
    values = log_values(low, high) if one.kind == "log_uniform" else round_values(low, high, 5, one.is_whole)
    for value in values:
        here = one.place(value) if low < value < high else 0.0
        if min(abs(here - taken) for taken, _ in found) > _GAP:
            found.append((here, label(int(value) if one.is_whole else float(value))))
    return sorted(found)


def figures(sweep: Sweep, verdict: SweepResult) -> list[tuple[str, str, str]]:
    """Return (label, figure, remark) of each headline box of the page."""
    counts = Counter(one.status for one in verdict.outcomes)
    remark = ", ".join(f"{counts[status]} {status}" for status in _STATUSES if counts[status])
    found = [("trials", f"{len(verdict.outcomes):,}", remark)]
    if verdict.best is not None:
        found.insert(0, ("best", f"{verdict.best.value:.4f}", _unit(sweep)))
    found.append(("tokens", f"{verdict.tokens:,}", "of all trials together"))
    found.append(("worker-seconds", f"{verdict.worker_s:,.0f}", f"{verdict.worker_s / 3600:,.1f} hours"))
    if verdict.dollars:
        found.append(("dollars", f"{verdict.dollars:,.2f}", "at the prices that were set"))
    found.append(("restarts", f"{sum(one.restarts for one in verdict.outcomes):,}", "of all trials together"))
    return found


def points_chart(sweep: Sweep, verdict: SweepResult) -> Parallel:
    """Return the parallel-coordinates chart of all trials: an axis for each searched setting, and one for the objective."""
    values = {one.number: one.value for one in verdict.outcomes if math.isfinite(one.value)}
    low, high = fences(list(values.values())) if values else (0.0, 0.0)
    shades, apart = _shades(sweep, values), _apart(sweep, verdict.outcomes)
    names = _names(sweep)
    strands = []
    for one in verdict.outcomes:
        points = [(float(at), each.place(one.point[each.field])) for at, each in enumerate(sweep.space)]
        points = [
            (at, here + apart[one.number] / len(each.values) if each.kind == "choice" else here)
            for (at, here), each in zip(points, sweep.space, strict=True)
        ]
        if one.number in values:
            here = (values[one.number] - low) / (high - low) if high > low else 0.5
            points.append((float(len(points)), min(max(here, 0.0), 1.0)))
        strands.append(_strand(sweep, verdict, one, points, shades))
    axes = [(names[each.field], ticks(each)) for each in sweep.space]
    objective = (f"{sweep.metric} ({sweep.mode})", _value_ticks(low, high, list(values.values())))
    return Parallel("", [*axes, objective], strands)


def curves_chart(sweep: Sweep, verdict: SweepResult) -> Strands:
    """Return the learning curves: each trial's objective at its evaluations (rungs), by the tokens trained on."""
    values = {one.number: one.value for one in verdict.outcomes if math.isfinite(one.value)}
    every = [rung.value for one in verdict.outcomes for rung in one.rungs if math.isfinite(rung.value)]
    shades = _shades(sweep, values)
    strands = []
    for one in verdict.outcomes:
        points = [(float(rung.tokens), rung.value) for rung in one.rungs if math.isfinite(rung.value)]
        if points:
            strands.append(_strand(sweep, verdict, one, points, shades))
    limits = fences(every) if every else (0.0, 1.0)
    return Strands("Learning curves", "tokens", _unit(sweep), strands, limits)


def _scales(curves: Strands) -> list[Strands]:
    """Return the chart ``curves``. If all its values are positive, also return a copy of it with a logarithmic axis."""
    positive = all(value > 0 for strand in curves.strands for _, value in strand.points)
    return [curves, dataclasses.replace(curves, is_log=True)] if curves.strands and positive else [curves]


def importance_chart(importance: Mapping[str, float]) -> Bars:
    """Return a bar chart of each searched setting's share of the variance of the objective, the largest on top."""
    ranked = sorted(importance.items(), key=lambda each: -each[1])
    return Bars(
        "Which field mattered", "% of the objective's variance", [(field, 100 * share) for field, share in ranked]
    )


def cost_chart(verdict: SweepResult, title: str, unit: str, amounts: Mapping[int, float]) -> Columns:
    """Return a bar chart with the cost of each trial, colored by the trial's status (such as finished)."""
    groups = [
        (
            status,
            [(one.number, cost) for one in verdict.outcomes if one.status == status and (cost := amounts[one.number])],
        )
        for status in _STATUSES
    ]
    return Columns(title, "trial", unit, groups)


def _costs(verdict: SweepResult) -> str:
    charts = [cost_chart(verdict, "Workers", "worker-seconds", {one.number: one.worker_s for one in verdict.outcomes})]
    if verdict.dollars:
        charts.append(cost_chart(verdict, "Money", "dollars", {one.number: one.dollars for one in verdict.outcomes}))
    return draw(charts, columns=len(charts), size=(_WIDE / len(charts), 260))


def _is_best(verdict: SweepResult, one: TrialOutcome) -> bool:
    return verdict.best is not None and one.number == verdict.best.number


def _strand(
    sweep: Sweep,
    verdict: SweepResult,
    one: TrialOutcome,
    points: Sequence[tuple[float, float]],
    shades: Mapping[int, float],
) -> Strand:
    is_best = _is_best(verdict, one)
    note = f"{one.name}, {one.state}: {label(one.value)} after {one.tokens:,} tokens; {_point(one.point)}"
    return Strand(points, note, shades.get(one.number), one.status != "finished" and not is_best, is_best)


def _shades(sweep: Sweep, values: Mapping[int, float]) -> dict[int, float]:
    """Return trial number -> shade (color) from 0, the worst trial, to 1, the best. A shade depends on the trial's rank. If it
    depended on the value, one outlier would give all other trials nearly one color."""
    ranked = sorted(values, key=lambda number: sweep.promise(values[number]))
    return {number: at / max(1, len(ranked) - 1) for at, number in enumerate(ranked)}


def _apart(sweep: Sweep, outcomes: Sequence[TrialOutcome]) -> dict[int, float]:
    """Return trial number -> vertical offset of the trial's line on the axis of a setting with few choices, the best trial on
    top. Without offsets, lines of trials with the same choice would hide each other."""
    ranked = sorted(outcomes, key=lambda one: _promise(sweep, one))
    return {one.number: 0.5 * (at / max(1, len(ranked) - 1) - 0.5) for at, one in enumerate(ranked)}


def _value_ticks(low: float, high: float, values: Sequence[float]) -> Ticks:
    """Return ticks of the objective's axis at round values from ``low`` to ``high``. If values lie outside, the tick at that
    end shows ≤ or ≥."""
    if not values:
        return []
    if low == high:
        return [(0.5, label(low))]
    found = [((at - low) / (high - low), label(at)) for at in round_values(low, high, 5)]
    beyond = [(0.0, f"≤ {label(low)}")] if min(values) < low else []
    beyond += [(1.0, f"≥ {label(high)}")] if max(values) > high else []
    near = [each for each in found if 0 <= each[0] <= 1 and all(abs(each[0] - end) > 0.06 for end, _ in beyond)]
    return sorted(near + beyond)


def _names(sweep: Sweep) -> dict[str, str]:
    """Return setting -> short name: the part after the last dot, or the whole name if that part is not unique."""
    last = {one.field: one.field.rpartition(".")[2] for one in sweep.space}
    counts = Counter(last.values())
    return {field: name if counts[name] == 1 else field for field, name in last.items()}


def _searched(sweep: Sweep) -> str:
    budget = sweep.budget
    fields = ", ".join(one.field for one in sweep.space)
    return (
        f"{fields}, searched for the {_WORDS[sweep.mode]} {sweep.metric}: {budget.trials:,} trials of "
        f"{budget.tokens_per_trial:,} tokens at most, evaluated at {budget.rungs} rungs"
    )


def _unit(sweep: Sweep) -> str:
    metric = (STEP_METRICS | EVAL_METRICS).get(sweep.metric)
    return f"{sweep.metric}, {metric.unit}" if metric else sweep.metric


def _promise(sweep: Sweep, one: TrialOutcome) -> float:
    return sweep.promise(one.value) if math.isfinite(one.value) else -math.inf


def _shown(point: Point) -> list[tuple[str, str]]:
    return [(field, label(value)) for field, value in point.items()]


def _point(point: Point) -> str:
    return ", ".join(f"{field} {text}" for field, text in _shown(point))


def _row(sweep: Sweep, verdict: SweepResult, one: TrialOutcome, path: str) -> list[Cell]:
    names = _names(sweep)
    point = ", ".join(f"{names.get(field, field)} {text}" for field, text in _shown(one.point))
    value = f"{one.value:.4f}" if one.rungs else ""
    dollars = [f"{one.dollars:,.2f}"] if verdict.dollars else []
    cost = [f"{one.tokens:,}", f"{one.worker_s:,.0f}", *dollars, str(one.restarts)]
    return [Link(one.name, path) if path else one.name, one.state, point, value, *cost]
