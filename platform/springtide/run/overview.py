"""All runs below a root, a row each: what trains where, how far, at what cost."""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

from springtide.config import RUN_CONFIG
from springtide.errors import in_one_line
from springtide.events import Started
from springtide.run.folder import REPORT, Run
from springtide.store import Folder
from springtide.track.ledger import Prices, ledger
from springtide.track.run_state import UNKNOWN, run_state

_AT_ONCE = 16
"""Runs that are read at the same time: the store's answers are waited for together."""


class RunRow(NamedTuple):
    """A run in short."""

    id: str
    state: str
    """As ``Run.status``, or in one line why it cannot be read."""
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
    where: str = ""
    """Workers, nodes and market types of its last worker group; empty before the first."""
    has_page: bool = False
    """Whether its report is in its folder."""


def overview(root: str) -> list[RunRow]:
    """Return a row for each run directly below ``root``, the newest event first. A run that cannot be read has a row, too.

    Lists ``root`` once, and each folder in it once; a run costs one more listing, its config and its journal's files. Sixteen
    runs are read at a time. One listing of everything would page through the files of all checkpoints.

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
        names = folder.names()
        return _read(run, REPORT in names) if RUN_CONFIG in names else None
    except Exception as error:  # whatever is wrong with one run, the others are listed
        return RunRow(run.id, f"cannot be read: {in_one_line(error)}", 0, 0, None, 0, 0.0, 0.0, 0.0, 0.0)


def _read(run: Run, has_page: bool) -> RunRow:
    config, timeline = run.config, run.timeline
    told = timeline.condensed()
    book = ledger(told, Prices.set_in(config.track))
    tries = timeline.tries  # in the order of writing, whatever clocks say
    last = {name: tries[name][-1].item() for name in ("step", "loss", "world_size")} if len(tries) else {}
    state = run_state(timeline.events).known
    starts = [event for event in timeline.events if isinstance(event, Started)]
    return RunRow(
        id=run.id,
        state=state,
        step=int(last.get("step", 0)),
        num_steps=config.num_steps,
        loss=last.get("loss"),
        workers=int(last.get("world_size", 0)) if state == UNKNOWN else 0,
        goodput=round(book.goodput, 6),
        dollars=round(book.total_dollars, 6),
        energy_kwh=round(book.total_kwh, 9),
        seen_s=max((event.time_s for event in told), default=0.0),
        where=starts[-1].where if starts else "",
        has_page=has_page,
    )
