"""The charts of a run: as static pictures, and as data from which the script of the run's HTML report draws charts."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from springtide.events import Evaluated, Event, Failed, RolledBack, SaveFailed, Started
from springtide.events.metrics import STEP_METRICS
from springtide.run.report.charts import Chart, Series
from springtide.tracking.timeline import StepColumns, Timeline

_SOURCES_DRAWN, _SETS_DRAWN = 4, 4
_OF_SOURCE = "step_tokens/"
_MARKS, _MARKED_RESTARTS, _POINTS = 60, 200, 1000
_MARK_CHARACTERS = 200


def loss_chart(timeline: Timeline) -> Chart:
    """Return the chart of training loss (smoothed, and of each step) and held-out loss, by step."""
    steps, bucket = timeline.steps, _bucket(timeline.steps)
    lines = [
        Series("training", smooth(mean(steps["step"], steps["loss"], bucket))),
        Series("each step", thin(steps["step"], steps["loss"], bucket), "faint"),
        Series("held-out", _held_out(timeline), "points"),
    ]
    return Chart("Loss", "step", STEP_METRICS["loss"].unit, [line for line in lines if line.points])


def source_chart(timeline: Timeline) -> Chart:
    """Return the chart of smoothed training loss by step, one line for each of the data sources with the most tokens."""
    lines = [Series(name, smooth(points)) for name, points in _source_losses(timeline)]
    return Chart("Training loss by source", "step", STEP_METRICS["loss"].unit, lines)


def forgetting_chart(timeline: Timeline) -> Chart:
    """Return the chart of forgetting by step: how much the losses on the base run's held-out sets grew since step 0."""
    lines = [Series(name, points) for name, points in _forgotten(timeline)]
    return Chart("Forgetting", "step", "held-out loss since step 0, nats/token", lines)


def throughput_chart(timeline: Timeline) -> Chart:
    """Return the chart of tokens per second of all workers, by step."""
    return _chart(timeline, "Throughput", STEP_METRICS["tokens_per_s"].unit, "tokens/s", "tokens_per_s")


def norm_chart(timeline: Timeline) -> Chart:
    """Return the chart of the gradient norm before clipping, by step."""
    return _chart(timeline, "Gradient norm", "before clipping", "gradient norm", "grad_norm")


def rate_chart(timeline: Timeline) -> Chart:
    """Return the chart of the learning rate, by step."""
    return _chart(timeline, "Learning rate", "", "learning rate", "learning_rate")


def wait_chart(timeline: Timeline) -> Chart:
    """Return the chart of data waits by step. Value: the longest wait of any rank, as a fraction of the step's time."""
    points = thin(timeline.steps["step"], _wait(timeline.steps), _bucket(timeline.steps))
    return Chart("Waiting for data", "step", "part of the step", [Series("slowest rank", points)], from_zero=True)


def world_size_chart(timeline: Timeline) -> Chart:
    """Return the chart of the number of workers over wall time: the size of each worker group from its start to its last step,
    and 0 between two groups. With more than ``_POINTS`` starts, only the smallest and the largest size in each interval of time
    are drawn."""
    begin, times = timeline.spans()[0], timeline.tries["time_s"]
    points: Points = []
    last, seen = begin, 0
    for before, event in timeline.placed:
        if isinstance(event, Started):
            last = float(times[before - 1]) if before > seen else last
            points += [((last - begin) / 60, 0.0)] if points else []
            points.append(((event.time_s - begin) / 60, float(event.world_size)))
            last, seen = event.time_s, before
    if points:
        last = float(times[-1]) if len(times) > seen else last
        points.append(((last - begin) / 60, points[-1][1]))
    sizes = [point for point in points if point[1] > 0]
    restarts = some(sizes[1:-1], _MARKED_RESTARTS)
    if len(sizes) > _POINTS:
        x, y = np.array(sorted(sizes)).T  # sort by time, because a clock that was set back may break the order
        points = thin(x, y, max(1, math.ceil(x[-1] / _POINTS)))
    lines = [Series("workers", points, "step"), Series("restart", restarts, "points")]
    return Chart(
        "World size", "minutes", STEP_METRICS["world_size"].unit, [line for line in lines if line.points], True, True
    )


