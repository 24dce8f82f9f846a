"""The HTML report of a run: one self-contained page; and its main charts as a picture, for a README or a notebook."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from springtide.errors import printable
from springtide.events import Evaluated, Event, Monitored, Sampled, Saved, SaveFailed, Started, Waited
from springtide.events.metrics import STEP_METRICS, utilisation
from springtide.run.report.charts import draw
from springtide.run.report.html import Cell, cards, data_block, grid, more, page, table, text
from springtide.run.report.run_charts import curves, loss_chart, pictures, source_tokens, world_size_chart
from springtide.tracking.ledger import Ledger, Prices, Restart, ledger
from springtide.tracking.run_state import run_state
from springtide.tracking.timeline import StepColumns, Timeline

_ROWS, _SAMPLES, _SAMPLE_CHARACTERS = 200, 10, 2000
"""Limits of the page: number of rows of a table, number of generated texts, and characters of one such text."""
_CELL_CHARACTERS = 500
_UNITS = {"spent": "worker-seconds", "energy_kwh": "energy, kWh"}
"""Field of the ledger (time and cost by category) -> heading of its column. Other columns have the field's name as heading."""
_JOULES = 3.6e6
"""Joules in a kilowatt-hour."""
_LAST = 20
"""The page gives a run's loss as the mean over the last 1/20 of its steps, because losses of single steps are noisy."""


class RunFacts(NamedTuple):
    """Facts that a run's page shows and that are not in its journal."""

    config_yaml: str = ""
    """All settings of the run, as YAML."""
    about: Sequence[tuple[str, Cell]] = ()
    """(label, text or link) of each row to add to the table at the top of the page."""
    links: Mapping[str, str] = {}
    """Label -> URL or path of each file or page to link, such as the dataset."""
    checkpoints: Sequence[str] = ()
    """Names of the committed checkpoints, oldest first."""
    prices: Prices = Prices()


def render(run_id: str, timeline: Timeline, facts: RunFacts = RunFacts()) -> str:  # noqa: B008
    """Return the HTML report of a run.

    Args:
        run_id: name of the run, the heading of the page.
        timeline: the run's journal.
        facts: facts that are not in the journal.
    """
    shown = "".join(f"<figure>{draw([chart])}</figure>" for chart in pictures(timeline))
    found = parts(timeline, facts)
    sections = [
        *(f'<section id="{name}">{found.pop(name)}</section>' for name in ("about", "figures")),
        f'<div id="charts" class="charts">{shown}</div>',
        *(f'<section id="{name}">{section}</section>' for name, section in found.items()),
        data_block(json.dumps(curves(timeline), allow_nan=False)),
    ]
    script = Path(__file__).with_suffix(".js").read_text()
    return page(run_id, sections, script)


def parts(timeline: Timeline, facts: RunFacts) -> dict[str, str]:
    """Return name -> HTML of each section of the page, except the charts."""
    events, steps = timeline.events, timeline.steps
    config = f"<details><summary>The resolved config</summary><pre>{html.escape(facts.config_yaml)}</pre></details>"
    return {
        "about": f"<p>{html.escape(_when(timeline))}</p>" + _about(timeline, facts),
        "figures": cards(figures(timeline)),
        "sources": _sources(steps),
        "evaluations": _evaluations(events) + _forgetting(events),
        "ledger": _ledger(ledger(timeline.condensed(), facts.prices)) if events else "",
        "checkpoints": _checkpoints(events, facts.checkpoints),
        "samples": _samples(events),
        "events": _events(events),
        "links": table("Links", facts.links.items()) if facts.links else "",
        "config": config if facts.config_yaml else "",
    }


def charts(timeline: Timeline) -> str:
    """Return the charts of loss and world size side by side, as one SVG on a white background."""
    return draw([loss_chart(timeline), world_size_chart(timeline)], css_colors=False)


