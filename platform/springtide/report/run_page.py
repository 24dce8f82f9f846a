"""The report of a run: one self-contained HTML page, and a picture for a README."""

from __future__ import annotations

import collections
import html
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

from springtide.events import Evaluated, Event, Monitored, Sampled, Saved, SaveFailed, Started, StepDone, Waited
from springtide.events.metrics import STEP_METRICS, utilisation
from springtide.report.charts import Chart, Series, draw, smooth
from springtide.report.html import cards, grid, page, table, text
from springtide.track.journal import last_steps

_SOURCES_DRAWN, _SETS_DRAWN = 4, 4
_OF_SOURCE = "step_tokens/"


def render(
    run_id: str,
    events: Sequence[Event],
    config_yaml: str = "",
    links: Mapping[str, str] | None = None,
    scores: Sequence[Sequence[str]] = (),
) -> str:
    """Return the page.

    Args:
        config_yaml: the resolved config.
        links: label -> URL or path of things that belong to the run.
        scores: on tasks; step, task, metric, score and number of documents of each.
    """
    samples = [event for event in events if isinstance(event, Sampled)]
    shown = [loss_chart, throughput_chart, world_size_chart, norm_chart, rate_chart, wait_chart]
    if tokens := _tokens(last_steps(list(events))):
        shown.insert(1, source_chart)
    if any(event.forgetting for event in events if isinstance(event, Evaluated)):
        shown.insert(1, forgetting_chart)
    sections = [
        f"<p>{html.escape(_when(events))}</p>",
        cards(figures(events)),
        draw([chart(events) for chart in shown]),
        _sources(last_steps(list(events))) if tokens else "",
        _forgetting(events),
    ]
    if scores:
        columns = [("step", True), ("task", False), ("metric", False), ("score", True), ("documents", True)]
        sections.append(grid("Tasks", columns, [(row, False) for row in scores]))
    if samples:
        sections.append(text(f"Sample at step {samples[-1].step}", samples[-1].prompt + samples[-1].text))
    sections.append(table("Events", _rows(events)))
    if links:
        sections.append(table("Links", links.items()))
    if config_yaml:
        sections.append(
            f"<details><summary>The resolved config</summary><pre>{html.escape(config_yaml)}</pre></details>"
        )
    return page(run_id, sections)


def charts(events: Sequence[Event]) -> str:
    """Return loss and world size, next to each other in one SVG on white."""
    return draw([loss_chart(events), world_size_chart(events)], css_colors=False)