def energy_chart(timeline: Timeline) -> Chart:
    """Return the chart of the energy used up to each step, with one line per use: new steps, repeated steps, and the time
    between steps. It has no lines if energy was not measured."""
    lines = [Series(name, mean(x, joules, _bucket(timeline.steps))) for name, x, joules in _energy(timeline)]
    return Chart("Energy", "step", "J, since the run began", lines, from_zero=True)


def pictures(timeline: Timeline) -> list[Chart]:
    """Return the charts of the run's HTML report as static charts, for browsers that run no scripts."""
    shown = [loss_chart, throughput_chart, world_size_chart, norm_chart, rate_chart, wait_chart]
    if source_tokens(timeline.steps):
        shown.insert(1, source_chart)
    if _forgotten(timeline):
        shown.insert(1, forgetting_chart)
    if _energy(timeline):
        shown.append(energy_chart)
    return [chart(timeline) for chart in shown]


def curves(timeline: Timeline) -> dict[str, Any]:
    """Return the charts as plain data, which the script of the HTML report draws. They have fewer points than steps, and all
    charts share one horizontal axis, the step."""
    steps = timeline.steps
    x, bucket = steps["step"], _bucket(steps)

    def of(name: str, values: np.ndarray, style: str = "line") -> dict[str, Any]:
        return _flat(name, style, thin(x, values, bucket))

    loss = [_flat("training", "mean", mean(x, steps["loss"], bucket)), of("each step", steps["loss"], "faint")]
    loss.append(_flat("held-out", "points", _held_out(timeline)))
    charts = [("loss", "Loss", STEP_METRICS["loss"].unit, False, loss)]
    if sources := _source_losses(timeline):
        lines = [_flat(name, "mean", points) for name, points in sources]
        charts.append(("sources", "Training loss by source", STEP_METRICS["loss"].unit, False, lines))
    if forgotten := _forgotten(timeline):
        lines = [_flat(name, "line", points) for name, points in forgotten]
        charts.append(("forgetting", "Forgetting", "nats/token since step 0", False, lines))
    charts += [
        ("throughput", "Throughput", "tokens/s", True, [of("tokens/s", steps["tokens_per_s"])]),
        ("workers", "World size", "workers", True, [of("workers", steps["world_size"], "step")]),
        ("norm", "Gradient norm", "before clipping", True, [of("gradient norm", steps["grad_norm"])]),
        ("rate", "Learning rate", "", True, [of("learning rate", steps["learning_rate"])]),
        ("wait", "Waiting for data", "part of the step", True, [of("slowest rank", _wait(steps))]),
    ]
    if energy := _energy(timeline):
        lines = [_flat(name, "line", mean(axis, joules, bucket)) for name, axis, joules in energy]
        charts.append(("energy", "Energy", "J, since the run began", True, lines))
    names = ("id", "title", "unit", "zero", "series")
    begun_s = timeline.spans()[0]
    return {
        "last": steps["step"][-1].item() if len(steps) else 0,
        "charts": [dict(zip(names, chart, strict=True)) for chart in charts],
        "minutes": _flat("minutes", "line", mean(x, (steps["time_s"] - begun_s) / 60, bucket)),
        "marks": _marks(timeline.events, bucket),
    }


def source_tokens(steps: StepColumns) -> dict[str, int]:
    """Return name of each data source -> tokens trained on, the largest first; empty if no step reports tokens by source."""
    found: collections.Counter[str] = collections.Counter()
    for key, tokens in steps.extra.items():
        if key.startswith(_OF_SOURCE):
            found[key.removeprefix(_OF_SOURCE)] = int(tokens[np.isfinite(tokens)].sum())
    return dict(found.most_common())