def handle(run_id: str, timeline: Timeline) -> str:
    """Return the HTML that a notebook shows for a run: name, state and charts. Special characters in texts are escaped."""
    steps, state = timeline.steps, run_state(timeline.events).describe()
    at = f", step {int(steps['step'][-1]):,}" if len(steps) and " at step " not in state else ""
    said = printable(f"<p><b>{html.escape(run_id)}</b>: {html.escape(state + at)}</p>")
    return said + (charts(timeline) if len(timeline.steps) else "")


def figures(timeline: Timeline) -> list[tuple[str, str, str]]:
    """Return (label, figure, remark) of each headline box of the page: results first, then speed, then waits and skipped
    steps."""
    steps, events = timeline.steps, timeline.events
    starts = [event for event in events if isinstance(event, Started)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    found = []
    if len(steps):
        found.append(("steps", f"{steps['step'][-1]:,.0f}", f"{steps['tokens'][-1]:,.0f} tokens"))
    if len(evaluations) > 1:
        before, after = evaluations[0].heldout_bits_per_byte, evaluations[-1].heldout_bits_per_byte
        less = f"{1 - after / before:.0%} less" if before else ""
        found.append(("held-out bits per byte", f"{before:.2f} → {after:.2f}", less))
    if len(steps):
        last = steps["loss"][-max(1, len(steps) // _LAST) :]
        name = "final loss" if run_state(events).is_over else "loss"
        unit = STEP_METRICS["loss"].unit
        found.append((name, f"{_mean(last):.3f}", unit if len(last) == 1 else f"{unit}, last {len(last):,} steps"))
    if starts:
        begin, end = timeline.spans()
        found.append(("time", _duration(end - begin), "from the first start to the last event"))
    if len(steps):
        found.append(("throughput", f"{_median(steps['tokens_per_s']):,.0f}", "tokens/s, median"))
        mfu, source = _median(steps["mfu"]), starts[-1].peak_source if starts else ""
        found.append(("MFU", utilisation(mfu), f"of {source}"))
        if starts and starts[-1].hardware_flops_per_token > starts[-1].flops_per_token > 0:
            again = starts[-1].hardware_flops_per_token / starts[-1].flops_per_token
            found.append(("HFU", utilisation(mfu * again), "includes recomputation in backward"))
    if starts:
        found.append(("starts", f"{len(starts):,}", f"{max(start.world_size for start in starts)} workers at most"))
    if excluded := int((steps["updated"] == 0).sum()) if len(steps) else 0:
        found.append(("steps skipped", f"{excluded:,}", "gradients not finite, or spikes"))
    waits = [event.data_waits_s for event in events if isinstance(event, Waited) and event.data_waits_s]
    if waits:
        longest = max(waits[-1])
        found.append(("waited for data", f"{longest:.1f} s", f"rank {waits[-1].index(longest)}, since the last start"))
    saves = [event for event in events if isinstance(event, Saved)]
    if saves:
        failed = sum(isinstance(event, SaveFailed) for event in events)
        stall_s = sum(event.stall_s for event in saves)
        found.append(("waited for saves", _duration(stall_s), f"{len(saves):,} checkpoints, {failed:,} failed"))
    return found


def _duration(seconds: float) -> str:
    """Return a duration as text in a suitable unit: 7200 s as "2.0 hours", 90 s as "90.0 s"."""
    sizes = ((86_400, "days"), (3600, "hours"), (60, "min"))
    size, unit = next(((size, unit) for size, unit in sizes if seconds >= 2 * size), (1, "s"))
    return f"{seconds / size:,.1f} {unit}"


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _about(timeline: Timeline, facts: RunFacts) -> str:
    """Return the HTML table at the top of the page: state, model, hardware, and the rows in ``facts.about``."""
    events, state = timeline.events, run_state(timeline.events)
    said = state.describe()
    if state.known != state.word:  # the journal cannot show if the driver is alive: add the last event's time
        word = "training" if len(timeline.steps) else state.word
        said = f"{word}, as of its last event, {_clock(timeline.spans()[1])} UTC"
    rows: list[tuple[str, Cell]] = [("state", _cut(said))] if events else []
    starts = [event for event in events if isinstance(event, Started)]
    if starts:
        last = starts[-1]
        rows += [("model", f"{last.num_parameters:,} parameters")] if last.num_parameters else []
        rows.append(("workers", last.where))
        rows += [("peak of a device", last.peak_source)] if last.peak_source else []
    rows += [(key, _cut(value) if isinstance(value, str) else value) for key, value in facts.about]
    return table("", rows) if rows else ""


def _evaluations(events: Sequence[Event]) -> str:
    """Return the HTML table of evaluations, newest first."""
    found = [event for event in events if isinstance(event, Evaluated)][::-1]
    if not found:
        return ""
    columns = [("step", True), ("held-out loss", True), ("bits per byte", True)]
    averages = any(one.ema_heldout_loss is not None for one in found)
    columns += [("of the averaged weights", True)] if averages else []
    sets = list(dict.fromkeys(name for one in found[:_ROWS] for name in one.corpora))[:8]
    columns += [(name, True) for name in sets]
    rows = []
    for one in found[:_ROWS]:
        averaged = ["" if one.ema_heldout_loss is None else f"{one.ema_heldout_loss:.4f}"] if averages else []
        each = [f"{one.corpora[name]:.4f}" if name in one.corpora else "" for name in sets]
        figures = [f"{one.step:,}", f"{one.heldout_loss:.4f}", f"{one.heldout_bits_per_byte:.4f}", *averaged, *each]
        rows.append((figures, False))
    return grid("Evaluations", columns, rows) + more(len(found) - _ROWS)


def _forgetting(events: Sequence[Event]) -> str:
    """Return the HTML table of forgetting: how much the loss on the held-out sets of the base run has grown. Empty if there are
    no such sets."""
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


def _sources(steps: StepColumns) -> str:
    """Return the HTML table of the data sources with their tokens and losses; empty without sources. A loss is the mean over
    the last tenth of the steps, weighted by tokens."""
    columns = [("source", False), ("loss", True), ("tokens", True), ("share", True), ("times read", True)]
    tokens, late = source_tokens(steps), slice(-(-len(steps) * 9 // 10) - 1, None)
    rows = []
    for name, count in tokens.items():
        loss, weight = "none yet", steps.extra[f"step_tokens/{name}"][late]
        if (losses := steps.extra.get(f"loss/{name}")) is not None:
            known = np.isfinite(losses[late]) & np.isfinite(weight) & (weight > 0)
            counted = weight[known].sum()
            loss = f"{(losses[late][known] * weight[known]).sum() / counted:.3f}" if counted else loss
        share, read = count / max(1, sum(tokens.values())), steps.extra.get(f"epochs/{name}")
        epochs = float(np.nan_to_num(read[-1])) if read is not None else 0.0
        rows.append(((name, loss, f"{count:,}", f"{share:.1%}", f"{epochs:.2f}"), False))
    return grid("Sources", columns, rows) if rows else ""


def _ledger(book: Ledger) -> str:
    """Return the HTML of two tables: the run's time by category (such as productive), with cost and energy if known; and the
    restarts."""
    amounts = {
        field.name: value
        for field in dataclasses.fields(book)
        if isinstance(value := getattr(book, field.name), dict)
        and value.keys() <= book.spent.keys()
        and any(value.values())
    }
    if not amounts:
        return ""
    units = dict(_UNITS)
    joules = {kind: kwh * _JOULES for kind, kwh in amounts.get("energy_kwh", {}).items()}
    if 0 < sum(joules.values()) < _JOULES / 10:
        amounts["energy_kwh"], units["energy_kwh"] = joules, "energy, J"
    heads = [(units.get(name, name.replace("_", " ")), True) for name in amounts]
    rows = []
    for kind, seconds in book.spent.items():
        figures = [f"{each.get(kind, 0.0):,.2f}" for each in amounts.values()]
        if seconds:
            rows.append(((kind.replace("_", " "), f"{seconds / book.held:.1%}", *figures), False))
    sums = [f"{sum(each.values()):,.2f}" for each in amounts.values()]
    rows.append((("all", f"{book.goodput:.1%} in new steps", *sums), True))
    spent = grid("Where the time went", [("kind", False), ("share", True), *heads], rows)
    if not book.restarts:
        return spent
    names = [field.name for field in dataclasses.fields(Restart) if field.name not in ("time_s", "cause", "step")]
    columns = [
        ("time (UTC)", False),
        ("from step", True),
        *((_heading(name), True) for name in names),
        ("cause", False),
    ]
    lines = []
    for one in book.restarts[::-1][:_ROWS]:
        figures = [_amount(getattr(one, name)) for name in names]
        lines.append(((_clock(one.time_s), f"{one.step:,}", *figures, _cut(one.cause)), False))
    return spent + grid("Restarts", columns, lines) + more(len(book.restarts) - _ROWS)


def _heading(name: str) -> str:
    """Return the column heading of a ledger field, such as "gap [s]" for ``gap_s``."""
    return f"{name.removesuffix('_s').replace('_', ' ')} [s]" if name.endswith("_s") else name.replace("_", " ")


def _amount(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else _cut(str(value))


def _checkpoints(events: Sequence[Event], kept: Sequence[str]) -> str:
    """Return the HTML table of checkpoints, newest first. ``kept``: names of the checkpoints that were not deleted since."""
    saves = {event.name: event for event in events if isinstance(event, Saved)}
    names = list(dict.fromkeys([*kept[::-1], *reversed(saves)]))
    if not names:
        return ""
    columns = [
        ("checkpoint", False),
        ("kept", False),
        ("MiB", True),
        ("MiB written", True),
        ("time to write [s]", True),
    ]
    rows = []
    for name in sorted(names, reverse=True)[:_ROWS]:
        save, is_kept = saves.get(name), "yes" if name in kept else "no"
        sizes = [f"{size / 2**20:,.1f}" for size in (save.size_bytes, save.written_bytes)] if save else ["", ""]
        rows.append(((name, is_kept, *sizes, f"{save.save_time_s:.2f}" if save else ""), False))
    return grid("Checkpoints", columns, rows) + more(len(names) - _ROWS)


def _samples(events: Sequence[Event]) -> str:
    """Return the HTML of the sample texts that the run generated, newest first."""
    found = [event for event in events if isinstance(event, Sampled)][::-1]
    shown = (
        text(f"Sample at step {one.step}", _cut(one.prompt + one.text, _SAMPLE_CHARACTERS)) for one in found[:_SAMPLES]
    )
    return "".join(shown) + more(len(found) - _SAMPLES)


def _events(events: Sequence[Event]) -> str:
    """Return the HTML table of events, newest first."""
    kept = [event for event in events if not (isinstance(event, Monitored) and not event.xids)]
    found = [event for event in kept if not isinstance(event, Sampled | Waited)][::-1]
    return table("Events", _rows(found[:_ROWS])) + more(len(found) - _ROWS)


def _rows(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    for event in events:
        yield _clock(event.time_s), _cut(event.describe())


def _cut(value: str, most: int = _CELL_CHARACTERS) -> str:
    return value if len(value) <= most else f"{value[:most]}…"


def _clock(time_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(time_s))


def _when(timeline: Timeline) -> str:
    if not timeline.events and not len(timeline.tries):
        return "Nothing happened yet"
    begin, end = map(time.gmtime, timeline.spans())
    return time.strftime("Begun %Y-%m-%d %H:%M UTC", begin) + time.strftime(", last event %Y-%m-%d %H:%M:%S UTC", end)