def figures(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """Return (label, figure, remark) of each headline card."""
    steps = last_steps(list(events))
    starts = [event for event in events if isinstance(event, Started)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    found = []
    if steps:
        found.append(("steps", f"{steps[-1].step:,}", f"{steps[-1].tokens:,} tokens"))
        found.append(("final loss", f"{steps[-1].loss:.3f}", STEP_METRICS["loss"].unit))
    if len(evaluations) > 1:
        before, after = evaluations[0].heldout_bits_per_byte, evaluations[-1].heldout_bits_per_byte
        found.append(("held-out bits per byte", f"{before:.2f} → {after:.2f}", f"{1 - after / before:.0%} less"))
    if steps:
        found.append(
            ("throughput", f"{statistics.median(step.tokens_per_s for step in steps):,.0f}", "tokens/s, median")
        )
        mfu, source = statistics.median(step.mfu for step in steps), starts[-1].peak_source if starts else ""
        found.append(("MFU", utilisation(mfu), f"of {source}"))
        if starts and starts[-1].hardware_flops_per_token > starts[-1].flops_per_token:
            again = starts[-1].hardware_flops_per_token / starts[-1].flops_per_token
            found.append(("HFU", utilisation(mfu * again), "includes recomputation in backward"))
    if left_out := sum(not step.updated for step in steps):
        found.append(("steps skipped", f"{left_out:,}", "gradients not finite, or spikes"))
    waits = [event.data_waits_s for event in events if isinstance(event, Waited)]
    if waits:
        longest = max(waits[-1])
        found.append(("waited for data", f"{longest:.1f} s", f"rank {waits[-1].index(longest)}, since the last start"))
    saves = [event for event in events if isinstance(event, Saved)]
    if saves:
        failed = sum(isinstance(event, SaveFailed) for event in events)
        stall_s = sum(event.stall_s for event in saves)
        found.append(("waited for saves", f"{stall_s:.1f} s", f"{len(saves)} checkpoints, {failed} failed"))
    if starts:
        found.append(("starts", str(len(starts)), f"{max(start.world_size for start in starts)} workers at most"))
        seconds = events[-1].time_s - events[0].time_s
        found.append(("time", f"{seconds / 60:.1f} min", "from the first start to the last event"))
    return found


def loss_chart(events: Sequence[Event]) -> Chart:
    """Return training loss, smoothed and raw, and held-out loss, against the step."""
    raw = [(float(step.step), step.loss) for step in last_steps(list(events))]
    held_out = [(float(event.step), event.heldout_loss) for event in events if isinstance(event, Evaluated)]
    lines = [Series("training", smooth(raw)), Series("each step", raw, "faint"), Series("held-out", held_out, "points")]
    return Chart("Loss", "step", STEP_METRICS["loss"].unit, [line for line in lines if line.points])


def forgetting_chart(events: Sequence[Event]) -> Chart:
    """Return how much worse the held-out sets of the run before are than at step 0, against the step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if isinstance(event, Evaluated):
            for name, worse in list(event.forgetting.items())[:_SETS_DRAWN]:
                found.setdefault(name, []).append((float(event.step), worse))
    lines = [Series(name, points) for name, points in found.items()]
    return Chart("Forgetting", "step", "held-out loss since step 0, nats/token", lines)


def _forgetting(events: Sequence[Event]) -> str:
    """Return the table of the held-out sets of the run before; empty without."""
    compared = [event for event in events if isinstance(event, Evaluated) and event.forgetting]
    if not compared:
        return ""
    last, most = (
        compared[-1],
        {name: max(one.forgetting.get(name, 0.0) for one in compared) for name in compared[-1].forgetting},
    )
    columns = [("held-out set of the run before", False), ("loss at step 0", True), (f"at step {last.step}", True)]
    columns += [("forgetting", True), ("most", True)]
    rows = []
    for name, worse in last.forgetting.items():
        now = last.losses.get(name, worse)
        rows.append(((name, f"{now - worse:.3f}", f"{now:.3f}", f"{worse:+.3f}", f"{most[name]:+.3f}"), False))
    return grid("Forgetting", columns, rows)


def source_chart(events: Sequence[Event]) -> Chart:
    """Return the smoothed training loss of the sources with most tokens, against the step."""
    steps = last_steps(list(events))
    lines = []
    for name in list(_tokens(steps))[:_SOURCES_DRAWN]:
        key = f"loss/{name}"
        points = [(float(step.step), step.extra[key]) for step in steps if key in step.extra]
        lines += [Series(name, smooth(points))] if points else []
    return Chart("Training loss by source", "step", STEP_METRICS["loss"].unit, lines)


def _tokens(steps: Sequence[StepDone]) -> dict[str, int]:
    """Return the tokens of each source, most first; empty if steps do not tell of sources."""
    found: collections.Counter[str] = collections.Counter()
    for step in steps:
        for key, tokens in step.extra.items():
            if key.startswith(_OF_SOURCE):
                found[key.removeprefix(_OF_SOURCE)] += int(tokens)
    return dict(found.most_common())


def _sources(steps: Sequence[StepDone]) -> str:
    """Return the table of the sources; losses are means by tokens over the last tenth of the steps."""
    columns = [("source", False), ("loss", True), ("tokens", True), ("share", True), ("times read", True)]
    tokens, late = _tokens(steps), steps[-(-len(steps) * 9 // 10) - 1 :]
    rows = []
    for name, count in tokens.items():
        keys = f"loss/{name}", f"{_OF_SOURCE}{name}"
        parts = [(step.extra[keys[0]], step.extra[keys[1]]) for step in late if keys[0] in step.extra]
        counted = sum(many for _, many in parts)
        loss = f"{sum(one * many for one, many in parts) / counted:.3f}" if counted else "none yet"
        share, epochs = count / max(1, sum(tokens.values())), steps[-1].extra.get(f"epochs/{name}", 0.0)
        rows.append(((name, loss, f"{count:,}", f"{share:.1%}", f"{epochs:.2f}"), False))
    return grid("Sources", columns, rows)


def throughput_chart(events: Sequence[Event]) -> Chart:
    """Return tokens per second of all workers, against the step."""
    points = [(float(step.step), step.tokens_per_s) for step in last_steps(list(events))]
    return Chart("Throughput", "step", STEP_METRICS["tokens_per_s"].unit, [Series("tokens/s", points)], from_zero=True)


def world_size_chart(events: Sequence[Event]) -> Chart:
    """Return workers over wall time: the group's size from each start to its last step, 0 in the gaps."""
    begin = events[0].time_s if events else 0.0
    points: list[tuple[float, float]] = []
    last = begin
    for event in events:
        if isinstance(event, Started):
            points += [((last - begin) / 60, 0.0)] if points else []
            points.append(((event.time_s - begin) / 60, float(event.world_size)))
        last = event.time_s if isinstance(event, StepDone | Started) else last
    if points:
        points.append(((last - begin) / 60, points[-1][1]))
    restarts = [point for point in points if point[1] > 0][1:-1]
    lines = [Series("workers", points, "step"), Series("restart", restarts, "points")]
    return Chart(
        "World size", "minutes", STEP_METRICS["world_size"].unit, [line for line in lines if line.points], True, True
    )


def norm_chart(events: Sequence[Event]) -> Chart:
    """Return gradient norm before clipping, against the step."""
    points = [(float(step.step), step.grad_norm) for step in last_steps(list(events)) if math.isfinite(step.grad_norm)]
    return Chart("Gradient norm", "step", "before clipping", [Series("gradient norm", points)], from_zero=True)


def rate_chart(events: Sequence[Event]) -> Chart:
    """Return learning rate, against the step."""
    points = [(float(step.step), step.learning_rate) for step in last_steps(list(events))]
    return Chart("Learning rate", "step", "", [Series("learning rate", points)], from_zero=True)


def wait_chart(events: Sequence[Event]) -> Chart:
    """Return the part of each step spent waiting for data, on the rank that waited longest, against the step."""
    steps = [step for step in last_steps(list(events)) if step.step_time_s > 0]  # 0 is what no run writes
    points = [(float(step.step), min(1.0, step.data_wait_s / step.step_time_s)) for step in steps]
    return Chart("Waiting for data", "step", "part of the step", [Series("slowest rank", points)], from_zero=True)


def _when(events: Sequence[Event]) -> str:
    return (
        time.strftime("Begun %Y-%m-%d %H:%M UTC", time.gmtime(events[0].time_s)) if events else "Nothing happened yet"
    )


def _rows(events: Sequence[Event]) -> Iterable[tuple[str, str]]:
    for event in events:
        if not isinstance(event, StepDone | Sampled | Waited | Monitored):
            yield time.strftime("%H:%M:%S", time.gmtime(event.time_s)), event.describe()