def _chart(timeline: Timeline, title: str, unit: str, label: str, name: str) -> Chart:
    points = thin(timeline.steps["step"], timeline.steps[name], _bucket(timeline.steps))
    return Chart(title, "step", unit, [Series(label, points)], from_zero=True)


def _bucket(steps: StepColumns) -> int:
    return bucket_steps(steps["step"][-1] if len(steps) else 0)


def _wait(steps: StepColumns) -> np.ndarray:
    """Return the share of each step's time spent waiting for data, 0 to 1; NaN for a damaged step event with zero duration."""
    took = np.where(steps["step_time_s"] > 0, steps["step_time_s"], np.nan)
    return np.minimum(steps["data_wait_s"] / took, 1.0)


def _held_out(timeline: Timeline) -> Points:
    found = [(float(one.step), one.heldout_loss) for one in timeline.events if isinstance(one, Evaluated)]
    return some([one for one in found if np.isfinite(one[1])], _POINTS)


def _source_losses(timeline: Timeline) -> list[tuple[str, Points]]:
    steps, bucket = timeline.steps, _bucket(timeline.steps)
    names = [name for name in list(source_tokens(steps))[:_SOURCES_DRAWN] if f"loss/{name}" in steps.extra]
    return [(name, mean(steps["step"], steps.extra[f"loss/{name}"], bucket)) for name in names]


def _forgotten(timeline: Timeline) -> list[tuple[str, Points]]:
    found: dict[str, Points] = {}
    for event in timeline.events:
        if isinstance(event, Evaluated):
            for name, worse in list(event.forgetting.items())[:_SETS_DRAWN]:
                found.setdefault(name, []).extend([(float(event.step), worse)] * math.isfinite(worse))
    return [(name, some(points, _POINTS)) for name, points in found.items()]


def _energy(timeline: Timeline) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (name, steps, joules used up to each step) of each use of energy: steps trained for the first time, steps trained
    again, and the time between steps. Empty if energy was not measured."""
    tries, steps = timeline.tries, timeline.steps["step"]
    counted = np.where(np.isfinite(tries["energy_j"]), np.maximum(tries["energy_j"], 0.0), 0.0)
    if not counted.any() or not len(steps):  # not measured, or a rollback has left no step to draw
        return []
    between = np.minimum(np.nan_to_num(np.maximum(tries["energy_between_j"], 0.0), posinf=0.0), counted)
    newest = np.maximum.accumulate(tries["step"])
    again = np.concatenate([[False], tries["step"][1:] <= newest[:-1]])
    at = np.minimum(np.searchsorted(steps, tries["step"]), len(steps) - 1)
    own = counted - between
    parts = (("new steps", own * ~again), ("recomputed steps", own * again), ("between steps", between))
    return [(name, steps, np.bincount(at, joules, len(steps)).cumsum()) for name, joules in parts if joules.any()]


def _flat(name: str, style: str, points: Points) -> dict[str, Any]:
    """Return a curve as plain data. Values are rounded to seven digits, more than a screen can show."""
    x, y = ([float(f"{value:.7g}") for value in axis] for axis in zip(*points, strict=True)) if points else ([], [])
    return {"name": name, "style": style, "x": x, "y": y}


def _marks(events: Sequence[Event], bucket: int) -> list[list[Any]]:
    """Return [step, kind, text] of restarts, failures, failed saves and rollbacks, to mark them in charts. Each bucket (range
    of steps) gets one mark at most. Buckets are widened until at most ``_MARKS`` of them have a mark."""
    steps = {int(event.step) for event in events if isinstance(event, Started | SaveFailed | RolledBack | Failed)}
    while len({step // bucket for step in steps}) > _MARKS:
        bucket *= 2
    found: dict[int, list[Any]] = {}
    starts = 0
    for event in events:
        starts += isinstance(event, Started)
        if not isinstance(event, Started | SaveFailed | RolledBack | Failed):
            continue
        is_restart = isinstance(event, Started)
        if is_restart and starts == 1:  # the first start of the run is no restart
            continue
        at = int(event.step) // bucket
        if at in found:
            found[at][3] += 1
        else:
            kind, text = "restart" if is_restart else "bad", event.describe()[:_MARK_CHARACTERS]
            found[at] = [int(event.step), kind, f"restart: {text}" if is_restart else text, 0]
    marks = found.values()
    return [[step, kind, f"{text} (and {more:,} more)" if more else text] for step, kind, text, more in marks]


# Curves with fewer points. Only the least and the greatest value in every bucket (range of steps) are kept, so no peak is lost.

BUCKETS = 1000
"""Most buckets (ranges of steps) of a curve: about one per pixel of the page's width."""

