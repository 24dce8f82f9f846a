"""All runs below a root, a row each: what trains where, how far, at what cost."""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

from springtide.config import RUN_CONFIG
from springtide.errors import SpringtideError
from springtide.events import Decided, Started, StepDone, Stopped
from springtide.run.folder import Run
from springtide.store import Folder
from springtide.track.journal import state_of
from springtide.track.ledger import Prices, ledger

_AT_ONCE = 16
"""Runs that are read at the same time: the store's answers are waited for together."""


class RunRow(NamedTuple):
    """A run in short."""

    id: str
    state: str
    """``finished``, ``stopped``, ``failed``, ``running or killed``, ``paused``, ``not started``, or why it cannot be read."""
    step: int
    num_steps: int
    loss: float | None
    """Training loss of the last step [nats/token]."""
    workers: int
    goodput: float
    dollars: float
    energy_kwh: float
    """Energy that its workers counted [kWh]; 0 if they did not."""
    seen_s: float
    """When its last event was, seconds since 1970; 0 without one."""


def overview(root: str) -> list[RunRow]:
    """Return a row for each run directly below ``root``, the newest event first. A run that cannot be read has a row, too.

    Args:
        root: folder or URL, as ``run.root``.

    Examples:
        >>> [(row.id, row.state, row.step) for row in overview("runs") if row.id == "mine"]
        [('mine', 'finished', 8)]
    """
    folder = Folder(root)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
        rows = threads.map(lambda name: _row(folder / name), folder.names())
        return sorted((row for row in rows if row is not None), key=lambda row: (-row.seen_s, row.id))


def _row(folder: Folder) -> RunRow | None:
    run = Run(folder)
    try:
        if not folder.exists(RUN_CONFIG):
            return None
        config, timeline = run.config, run.timeline
    except (SpringtideError, OSError) as error:
        return RunRow(run.id, f"cannot be read: {error}", 0, 0, None, 0, 0.0, 0.0, 0.0, 0.0)
    prices = config.track
    told, events = timeline.condensed(whole=1), timeline.events
    book = ledger(told, Prices(prices.price, prices.spot_price))
    last = max((event for event in told if isinstance(event, StepDone)), key=lambda event: event.time_s, default=None)
    last_said = [event for event in events if isinstance(event, Decided | Started)][-1:]
    is_paused = any(isinstance(one, Decided) and one.is_about_pause for one in last_said)
    state = state_of(events) if any(isinstance(event, Started | Stopped) for event in events) else "not started"
    return RunRow(
        id=run.id,
        state="paused" if is_paused and state == "running or killed" else state,
        step=last.step if last else 0,
        num_steps=config.num_steps,
        loss=last.loss if last else None,
        workers=last.world_size if last and state == "running or killed" and not is_paused else 0,
        goodput=round(book.goodput, 6),
        dollars=round(book.total_dollars, 6),
        energy_kwh=round(book.total_kwh, 9),
        seen_s=max((event.time_s for event in told), default=0.0),
    )