Points = list[tuple[float, float]]


def bucket_steps(last_step: float) -> int:
    """Return the number of steps per bucket (range of steps that a curve shows by few points). It is a power of two, so that
    buckets of a growing run keep their limits, until two of them are joined into one.

    >>> bucket_steps(1000), bucket_steps(1001), bucket_steps(1_000_000)
    (1, 2, 1024)
    """
    bucket = 1
    while last_step > BUCKETS * bucket:
        bucket *= 2
    return bucket


def thin(x: np.ndarray, y: np.ndarray, bucket: int) -> Points:
    """Return a curve with fewer points: in each bucket (range of steps), those with the least and the greatest value.

    Args:
        x: steps, ascending, of shape (T,).
        y: values of the curve, of the same shape; infinite values and NaN are left out.
        bucket: number of steps per bucket.
    """
    x, y, begins = _buckets(x, y, bucket)
    if len(begins) == len(x):
        return list(zip(x.tolist(), y.tolist(), strict=True))
    parts = [(begin, y[begin:end]) for begin, end in itertools.pairwise([*begins.tolist(), len(y)])]
    at = np.unique([begin + place for begin, part in parts for place in (part.argmin(), part.argmax())])
    return list(zip(x[at].tolist(), y[at].tolist(), strict=True))


def mean(x: np.ndarray, y: np.ndarray, bucket: int) -> Points:
    """Return one point per bucket (range of steps): its mean step and its mean value. Args as for ``thin``."""
    x, y, begins = _buckets(x, y, bucket)
    if not len(x):
        return []
    counts = np.diff(begins, append=len(x))
    middles, values = np.add.reduceat(x, begins) / counts, np.add.reduceat(y, begins) / counts
    return list(zip(middles.tolist(), values.tolist(), strict=True))


def smooth(points: Sequence[tuple[float, float]], parts: int = 50) -> list[tuple[float, float]]:
    """Return the moving average of a curve over a window of 1/``parts`` of its points. The window is centered, so that the
    average does not lag behind. NaN is ignored."""
    values = np.array([y for _, y in points])
    known = np.isfinite(values)
    reach = len(values) // parts // 2
    window = np.ones(2 * reach + 1)
    totals = np.convolve(np.where(known, values, 0.0), window)[reach : reach + len(values)] if len(values) else values
    counts = np.convolve(known.astype(float), window)[reach : reach + len(values)] if len(values) else values
    return [(x, total / count) for (x, _), total, count in zip(points, totals, counts, strict=True) if count]


def some(items: Sequence[tuple[float, float]], most: int) -> Points:
    """Return at most ``most`` of the items, at even distances; the last item is always one of them."""
    every = -(-len(items) // most) or 1
    return list(items[::-1][::every][::-1])


def _buckets(x: np.ndarray, y: np.ndarray, bucket: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x and y of a curve without infinite values and NaN, and the index of the first point of each bucket of steps."""
    known = np.abs(y) < 1e300  # False for NaN, and for values so large that the sum over a bucket would be infinite
    if not known.all():
        x, y = x[known], y[known]
    if not len(x):
        return x, y, np.empty(0, np.int64)
    first, last = x[0] // bucket, x[-1] // bucket
    if last - first < len(x):
        return x, y, np.unique(np.searchsorted(x, np.arange(first, last + 1) * bucket))
    return x, y, np.flatnonzero(np.diff(x // bucket, prepend=first - 1))
